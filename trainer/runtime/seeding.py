"""Randomness keyed by what it belongs to, so that no generator state decides a result."""

import hashlib
import os
import random
from typing import Any

import numpy as np
import torch


def key(*parts: int | str) -> int:
    """A 63-bit seed from its parts: equal parts, equal seed; on every machine and Python
    version.
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def seed_step(seed: int, *, step: int, rank: int) -> None:
    """Seed every generator for one optimizer step, from 1: dropout of step k does not depend on how
    the run got there.

    The key counts the steps before this one, as the runs of all earlier versions do.
    """
    value = key("step", seed, step - 1, rank)
    torch.manual_seed(value)
    random.seed(value)
    np.random.seed(value % 2**32)


def use_deterministic_kernels() -> None:
    """Fix the order of sums on a GPU (attention's backward pass, cuBLAS, NCCL).

    Call it before the first CUDA call. Torch raises where an operation has no such kernel.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("NCCL_ALGO", "Ring")
    os.environ.setdefault("NCCL_PROTO", "Simple")
    torch.use_deterministic_algorithms(True)
    # nothing reads memory before it is written; to fill it costs a pass over all of it
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


class GeneratorState:
    """States of the generators that a run on `device` draws from; each step seeds them anew."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain containers: it loads without pickle."""
        name, keys, position, has_gauss, cached = np.random.get_state()
        version, internal, gauss_next = random.getstate()
        words = torch.from_numpy(np.int64(keys))
        state: dict[str, Any] = {
            "cpu": torch.get_rng_state(),
            "numpy": [name, words, int(position), int(has_gauss), float(cached)],
            "random": [version, list(internal), gauss_next],
        }
        if self._device.type == "cuda":
            state["cuda"] = torch.cuda.get_rng_state(self._device)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["cpu"])
        name, keys, position, has_gauss, cached = state["numpy"]
        np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
        version, internal, gauss_next = state["random"]
        random.setstate((version, tuple(internal), gauss_next))
        if "cuda" in state and self._device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda"], self._device)
