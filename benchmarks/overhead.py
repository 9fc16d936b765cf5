"""The time that watching adds to a step, in microseconds on one core.

    python benchmarks/overhead.py --steps 2000

Guard, meter and tracking are called as a step calls them, with a row of two ranks. Tracking writes
metrics.jsonl, prints the row, and queues it for the CSV histories.
"""

import argparse
import contextlib
import io
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from measuring import header, table, write_result

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "unit"))

from test_meter import new_meter, result
from toy import guard_config

from trainer.tracking import Tracking, metrics
from trainer.train.guard import Guard
from trainer.train.parts import StepResult


def measure(num_steps: int, run_dir: Path) -> dict[str, float]:
    """Return the median microseconds of each part."""
    meter = new_meter(total_steps=num_steps)
    guard = Guard(guard_config())
    totals = result(by_rank={"decisions": (0.0, 0.0)})
    tracking = Tracking("overhead", "overhead", ["console"], {}, run_dir=run_dir)
    tracking.start(0)
    took_us: dict[str, list[float]] = {"guard": [], "meter": [], "tracking": []}

    def timed(part: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        started_s = time.perf_counter()
        found = call(*args, **kwargs)
        took_us[part][-1] += 1e6 * (time.perf_counter() - started_s)
        return found

    for number in range(1, num_steps + 1):
        for times in took_us.values():
            times.append(0.0)
        step = StepResult(replace(totals.batch, step=number), totals.totals, lr=1e-3)
        timed("meter", meter.by_rank)
        timed("guard", guard.limits)
        meter.clock.mark("forward")
        step.signals |= timed("meter", meter.signals, step)
        timed("guard", guard.after_step, step)
        timed("meter", meter.after_step, step)
        timed("tracking", tracking.log, step.row | metrics.take_for_row(), number)
    tracking.finish()
    return {part: statistics.median(times) for part, times in took_us.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, contextlib.redirect_stdout(io.StringIO()):
        found = measure(arguments.steps, Path(directory))
    print(
        table(["part", "microseconds a step"], [[part, f"{us:.0f}"] for part, us in found.items()])
    )
    write_result("overhead", {**header(), "microseconds_per_step": found}, arguments.output)


if __name__ == "__main__":
    main()
