"""What watching a run costs: step time of the quickstart with and without it, in alternating blocks
of one run.

    python benchmarks/overhead.py --steps 400

In every second block of five steps nothing is measured, judged or logged: no phases, no memory
sample, no rows, no guard, no files. What stays is the packet between the ranks, which both kinds
send. The time of a step is that from one step's begin to the next one's, logging included. The
first block is not counted.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

from measuring import header, middle, table, write_result

from trainer.guard.guard import Decision, Guard
from trainer.loop import fit
from trainer.monitor.clock import PhaseClock
from trainer.monitor.memory import Memory
from trainer.monitor.meter import Meter
from trainer.run import main as build_run
from trainer.run.compose import load_config
from trainer.runtime.heartbeat import Heartbeat
from trainer.runtime.signals import StopRequest
from trainer.tracking import Tracking

BLOCK_STEPS = 5


class Switch:
    """Whether the present step is watched, and when each step began."""

    def __init__(self) -> None:
        self.begins: list[tuple[float, bool]] = []

    @property
    def is_on(self) -> bool:
        return not self.begins or self.begins[-1][1]

    def begin_step(self) -> None:
        self.begins.append((time.perf_counter(), len(self.begins) // BLOCK_STEPS % 2 == 0))

    def replace(self, owner: type, name: str, instead: Callable[..., Any]) -> Any:
        """A patch that calls `instead` in steps that are not watched."""
        own = getattr(owner, name)

        def chosen(*args: Any, **kwargs: Any) -> Any:
            return (own if self.is_on else instead)(*args, **kwargs)

        return patch.object(owner, name, chosen)


def bare_signals(meter: Meter, batch: Any, totals: Any, *, lr: float) -> dict[str, float]:
    return {
        "train/loss": totals.sums["loss_sum"] / batch.num_loss_tokens,
        "train/grad_norm": totals.sums["grad_norm"],
    }


def run(num_steps: int, directory: Path) -> list[tuple[float, bool]]:
    """(seconds, whether it was watched) of each step."""
    switch = Switch()
    own_step = fit.training_step

    def training_step(run: Any, batch: Any) -> Any:
        switch.begin_step()
        return own_step(run, batch)

    overrides = [
        f"trainer.total_training_steps={num_steps}",
        "trainer.save_freq=-1",
        "trainer.test_freq=-1",
        f"trainer.default_local_dir={directory / 'run'}",
        f"data.cache_dir={directory / 'cache'}",
        "data.val_ratio=0",
    ]
    nothing: dict[str, float] = {}
    patches = [
        patch.object(fit, "training_step", training_step),
        switch.replace(PhaseClock, "mark", lambda clock, phase: 0.0),
        switch.replace(Memory, "sample", lambda memory: nothing),
        switch.replace(Meter, "signals", bare_signals),
        switch.replace(Meter, "row", lambda meter, batch, signals, totals: dict(signals)),
        switch.replace(Guard, "observe", lambda guard, step, signals, *, is_skipped: Decision()),
        switch.replace(Guard, "scores", lambda guard: nothing),
        switch.replace(Tracking, "log", lambda tracking, data, step, kind=None: None),
    ]
    for item in patches:
        item.start()
    try:
        build_run.run(load_config(overrides), StopRequest(), Heartbeat())
    finally:
        for item in patches:
            item.stop()
    begins = switch.begins
    return [(after - before, is_on) for (before, is_on), (after, _) in pairwise(begins)]


def paired(steps: list[tuple[float, bool]]) -> list[float]:
    """Watched over unwatched: median of each block over that of its neighbours."""
    blocks = [
        steps[start : start + BLOCK_STEPS] for start in range(BLOCK_STEPS, len(steps), BLOCK_STEPS)
    ]
    medians = [
        (statistics.median(seconds for seconds, _ in block), block[0][1])
        for block in blocks
        if len(block) == 5
    ]
    ratios = []
    for before, here, after in zip(medians, medians[1:], medians[2:], strict=False):
        if here[1]:
            ratios.append(here[0] / ((before[0] + after[0]) / 2))
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        steps = run(arguments.steps, Path(directory))
    ratios = sorted(paired(steps))
    quartiles = statistics.quantiles(ratios, n=4)
    seconds = {
        is_on: middle(s for s, was_on in steps if was_on == is_on) for is_on in (True, False)
    }
    overhead = {
        "median": statistics.median(ratios) - 1,
        "quartiles": [quartiles[0] - 1, quartiles[2] - 1],
    }
    rows = [
        ["watched", f"{seconds[True]['median'] * 1e3:.1f}"],
        ["not watched", f"{seconds[False]['median'] * 1e3:.1f}"],
        [
            "overhead, paired",
            f"{100 * overhead['median']:.2f} % (quartiles {100 * quartiles[0] - 100:.2f} to "
            f"{100 * quartiles[2] - 100:.2f})",
        ],
    ]
    print(table(["steps", "ms"], rows))
    result = {
        "watched_s": seconds[True],
        "not_watched_s": seconds[False],
        "overhead": overhead,
        "pairs": len(ratios),
    }
    write_result("overhead", {**header(), **result}, arguments.output)


if __name__ == "__main__":
    main()
