"""What some rows did to a run: its steps trained again from a checkpoint, as they were and without these (floor 5).

Without a row means that nothing of it is supervised (`data.leave_out`): the batch, how it is packed and what is drawn
at random stay as they were, and the loss is the mean over the supervised tokens that are left. So what differs comes
from the rows alone, as long as the steps as they were are those of the run, bit for bit.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.checkpoint import layout, rollback
from trainer.config import ConfigError
from trainer.config.schema import LOADED
from trainer.data_tools.ledger import read_history, rows_at
from trainer.errors import EXIT_CRASH, EXIT_DONE, EXIT_RESUMABLE
from trainer.resume_proof.killed_runs import KilledRun
from trainer.resume_proof.proof import MAX_SHOWN
from trainer.run.compose import as_word, as_words
from trainer.tracking.metrics_file import FILE_NAME, read_metrics
from trainer.tracking.run_info import read_config

if TYPE_CHECKING:
    from trainer.resume_proof.bit_equality import Comparison

WITH, WITHOUT = "with", "without"
SHOWN = ("train/loss", "train/grad_norm", "val/loss")


@dataclass(frozen=True)
class Counterfactual:
    """`steps` of the run in `run_dir`, from the checkpoint before them, without `rows` (`file:line`).

    `checkpoint`: None where the steps begin with the first of the run, from the weights that it began with. `found`:
    which of the rows each step trains, where any.
    """

    run_dir: Path
    checkpoint: Path | None
    num_ranks: int
    steps: range
    rows: tuple[str, ...]
    found: dict[int, list[str]]


def plan(run_dir: Path, *, from_step: int, num_steps: int, rows: tuple[str, ...]) -> Counterfactual:
    """`num_steps` after `from_step`, and what leads there from the newest whole checkpoint, or the start of the run.

    Raises `ConfigError` where these steps cannot be trained again, or do not have these rows.
    """
    there = layout.committed(run_dir)
    if not there or there[-1].manifest is None:
        raise ConfigError(f"'{run_dir}' has no checkpoint, so on how many ranks it was trained is not known")
    before = [info for info in there if info.step <= from_step and not info.thinned]
    begins = before[-1] if before else None
    steps = range(begins.step + 1 if begins else 1, from_step + num_steps + 1)
    ranges = read_history(run_dir).ranges
    last = max((part.last for part in ranges), default=0)
    if begins is None and ranges and ranges[0].first > 1:
        whole = ", ".join(str(info.step) for info in there if not info.thinned)
        text = f"the run begins with step {ranges[0].first}, and no checkpoint until step {from_step} is whole: {whole}"
        raise ConfigError(text)
    if steps[-1] > last:
        raise ConfigError(f"the run has trained {last} steps, so from step {from_step} at most {last - from_step} more")
    if skipped := sorted(rollback.read(run_dir).skipped_steps & set(steps)):
        text = f"steps {skipped[0]} to {skipped[-1]} were passed over by a rollback"
        raise ConfigError(f"{text}: train again what came before or after them")
    found = rows_at(run_dir, rows, steps)
    if absent := [row for row in rows if not any(row in own for own in found.values())]:
        trained = rows_at(run_dir, absent, range(1, last + 1))
        lines = [f"  {row}: {_steps([step for step, own in trained.items() if row in own])}" for row in absent]
        raise ConfigError("\n".join([f"steps {steps[0]} to {steps[-1]} do not train these rows:", *lines]))
    num_ranks = ((begins and begins.manifest) or there[-1].manifest).world_size
    return Counterfactual(run_dir, begins.path if begins else None, num_ranks, steps, rows, found)


def _steps(steps: list[int]) -> str:
    if not steps:
        return "no step so far"
    return f"step {', '.join(map(str, steps[:MAX_SHOWN]))}{' and later' if len(steps) > MAX_SHOWN else ''}"


def replay(asked: Counterfactual, work: Path, scratch: Path) -> int:
    """Train both, say what differs; the exit code tells whether the steps as they were are those of the run."""
    from trainer.resume_proof.bit_equality import compare_steps

    begins = asked.checkpoint.name if asked.checkpoint else "the weights that the run began with"
    steps = f"steps {asked.steps[0]} to {asked.steps[-1]} of {asked.run_dir} again from {begins}"
    print(f"{steps}, with the rows and without; ranks: {asked.num_ranks}; in {work}", flush=True)
    runs = {
        name: KilledRun(name, work, words(asked, work / name, rows), scratch, good_codes=(EXIT_DONE, EXIT_RESUMABLE))
        for name, rows in ((WITH, ()), (WITHOUT, asked.rows))
    }
    for run in runs.values():
        run.train()
    for line in changes(asked, work):
        print(line)
    code, text = verdict(compare_steps(asked.run_dir, work / WITH, asked.steps))
    print(text, flush=True)
    return code


def words(asked: Counterfactual, run_dir: Path, rows: tuple[str, ...]) -> tuple[str, ...]:
    """For the launcher: the run's own configuration, from the checkpoint, to another directory; later words count."""
    tree = read_config(asked.run_dir)
    settings: dict[str, object] = {
        "trainer.default_local_dir": str(run_dir),
        "trainer.stop_at_step": asked.steps[-1],
        "trainer.save_freq": -1,
        "trainer.test_freq": asked.steps[-1],  # a validation at the end, and nowhere else
        "trainer.max_time": None,
        "trainer.checkpoint.mirror": None,
        "trainer.logger": ["console"],
        "trainer.checkpoint.save_contents": ["model", "optimizer", "extra"],
        "data.leave_out": [*tree["data"].get("leave_out", ()), *rows],
    }
    if asked.checkpoint is not None:
        begins = {"resume_mode": "resume_path", "resume_from_path": str(asked.checkpoint)}
        settings |= {f"trainer.{key}": value for key, value in begins.items()}
        settings["trainer.checkpoint.load_contents"] = list(LOADED)
    return (str(asked.num_ranks), *as_words(tree), *(f"{key}={as_word(value)}" for key, value in settings.items()))


def changes(asked: Counterfactual, work: Path) -> Iterator[str]:
    """By step what was measured with and without the rows; then how far apart the parameters are."""
    from trainer.resume_proof.bit_equality import distance

    measured = [
        {(row["step"], key): row[key] for row in read_metrics(work / name / FILE_NAME) for key in SHOWN if key in row}
        for name in (WITH, WITHOUT)
    ]
    for step in asked.steps:
        rows = f"   left out: {', '.join(asked.found[step])}" if step in asked.found else ""
        pairs = {key: [values.get((step, key)) for values in measured] for key in SHOWN}
        whole = {key: (a, b) for key, (a, b) in pairs.items() if a is not None and b is not None}
        texts = [f"{key} {a:.6g} -> {b:.6g} ({b - a:+.2g})" for key, (a, b) in whole.items()]
        yield f"step {step}: {', '.join(texts)}{rows}"
    ends = [work / name / layout.step_dir_name(asked.steps[-1]) for name in (WITH, WITHOUT)]
    apart, moved = distance(*ends), distance(asked.checkpoint, ends[0]) if asked.checkpoint else 0.0
    share = f", {apart / moved:.1%} of how far the steps moved them ({moved:.4g})" if moved else ""
    yield f"parameters after step {asked.steps[-1]}: {apart:.4g} apart{share}"


def verdict(comparison: "Comparison") -> tuple[int, str]:
    """(Exit code, in words)."""
    tensors = f" and {comparison.num_tensors} tensors" if comparison.num_tensors else ""
    if not comparison.differences:
        return EXIT_DONE, f"verdict: the steps with the rows are those of the run, bit for bit (rows{tensors})"
    return EXIT_CRASH, (
        f"verdict: the steps with the rows are not those of the run (largest difference "
        f"{comparison.max_difference:g}), first at {comparison.differences[0]}: what is less than that says nothing of "
        f"the rows. Another number of ranks, another environment or trainer.deterministic=false on a GPU may be why"
    )
