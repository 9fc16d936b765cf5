"""What the lines of an acceptance judge: ranks that probed the machine, short runs of a recipe, a plan (floor 5).

Each is made when a line first asks for it, once: several lines share a run.
"""

import os
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from trainer.config import QUICKSTART, Config
from trainer.errors import EXIT_CRASH
from trainer.launch.ranks import thread_count
from trainer.planner.forecast import Change, Forecast, default_memory_gib, forecaster
from trainer.resume_proof.killed_runs import Kill, KilledRun, RunFailedError, started
from trainer.resume_proof.proof import CONTROL, FREE, RESUMED, STRAIGHT, Trial, launcher_words, moments, uninterrupted
from trainer.run.compose import as_word, load_config

if TYPE_CHECKING:
    from trainer.acceptance.probe import Probe
    from trainer.resume_proof.bit_equality import Comparison

ONE_RANK, ONE_BY_ONE, FLOAT32, PROBE = "one rank", "one by one", "float32", "probe"
NUM_COMPARED = 4
"""Steps of the runs that are only compared with the straight one: errors of the first steps grow in later ones."""
NUM_TIMED = 12
PROBE_TIMEOUT_S = 240
QUICKSTART_LENGTH, SAMPLES_PER_RANK = 64, 16
T = TypeVar("T")


class MissingEvidenceError(RuntimeError):
    """Something failed that an earlier line has told of."""


@dataclass(frozen=True)
class Resumed:
    """Of the run that was killed: where, and how it differs from the straight one."""

    comparison: "Comparison"
    kills: list[Kill]


class Evidence:
    """Of a recipe on this machine. Everything is written into `work`; temporary files of the runs into `scratch`."""

    def __init__(self, trial: Trial, *, work: Path, scratch: Path) -> None:
        self.trial = replace(trial, overrides=(*_cuts(trial, work), *trial.overrides))
        self.config: Config = load_config(list(self.trial.overrides))
        self._work, self._scratch = work, scratch
        self._made: dict[str, object] = {}

    @property
    def straight(self) -> KilledRun:
        """The recipe's first steps, on all ranks, deterministic."""
        return self._once(STRAIGHT, lambda: self._trained(STRAIGHT, self.trial))

    @property
    def timed(self) -> KilledRun:
        """As fast as the recipe goes: on a GPU without the kernels that add in a fixed order."""
        if not self.trial.is_on_gpu:
            return self.straight
        words = "trainer.deterministic=false"
        return self._once(FREE, lambda: self._trained(FREE, self._changed(words, steps=2 * NUM_TIMED), until=NUM_TIMED))

    @property
    def one_rank(self) -> KilledRun:
        alone = replace(self.trial, num_ranks=1)
        return self._once(ONE_RANK, lambda: self._trained(ONE_RANK, alone, until=NUM_COMPARED))

    @property
    def one_by_one(self) -> KilledRun:
        """Each document in a forward pass of its own."""
        changed = self._changed("model.attention=per_document")
        return self._once(ONE_BY_ONE, lambda: self._trained(ONE_BY_ONE, changed, until=NUM_COMPARED))

    @property
    def in_float32(self) -> KilledRun:
        """What rounding in bfloat16 changes shows beside it."""
        changed = self._changed("model.fsdp_config.param_dtype=float32")
        return self._once(FLOAT32, lambda: self._trained(FLOAT32, changed, until=NUM_COMPARED))

    @property
    def repeated(self) -> "Comparison":
        """The straight run, and the same once more."""
        straight = self.straight  # nothing is repeated where that fails
        return self._once(CONTROL, lambda: self._compared(straight, self._trained(CONTROL, self.trial)))

    @property
    def resumed(self) -> Resumed:
        return self._once(RESUMED, self._resume)

    @property
    def probes(self) -> "list[Probe]":
        """Of every rank."""
        return self._once(PROBE, self._probe)

    @property
    def plan(self) -> Forecast:
        return self._once("plan", self._plan)

    def _once(self, name: str, make: Callable[[], T]) -> T:
        """Raises what making it raised, and `MissingEvidenceError` when it is asked for again."""
        if name not in self._made:
            self._made[name] = MissingEvidenceError(f"it needs the {name} run, which failed")
            self._made[name] = make()
        found = self._made[name]
        if isinstance(found, MissingEvidenceError):
            raise found
        return found  # type: ignore[return-value]  # what `make` gave under this name

    def _changed(self, *words: str, steps: int | None = None) -> Trial:
        return replace(self.trial, overrides=(*self.trial.overrides, *words), steps=steps or self.trial.steps)

    def _run(self, name: str, trial: Trial) -> KilledRun:
        directory = name.replace(" ", "_")
        words = launcher_words(trial, self._work / directory)
        return KilledRun(directory, self._work, words, self._scratch)

    def _trained(self, name: str, trial: Trial, *, until: int | None = None) -> KilledRun:
        run = self._run(name, trial)
        run.train(until)
        return run

    def _compared(self, straight: KilledRun, run: KilledRun) -> "Comparison":
        with uninterrupted():
            from trainer.resume_proof.bit_equality import compare_runs

        return compare_runs(straight.run_dir, run.run_dir, steps=self.trial.steps)

    def _resume(self) -> Resumed:
        run, straight = self._run(RESUMED, self.trial), self.straight
        kills = run.train_with_kills(moments(self.trial, step_s=straight.step_s))
        return Resumed(self._compared(straight, run), kills)

    def _plan(self) -> Forecast:
        with uninterrupted():
            import trainer.planner.memory_plan  # noqa: F401  # what the forecast imports late

        num_ranks = self.trial.num_ranks
        memory_gib = default_memory_gib(self.config, num_ranks)
        return forecaster(self.config, memory_gib)(Change(num_ranks))

    def _probe(self) -> "list[Probe]":
        """Raises `RunFailedError` with the end of what a rank wrote."""
        with uninterrupted():
            from trainer.acceptance.probe import read
            from trainer.runtime.distributed import free_port

        output = self._work / PROBE
        output.mkdir()
        num_ranks, device = self.trial.num_ranks, "cuda" if self.trial.is_on_gpu else "cpu"
        threads = thread_count(num_ranks, num_cores=len(os.sched_getaffinity(0)))
        shared = {"WORLD_SIZE": num_ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        shared |= {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads), "TMPDIR": self._scratch}
        command = ("-m", "trainer.acceptance.probe", device, str(output))
        print(f"{PROBE}: started", flush=True)
        with ExitStack() as stack:
            ranks = []
            for rank in range(num_ranks):
                of_rank = {name: str(value) for name, value in {**shared, "RANK": rank, "LOCAL_RANK": rank}.items()}
                ranks.append(stack.enter_context(started(command, of_rank, output / f"rank_{rank}.log")))
            for rank, process in enumerate(ranks):
                _await(process, rank, output / f"rank_{rank}.log")
        return read(output, num_ranks)


def _await(process: subprocess.Popen, rank: int, log: Path) -> None:
    try:
        code: int | None = process.wait(PROBE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        code = None
    if code != 0:
        what = f"ended with exit code {code}" if code is not None else f"gave no answer within {PROBE_TIMEOUT_S} s"
        last = log.read_text(errors="replace", encoding="utf-8").splitlines()[-1:]
        raise RunFailedError("\n  ".join([f"rank {rank} of the probe {what}:", *last]), name=PROBE, code=EXIT_CRASH)


def _cuts(trial: Trial, work: Path) -> list[str]:
    """Words in front of the user's: so little data as the steps need, prepared in `work`. Documents of the quickstart
    are cut to one length, so that its micro-batches are as full as they are planned.
    """
    config = load_config(list(trial.overrides))
    words = [] if trial.is_on_gpu else ["trainer.device=cpu", "model.fsdp_config.param_dtype=float32"]
    batch_size = config.data.train_batch_size
    if config.data.train_files == QUICKSTART:
        batch_size = SAMPLES_PER_RANK * trial.num_ranks
        words += [f"data.train_batch_size={batch_size}", f"data.max_length={QUICKSTART_LENGTH}"]
        words += ["data.truncation=right", "data.on_bad_row=skip", "data.max_bad_fraction=1"]
    num_rows = 2 * max(trial.steps, 2 * NUM_TIMED * trial.is_on_gpu) * batch_size
    return [
        *words,
        f"data.train_max_samples={num_rows}",
        f"data.val_max_samples={batch_size}",
        f"data.cache_dir={as_word(str(work / 'cache'))}",
    ]
