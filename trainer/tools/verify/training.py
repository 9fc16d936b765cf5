"""Checks of `doctor --run`: short runs of the recipe here, compared with each other and with
the plan (floor 5).
"""

import math
import re
import statistics
from collections.abc import Callable

from trainer.config import Config
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
"""Largest relative difference between two ways to run a batch in float32. In bfloat16 it is
`NUM_ROUNDINGS` times the difference between the same steps in bfloat16 and in float32, if that is
larger.
"""
NUM_ROUNDINGS = 4
MEMORY_MARGIN = 1.1
OUT_OF_MEMORY = re.compile(r"out of memory|OutOfMemory", re.IGNORECASE)
MFU = "throughput/train/mfu"
PlannedGib = Callable[[Config, int], float]
"""Memory that a rank needs: from a configuration and the number of ranks."""


def check_training(runs: Runs) -> Checked:
    """The recipe trains; with what its self-check found."""
    log = runs.straight.log.read_text(encoding="utf-8", errors="replace")
    found = re.search(r"^self-check: (.*)$", log, re.MULTILINE)
    if found is None:
        return Checked("fail", "the run did not check itself against transformers' forward pass")
    return Checked("ok", f"{NUM_STEPS} steps on {runs.num_ranks} ranks; {found[0]}")


def check_ranks(runs: Runs) -> Checked:
    """One rank computes the same steps as all."""
    if runs.num_ranks == 1:
        return Checked("skip", "there is one rank: give a number of ranks")
    try:
        alone = runs.train("one_rank", num_ranks=1, until=NUM_COMPARED)
    except RunFailedError as error:
        if OUT_OF_MEMORY.search(str(error)):
            return Checked("skip", "the model does not fit one rank: check a smaller one")
        raise
    fix = "a card, a link or NCCL computes wrongly: check fewer ranks to find which (CUDA_VISIBLE_DEVICES)"
    return _same_steps(runs, alone, f"1 rank and {runs.num_ranks} ranks", fix)


def check_packing(runs: Runs) -> Checked:
    """Packed documents compute the same steps as documents alone."""
    if "documents run packed" not in runs.straight.log.read_text(
        encoding="utf-8", errors="replace"
    ):
        return Checked("skip", "documents of this model run one by one in any case")
    alone = runs.train("alone", "model.attention=per_document", until=NUM_COMPARED)
    fix = "train with model.attention=per_document, and report the architecture"
    return _same_steps(runs, alone, "packed documents and documents alone", fix)


def _same_steps(runs: Runs, other: ShortRun, what: str, fix: str) -> Checked:
    found = _differences(runs.straight, other)
    allowed = dict(TOLERANCES)
    dtype = runs.config.model.fsdp_config.param_dtype
    if dtype != "float32":
        precise = runs.train(f"float32_beside_{other.run_dir.name}", _FLOAT32, until=NUM_COMPARED)
        rounding = _differences(runs.straight, precise)
        allowed = {
            key: max(least, NUM_ROUNDINGS * rounding[key]) for key, least in TOLERANCES.items()
        }
    texts = [
        f"{name} differ by {found[key]:.1e} (allowed {allowed[key]:.0e})"
        for name, key in (("losses", "train/loss"), ("gradient norms", "train/grad_norm"))
    ]
    what = f"{what}: {', '.join(texts)}, relative, over {NUM_COMPARED} steps"
    is_same = all(found[key] <= allowed[key] < 1 for key in TOLERANCES)  # False for NaN
    return Checked("ok", what) if is_same else Checked("fail", what, fix)


_FLOAT32 = "model.fsdp_config.param_dtype=float32"


def _differences(left: ShortRun, right: ShortRun) -> dict[str, float]:
    """Largest relative difference of the first steps, by key; NaN if a value is NaN."""
    pairs = list(zip(left.rows()[:NUM_COMPARED], right.rows()[:NUM_COMPARED], strict=True))
    found = {}
    for key in TOLERANCES:
        values = [abs(a[key] - b[key]) / abs(a[key]) for a, b in pairs]
        found[key] = math.nan if any(map(math.isnan, values)) else max(values)
    return found


def check_resume(runs: Runs) -> Checked:
    """A run that is killed with SIGKILL and started again equals the straight run, bit for bit."""
    straight = runs.straight
    killed = runs.train_killed()
    if killed is None:
        return Checked(
            "skip", "the run ended before it could be killed: check a larger model or batch"
        )
    found = compare_runs(straight.run_dir, killed.run_dir, steps=NUM_STEPS)
    if killed.resumed_from < killed.saved_before:
        what = f"step {killed.saved_before} was saved before the kill, and the run resumed from {killed.resumed_from}"
        return Checked(
            "fail", what, "look at the directory's file system: `doctor` tries its operations"
        )
    if not found.differences:
        what = f"killed, and resumed from step {killed.resumed_from}: {found.num_steps} steps, {found.num_tensors} "
        return Checked(
            "ok", f"{what}tensors and {found.num_validations} validations are equal bit for bit"
        )
    again = runs.train("straight_again")
    repeated = compare_runs(straight.run_dir, again.run_dir, steps=NUM_STEPS)
    if repeated.differences:
        what = f"training is not deterministic here: two straight runs differ, first at {repeated.differences[0]}"
        fix = "trainer.deterministic=true, model.compile=false, no code of the model's own that draws at random"
        return Checked("fail", what, fix)
    return Checked(
        "fail", f"a resumed run differs from a straight one, first at {found.differences[0]}"
    )


def check_memory(runs: Runs, planned_gib: PlannedGib) -> Checked:
    """The fullest rank needs at most what was planned; micro-batches that are not full need
    less.
    """
    key = "memory/max_reserved_gib" if runs.is_on_gpu else "memory/cpu/rss_gib"
    peak_gib = max(row[key] for row in runs.timed.rows())
    planned = planned_gib(runs.config, runs.num_ranks)
    what = f"the fullest rank needs {peak_gib:.2f} GiB, {planned:.2f} were planned"
    if peak_gib <= planned:
        return Checked("ok", what)
    fix = f"give `plan` a limit that is {peak_gib - planned:.1f} GiB lower (--memory-gib)"
    return Checked("warn" if peak_gib <= MEMORY_MARGIN * planned else "fail", what, fix)


def check_speed(runs: Runs) -> Checked:
    rows = runs.timed.rows()[NUM_WARMUP_STEPS:]
    what = f"{runs.timed.tokens_per_s():,.0f} tokens/s"
    shares = [row[MFU] for row in rows if MFU in row]
    if shares:
        what += f", MFU {statistics.median(shares):.1%}"
    return Checked("ok", f"{what} (median of {len(rows)} steps on {runs.num_ranks} ranks)")


def run_checks(planned_gib: PlannedGib) -> dict[str, Callable[[Runs], Checked]]:
    """By name, in their order."""
    return {
        "training": check_training,
        "ranks": check_ranks,
        "packing": check_packing,
        "resume": check_resume,
        "peak memory": lambda runs: check_memory(runs, planned_gib),
        "speed": check_speed,
    }
