"""Everything around the step, on the 5.4 M parameter GSM8K case: start-up, saves, export, resume;
and a step's phases.

    python benchmarks/lifecycle.py --train-file train.jsonl

A start is timed from the moment before its process is made to the end of its first step: with a
fresh cache, with prepared tokens, from a checkpoint, and through the launcher. `--probe` is the
timed process itself: it runs `python -m trainer` with its parts wrapped from outside. A step's
phases come from a run of their own.
"""

import argparse
import importlib.abc
import importlib.util
import json
import runpy
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

IS_PROBE = sys.argv[1:2] == ["--probe"]
if not IS_PROBE:  # the probe times the trainer's imports, so it makes none before them
    from case import Case, make_case
    from measuring import (
        REPOSITORY,
        header,
        middle,
        run_command,
        table,
        write_bytes_per_s,
        write_result,
    )
    from speed_cpu import our_overrides

    from trainer.tracking import read_metrics

STARTS = ("cold", "cached", "resumed", "launcher")
START_PHASES = ("imports_s", "data_s", "decide_s", "model_s", "load_s", "first_step_s")
STEP_PHASES = (
    "data_s",
    "shard_s",
    "forward_s",
    "backward_s",
    "optimizer_s",
    "logging_s",
    "guard_s",
    "other_s",
)
SKIP = 4


class Probe(importlib.abc.MetaPathFinder):
    """Times the parts of a run from outside, from the moment `trainer.run.main` is imported.

    `start` holds seconds by phase until the end of the first step; `steps` seconds by phase of
    every step.
    """

    def __init__(self, output: Path, *, spawned: float) -> None:
        self._output, self._spawned = output, spawned
        self._durations: dict[str, float] = defaultdict(float)
        self._fit_began = 0.0
        self.start: dict[str, float] = {}
        self.steps: list[dict[str, float]] = []

    def find_spec(
        self, name: str, path: Any, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "trainer.run.main":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_wrap(module: ModuleType) -> None:
            execute(module)
            self.start["imports_s"] = time.time() - self._spawned
            self._wrap(module)

        spec.loader.exec_module = execute_and_wrap  # type: ignore[method-assign]
        return spec

    def _wrap(self, build: Any) -> None:

        for owner, name, phase in (
            (build, "prepare_inputs", "data_s"),
            (build, "decide_start", "decide_s"),
            (build, "build_model", "model_s"),
            (build.CheckpointManager, "load", "load_s"),
        ):
            setattr(owner, name, self._timed(getattr(owner, name), phase))
        build.fit = self._fit(build.fit)
        loop = importlib.import_module("trainer.loop.fit")
        loop.training_step = self._training_step(loop.training_step)

    def _timed(self, function: Callable[..., Any], phase: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._durations[phase] += time.perf_counter() - began

        return timed

    def _training_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def timed(run: Any, batch: Any) -> Any:
            metrics, decision = step(run, batch)
            found = {phase: metrics[f"time/train/{phase}"] for phase in STEP_PHASES}
            found["step_s"] = metrics["train/time(s)"]
            self.steps.append(found | {"num_tokens": metrics["train/total_token_count"]})
            if len(self.steps) == 1:
                self._end_start()
            return metrics, decision

        return timed

    def _end_start(self) -> None:
        now = time.time()
        self.start |= {
            phase: self._durations[phase] for phase in ("data_s", "decide_s", "model_s", "load_s")
        }
        self.start["first_step_s"] = now - self._fit_began
        self.start["total_s"] = now - self._spawned
        self.start["other_s"] = self.start["total_s"] - sum(
            self.start[phase] for phase in START_PHASES
        )

    def _fit(self, fit: Callable[..., int]) -> Callable[..., int]:
        def timed(trainer: Any) -> int:
            self._fit_began = time.time()
            code = fit(trainer)
            from measuring import peak_bytes

            found = {"start": self.start, "steps": self.steps, "peak_bytes": peak_bytes()}
            self._output.write_text(json.dumps(found))
            return code

        return timed


def probe(output: Path, spawned: float, overrides: list[str]) -> None:
    """`python -m trainer`, with its times written to `output`."""
    sys.meta_path.insert(0, Probe(output, spawned=spawned))
    sys.argv = ["trainer", *overrides]
    runpy.run_module("trainer", run_name="__main__", alter_sys=True)


def run_probe(overrides: list[str], output: Path, *, threads: int | None = None) -> dict[str, Any]:
    """What `probe` found, and `wall_s` until its process was gone."""
    words = [
        sys.executable,
        str(Path(__file__).resolve()),
        "--probe",
        str(output),
        repr(time.time()),
        *overrides,
    ]
    wall_s, _ = run_command(words, cwd=REPOSITORY, threads=threads, log=output.with_suffix(".log"))
    found: dict[str, Any] = json.loads(output.read_text())
    return found | {"wall_s": wall_s}


def start_once(kind: str, case: "Case", base_run: Path, number: int) -> dict[str, float]:
    """Seconds by phase of one start of two steps (a resumed one: one step); of one by the
    launcher only the total.
    """
    name = f"{kind}{number}"
    overrides = our_overrides(case, "auto", 2, name)
    run_dir, output = case.directory / "runs" / name, case.directory / f"{name}.json"
    if kind == "cold":
        overrides.append(f"data.cache_dir={case.directory / name}")
    if kind == "resumed":
        shutil.copytree(base_run, run_dir)
        overrides.append("trainer.total_training_steps=3")
    if kind != "launcher":
        found = run_probe(overrides, output)
        return found["start"] | {
            "whole_run_s": found["wall_s"],
            "peak_mib": found["peak_bytes"] / 2**20,
        }
    spawned = time.time()
    words = [sys.executable, "-m", "trainer.launch", "1", *overrides]
    wall_s, _ = run_command(words, cwd=REPOSITORY, threads=None, log=output.with_suffix(".log"))
    return {
        "total_s": read_metrics(run_dir / "metrics.jsonl")[0]["ts"] - spawned,
        "whole_run_s": wall_s,
    }


def measure_starts(case: "Case", rounds: int) -> dict[str, dict[str, Any]]:
    """Seconds by kind of start and phase; the kinds take turns."""
    # fills the cache and the page cache; its run is what others resume
    base = start_once("cached", case, Path(), -1)
    print(f"first start {base['total_s']:.2f} s, not counted", flush=True)
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in STARTS}
    for number in range(rounds):
        for kind in STARTS if number % 2 == 0 else reversed(STARTS):
            times = start_once(kind, case, case.directory / "runs" / "cached-1", number)
            found[kind].append(times)
            print(f"{kind}: first step after {times['total_s']:.2f} s", flush=True)
    return {
        kind: {key: middle(run[key] for run in runs) for key in runs[0]}
        for kind, runs in found.items()
    }


def measure_saves(case: "Case", rounds: int) -> dict[str, dict[str, Any]]:
    """Seconds that training waits for a save, those of writing it, and its rate, behind
    training and in its way.
    """
    found: dict[str, dict[str, list[float]]] = {
        name: defaultdict(list) for name in ("behind", "in the way")
    }
    for number in range(rounds):
        for name, is_async in (("behind", True), ("in the way", False)):
            label = f"saves-{is_async}-{number}"
            overrides = [
                *our_overrides(case, "auto", 13, label),
                "trainer.save_freq=3",
                "trainer.max_ckpt_to_keep=1",
                f"trainer.checkpoint.async_save={is_async}",
            ]
            words = [sys.executable, "-m", "trainer", *overrides]
            run_command(words, cwd=REPOSITORY, threads=None, log=case.directory / f"{label}.log")
            run_dir = case.directory / "runs" / label
            size_bytes = tree_bytes(run_dir / "global_step_13")
            for row in read_metrics(run_dir / "metrics.jsonl"):
                stall_s, write_s = (
                    row.get("time/train/checkpoint_s"),
                    row.get("time/train/checkpoint_bg_s"),
                )
                if stall_s is not None:
                    found[name]["stall_s"].append(stall_s)
                    write_s = write_s if is_async else stall_s
                if write_s is not None:
                    found[name]["write_s"].append(write_s)
                    found[name]["mb_per_s"].append(size_bytes / 1e6 / write_s)
            found[name]["checkpoint_mb"].append(size_bytes / 1e6)
    return {
        name: {key: middle(values) for key, values in times.items()}
        for name, times in found.items()
    }


def measure_exports(case: "Case", run_dir: Path, rounds: int) -> dict[str, Any]:
    """Seconds of the export command as a whole, imports included."""
    seconds = []
    for number in range(rounds):
        target = case.directory / f"export{number}"
        words = [
            sys.executable,
            "-m",
            "trainer.cli.checkpoint",
            "export",
            str(run_dir),
            str(target),
        ]
        seconds.append(
            run_command(
                words, cwd=REPOSITORY, threads=None, log=case.directory / f"export{number}.log"
            )[0]
        )
    return {"seconds": middle(seconds), "mb": tree_bytes(target) / 1e6}


def measure_step(case: "Case", steps: int, rounds: int) -> dict[str, Any]:
    """Milliseconds of a step by phase, medians over the steps after the first few of each round."""
    rows: list[dict[str, float]] = []
    for number in range(rounds):
        overrides = our_overrides(case, "auto", steps, f"phases{number}")
        rows += run_probe(overrides, case.directory / f"phases{number}.json")["steps"][SKIP:]
    phases = (*STEP_PHASES, "step_s")
    found: dict[str, Any] = {
        f"{phase.removesuffix('_s')}_ms": middle(1e3 * row[phase] for row in rows)
        for phase in phases
    }
    found["tokens_per_step"] = statistics.mean(row["num_tokens"] for row in rows)
    return found


def tree_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def print_tables(result: dict[str, Any]) -> None:
    def cell(values: dict[str, float] | None, digits: int) -> str:
        return "" if values is None else f"{values['median']:.{digits}f}"

    phases = (*START_PHASES, "other_s", "total_s", "whole_run_s")
    rows = [
        [kind, *(cell(times.get(phase), 2) for phase in phases)]
        for kind, times in result["starts"].items()
    ]
    print(
        table(
            ["start, seconds", *(phase.removesuffix("_s").replace("_", " ") for phase in phases)],
            rows,
        )
    )
    keys = ("stall_s", "write_s", "mb_per_s", "checkpoint_mb")
    print(
        table(
            ["save", *keys],
            [[name, *(cell(r[key], 3) for key in keys)] for name, r in result["saves"].items()],
        )
    )
    print(
        f"export: {result['export']['seconds']['median']:.2f} s for {result['export']['mb']:.1f} MB"
    )
    step = {key: values for key, values in result["step"].items() if key != "tokens_per_step"}
    print(table(list(step), [[cell(values, 1) for values in step.values()]]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--train-file", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--steps", type=int, default=16, help="of each run that the phases of a step come from"
    )
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        case = make_case(Path(directory, "case"), arguments.train_file)
        result = {
            **header(),
            "disk_mb_per_s": round(write_bytes_per_s(case.directory) / 1e6),
            "starts": measure_starts(case, arguments.rounds),
            "saves": measure_saves(case, min(arguments.rounds, 3)),
            "export": measure_exports(case, case.directory / "runs" / "cached-1", arguments.rounds),
            "step": measure_step(case, arguments.steps, min(arguments.rounds, 3)),
        }
    print_tables(result)
    write_result("lifecycle", result, arguments.output)


if __name__ == "__main__":
    if IS_PROBE:
        probe(Path(sys.argv[2]), float(sys.argv[3]), sys.argv[4:])
    else:
        main()
