"""Memory of this process, in GiB (2**30 bytes)."""

import psutil
import torch

GIB = 2**30


def memory_metrics(device: torch.device) -> dict[str, float]:
    """Resident memory of the host process and, on CUDA, the allocator's peak since the last call."""
    metrics = {"memory/cpu/rss_gib": psutil.Process().memory_info().rss / GIB}
    if device.type == "cuda":
        metrics["memory/max_allocated_gib"] = torch.cuda.max_memory_allocated(device) / GIB
        metrics["memory/max_reserved_gib"] = torch.cuda.max_memory_reserved(device) / GIB
        torch.cuda.reset_peak_memory_stats(device)
    return metrics
