"""The checks of `doctor --run`: compare short runs with each other and with the plan."""

import re
import statistics
from collections.abc import Callable

import numpy as np

from trainer.launch.checks import Checked
from trainer.tools.verify.equality import compare_runs
from trainer.tools.verify.runs import (
    NUM_COMPARED,
    NUM_STEPS,
    NUM_WARMUP_STEPS,
    RunFailedError,
    Runs,
    ShortRun,
)

TOLERANCES = {"train/loss": 1e-6, "train/grad_norm": 1e-5}
"""Largest allowed relative difference between two ways to run a batch in float32. In bfloat16, the
limit is at least `NUM_ROUNDINGS` times the difference between the same steps in bfloat16 and in
float32.
"""
NUM_ROUNDINGS = 4
FLOAT32 = "model.fsdp_config.param_dtype=float32"
MEMORY_MARGIN = 1.1
OUT_OF_MEMORY = re.compile(r"out of memory|OutOfMemory", re.IGNORECASE)
MFU = "throughput/train/mfu"


def check_training(runs: Runs) -> Checked:
    """Train the recipe without an interruption, and report the result of its self-check."""
    found = re.search(r"^self-check .*\n\s+(equal .*)$", runs.straight.said(), re.MULTILINE)
    if found is None:
        return Checked("fail", "the log of the run has no self-check")
    text = f"{NUM_STEPS} steps on {runs.num_ranks} ranks; loss and gradient as in transformers"
    return Checked("ok", f"{text}: {found[1]}")


def check_ranks(runs: Runs) -> Checked:
    """Compare the steps on one rank with those on all ranks."""
    if runs.num_ranks == 1:
        return Checked("skip", "there is only one rank: run with more than one rank")
    try:
        alone = runs.train("one_rank", num_ranks=1, until=NUM_COMPARED)
    except RunFailedError as error:
        if OUT_OF_MEMORY.search(str(error)):
            return Checked("skip", "the model does not fit on one rank: use a smaller model")
        raise
    fix = "find the broken GPU or link: run with fewer ranks, using CUDA_VISIBLE_DEVICES"
    return _same_steps(runs, alone, f"1 rank and {runs.num_ranks} ranks", fix)


def check_packing(runs: Runs) -> Checked:
    """Compare steps with packed documents with steps that run documents one by one."""
    if "documents are packed" not in runs.straight.said():
        return Checked("skip", "documents of this model are never packed")
    alone = runs.train("alone", "model.attention=per_document", until=NUM_COMPARED)
    fix = "train with model.attention=per_document, and report the architecture"
    return _same_steps(runs, alone, "packed documents and separate documents", fix)


def _same_steps(
    runs: Runs,
    other: ShortRun,
    what: str,
    fix: str,
) -> Checked:
    """Compare the first steps of another run with the uninterrupted run."""
    found = _differences(runs.straight, other)
    allowed = dict(TOLERANCES)
    if runs.config.model.fsdp_config.param_dtype != "float32":
        precise = runs.train(f"float32_beside_{other.run_dir.name}", FLOAT32, until=NUM_COMPARED)
        for key, rounding in _differences(runs.straight, precise).items():
            allowed[key] = max(allowed[key], NUM_ROUNDINGS * rounding)
    texts = [f"{key} differs by {found[key]:.1e} (allowed {allowed[key]:.0e})" for key in found]
    what = f"{what}: {', '.join(texts)} (relative, over {NUM_COMPARED} steps)"
    is_same = all(found[key] <= allowed[key] < 1 for key in found)  # False for NaN
    return Checked("ok", what) if is_same else Checked("fail", what, fix)


def _differences(left: ShortRun, right: ShortRun) -> dict[str, float]:
    """Return the largest relative difference in the first steps, by key; NaN if a value is NaN."""
    pairs = list(zip(left.rows()[:NUM_COMPARED], right.rows()[:NUM_COMPARED], strict=True))
    found = {}
    for key in TOLERANCES:
        values = [abs(a[key] - b[key]) / abs(a[key]) for a, b in pairs]
        found[key] = float(np.max(values))  # NaN if a value is NaN
    return found


def check_resume(runs: Runs) -> Checked:
    """Compare a run that was killed (SIGKILL) and resumed with an uninterrupted run, bit for bit."""
    killed = runs.train_killed()
    if killed is None:
        return Checked("skip", "the runs finished before they could be killed: use a larger batch")
    run, saved_before, resumed_from = killed
    if resumed_from < saved_before:
        what = f"step {saved_before} was saved, but the killed run resumed from {resumed_from}"
        return Checked("fail", what, "move TMPDIR to another file system")
    straight = runs.straight.run_dir
    found = compare_runs(straight, run.run_dir, steps=NUM_STEPS)
    if not found.differences:
        what = (
            f"killed, and resumed from step {resumed_from}: {found.num_equal} values and "
            f"tensors of {NUM_STEPS} steps are equal bit for bit"
        )
        return Checked("ok", what)
    repeated = compare_runs(straight, runs.train("straight_again").run_dir, steps=NUM_STEPS)
    if not repeated.differences:
        what = f"a resumed run differs from an uninterrupted one, first at {found.differences[0]}"
        return Checked("fail", what)
    what = (
        f"training is not deterministic: two uninterrupted runs differ at {repeated.differences[0]}"
    )
    fix = "trainer.deterministic=true, model.compile=false, and no random model code"
    return Checked("fail", what, fix)


def check_memory(runs: Runs) -> Checked:
    """Compare the peak memory of a rank with the plan, which is an upper bound."""
    key = "memory/max_reserved_gib" if runs.is_on_gpu else "memory/cpu/rss_gib"
    peak_gib = max(row[key] for row in runs.timed.rows())
    planned_gib = runs.planned_gib(runs.config, runs.num_ranks)
    what = f"a rank uses at most {peak_gib:.2f} GiB; the plan predicts {planned_gib:.2f}"
    if peak_gib <= planned_gib:
        return Checked("ok", what)
    fix = f"lower the memory limit of `plan` by {peak_gib - planned_gib:.1f} GiB (--memory-gib)"
    return Checked("warn" if peak_gib <= MEMORY_MARGIN * planned_gib else "fail", what, fix)


def check_speed(runs: Runs) -> Checked:
    """Report the median tokens per second, and the MFU if the GPU's peak is known."""
    rows = runs.timed.rows()[NUM_WARMUP_STEPS:]
    rate = statistics.median(row["throughput/train/tokens_per_s"] for row in rows)
    shares = [row[MFU] for row in rows if MFU in row]
    mfu = f", MFU {statistics.median(shares):.1%}" if shares else ""
    on = f"median of {len(rows)} steps on {runs.num_ranks} ranks"
    return Checked("ok", f"{rate:,.0f} tokens/s{mfu} ({on})")


RUN_CHECKS: dict[str, Callable[[Runs], Checked]] = {
    "training": check_training,
    "ranks": check_ranks,
    "packing": check_packing,
    "resume": check_resume,
    "peak memory": check_memory,
    "speed": check_speed,
}
NEEDS = {name: {"training"} for name in RUN_CHECKS if name != "training"}
