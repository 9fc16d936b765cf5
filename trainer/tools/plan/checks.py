"""Checks of memory and disk space, for `plan` and `doctor`."""

from collections.abc import Iterator
from pathlib import Path

from trainer.checkpoint import fsio, layout
from trainer.checkpoint.retention import KEEP_FEWER, SPARE, existing_parent
from trainer.config import Config
from trainer.launch.checks import Checked, Launch
from trainer.runtime.text import readable
from trainer.tools.plan import memory
from trainer.tools.plan.disk import export_bytes, most_checkpoints, shard_bytes
from trainer.tools.plan.memory import GIB, Change, MemoryPlan


def memory_and_disk(launch: Launch) -> Iterator[Checked]:
    """Check GPU memory, host memory and disk space for training on this machine."""
    config = launch.config
    plan = memory.planner(config)(Change(launch.num_ranks * launch.layout.num_nodes))
    limit_gib = memory.default_memory_gib(config, launch.num_ranks)
    yield check_memory(
        plan, limit_gib, fix="`plan` with the same arguments names the smallest change that fits"
    )
    host_bytes = int(plan.host_gib * launch.num_ranks * GIB)
    total_bytes = memory.host_memory_bytes()
    if launch.num_gpus and host_bytes > total_bytes:
        what = f"the run needs {readable(host_bytes)} of host memory, but this machine has only {readable(total_bytes)}"
        yield Checked("fail", what, "set trainer.checkpoint.async_save=false, or use more machines")
    yield check_disk(config, plan)


def check_memory(plan: MemoryPlan, limit_gib: float, *, fix: str) -> Checked:
    """Compare the memory that a rank needs with a limit."""
    kind = "GPU" if plan.job.is_cuda else "host"
    what = f"a rank needs {plan.needed_gib:.1f} of {limit_gib:.1f} GiB of {kind} memory (predicted)"
    if plan.needed_gib <= limit_gib:
        return Checked("ok", what)
    return Checked("fail", what, fix)


def check_disk(config: Config, plan: MemoryPlan) -> Checked:
    """Check the space for checkpoints: warn if not all of them fit, fail if not even one fits."""
    run_dir = Path(config.trainer.default_local_dir)
    exported_bytes = export_bytes(config, plan)
    one_bytes = shard_bytes(plan) + exported_bytes
    most = most_checkpoints(config)
    number = max(1, (most or 1) - len(layout.committed(run_dir)))
    kept = "all of them kept" if most is None else f"at most {most} at once"
    free_bytes = fsio.free_bytes(existing_parent(run_dir))
    what = (
        f"{run_dir}: checkpoints of {readable(one_bytes)} ({readable(exported_bytes)} of it "
        f"huggingface/), {kept}; {readable(number * one_bytes)} to come, {readable(free_bytes)} free"
    )
    if free_bytes >= number * one_bytes * SPARE:
        return Checked("ok", what)
    fix = f"free some space, choose a different disk, or {KEEP_FEWER}"
    return Checked("fail" if free_bytes < one_bytes * SPARE else "warn", what, fix)
