"""Prove on the user's own recipe and machine that an interrupted run equals an uninterrupted one (floor 5).

A recipe is trained for a few steps three times: straight, straight again as the control (if these two differ, training
is not deterministic here, and resume is not to blame), and once killed at random moments and started again until it is
complete. Then every step, every validation, the whole final state and what else a run leaves are compared bit for bit.
"""

import math
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from trainer.errors import EXIT_CRASH, EXIT_DONE, CannotWriteError
from trainer.resume_proof.killed_runs import Kill, KilledRun, Moment, RunFailedError
from trainer.run.compose import as_word
from trainer.runtime.signals import REPEAT_S

if TYPE_CHECKING:
    from trainer.resume_proof.bit_equality import Comparison

STRAIGHT, CONTROL, RESUMED, FREE = "straight", "control", "resumed", "not deterministic"
MIN_STEPS = 4
INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
MAX_SHOWN = 5
CUDA_CAUSES = (
    "Usual causes on CUDA: trainer.deterministic=false (attention's backward pass, cuBLAS and NCCL then add in any "
    "order), kernels that model.compile tunes anew, code of the model's own"
)
CPU_CAUSES = "On CPU two runs should agree: look for what differs between them in this environment"


@dataclass(frozen=True)
class Trial:
    """What is asked for. `run_dir` is the recipe's own, links followed: nothing is written to it, only beside it."""

    num_ranks: int
    steps: int
    kills: int
    seed: int
    overrides: tuple[str, ...]
    run_dir: Path
    is_on_gpu: bool

    @property
    def save_freq(self) -> int:
        return max(1, self.steps // 4)

    @property
    def test_freq(self) -> int:
        return max(2, self.steps // 3)


def verify(trial: Trial) -> int:
    return in_work_directory(trial.run_dir, "verify-resume", partial(_prove, trial))


def in_work_directory(run_dir: Path, what: str, prove: Callable[[Path, Path], int], *, is_kept: bool = False) -> int:
    """The exit code of `prove(work, scratch)`: in a directory beside the run directory, which stays only if it
    `is_kept` or there is something to look into, and one for temporary files.
    """
    try:
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f"{run_dir.name}.{what}-", dir=run_dir.parent))
    except OSError as error:
        raise CannotWriteError(f"cannot write beside trainer.default_local_dir={run_dir}: {error}") from error
    try:
        # what a killed launcher leaves among the temporary files goes here; a short path, sockets may be made in it
        with tempfile.TemporaryDirectory(prefix="sft-", ignore_cleanup_errors=True) as scratch:
            code = prove(work, Path(scratch))
        is_kept |= code != EXIT_DONE
    except RunFailedError as error:
        code, is_kept = error.code, is_kept or error.name != STRAIGHT
        print(f"ERROR: {error}", file=sys.stderr)
    finally:
        if is_kept:
            print(f"kept for a closer look: {work}")
        else:
            shutil.rmtree(work, ignore_errors=True)
            if work.exists():
                print(f"WARNING: cannot remove {work} whole: remove it yourself", file=sys.stderr)
    return code


def _prove(trial: Trial, work: Path, scratch: Path) -> int:
    with uninterrupted():
        from trainer.resume_proof.bit_equality import compare_runs, digest_of_parameters
    straight, control, resumed = (
        KilledRun(name, work, launcher_words(trial, work / name), scratch) for name in (STRAIGHT, CONTROL, RESUMED)
    )
    print(_announcement(trial, work), flush=True)
    straight.train()
    control.train()
    if trial.is_on_gpu and "trainer.deterministic=false" not in trial.overrides:
        free = KilledRun(FREE, work, (*launcher_words(trial, work / FREE), "trainer.deterministic=false"), scratch)
        free.train()
        print(f"a step takes {straight.step_s:.3g} s, with trainer.deterministic=false {free.step_s:.3g} s", flush=True)
    comparison, kills = compare_runs(straight.run_dir, control.run_dir, steps=trial.steps), []
    if not comparison.differences:
        kills = resumed.train_with_kills(moments(trial, step_s=straight.step_s))
        comparison = compare_runs(straight.run_dir, resumed.run_dir, steps=trial.steps)
    for run in (straight, control, *([resumed] if kills else [])):
        print(f"final parameters {run.name + ':':9} sha256 {digest_of_parameters(run.run_dir, steps=trial.steps)}")
    code, lines = report(comparison, kills, is_on_gpu=trial.is_on_gpu)
    print("\n".join(lines), flush=True)
    return code


def _announcement(trial: Trial, work: Path) -> str:
    return (
        f"three runs of {trial.steps} steps, ranks: {trial.num_ranks}: straight, the same again as the control, and "
        f"one that is killed and resumed; --kills {trial.kills} --seed {trial.seed}\n"
        f"other than in the recipe: save_freq={trial.save_freq}, test_freq={trial.test_freq}, max_ckpt_to_keep=1, no "
        f"trackers, no max_time\n"
        f"logs and checkpoints: {work}"
    )


def report(comparison: "Comparison", kills: Sequence[Kill], *, is_on_gpu: bool) -> tuple[int, list[str]]:
    """Exit code and lines: the evidence, and last the verdict. Without kills it is about the control."""
    lines = [
        f"compared {comparison.right} with {comparison.left}: {comparison.num_steps} steps, {comparison.num_tensors} "
        f"tensors of parameters and optimizer, position in the data, {comparison.num_validations} validations, what "
        f"else the directories hold; largest difference {comparison.max_difference:g}"
    ]
    lines += [f"  kill {number} {kill}" for number, kill in enumerate(kills, start=1)]
    found = [f"kill {number} {kill}" for number, kill in enumerate(kills, start=1) if kill.has_lost_checkpoint]
    found += comparison.differences
    if not found:
        return EXIT_DONE, [*lines, "verdict: interrupted equals uninterrupted, bit for bit"]
    lines += [f"  {text}" for text in found[:MAX_SHOWN]]
    if len(found) > MAX_SHOWN:
        lines.append(f"  and {len(found) - MAX_SHOWN} more differences")
    if kills:
        return EXIT_CRASH, [*lines, f"verdict: interrupted differs from uninterrupted, first at {found[0]}"]
    lines.append(CUDA_CAUSES if is_on_gpu else CPU_CAUSES)
    text = "verdict: not judged, because training itself is not deterministic here: two straight runs differ, first at "
    return EXIT_CRASH, [*lines, text + found[0]]


def moments(trial: Trial, *, step_s: float) -> list[Moment]:
    """Spread over the run from the step after the first save to the last but two, each anywhere within a step."""
    rng = random.Random(trial.seed)
    first, num_places = trial.save_freq + 1, trial.steps - 2 - trial.save_freq
    steps = [first + int((index + rng.random()) * num_places / trial.kills) for index in range(trial.kills)]
    return [Moment(step, rng.random() * step_s) for step in steps]


def launcher_words(trial: Trial, run_dir: Path) -> tuple[str, ...]:
    """The recipe, cut to so many steps, in another directory; the later of two words for a key counts.

    On a GPU it is made deterministic unless it says otherwise.
    """
    defaults = ["trainer.deterministic=true"] if trial.is_on_gpu else []
    settings = {
        "trainer.default_local_dir": as_word(str(run_dir)),
        "trainer.total_training_steps": trial.steps,
        "trainer.save_freq": trial.save_freq,
        "trainer.test_freq": trial.test_freq,
        "trainer.max_ckpt_to_keep": 1,  # the least space, and a resume has nothing older to fall back on
        "trainer.max_time": "null",
        "trainer.checkpoint.mirror": "null",
        "trainer.logger": "[console]",
    }
    return (str(trial.num_ranks), *defaults, *trial.overrides, *(f"{key}={value}" for key, value in settings.items()))


@contextmanager
def uninterrupted() -> Iterator[None]:
    """For imports: parts of torch swallow the exception while they start."""
    signal.pthread_sigmask(signal.SIG_BLOCK, INTERRUPTS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, INTERRUPTS)


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM and SIGHUP end this command as Ctrl-C does: the runs are stopped first. What is ignored stays so.

    A second signal, more than `REPEAT_S` later, cuts the cleaning up short.
    """
    interrupted_at = -math.inf

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted_at
        if time.monotonic() - interrupted_at > REPEAT_S:
            interrupted_at = time.monotonic()
            raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in INTERRUPTS}
    before = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
