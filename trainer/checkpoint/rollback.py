"""Returns a run to an older checkpoint and skips the harmful batches.

`rollbacks.json` in the run directory is written before anything else changes. A crash leaves either
the unchanged run, or a rollback that the next start completes: it moves the pointer back and sets
the newer checkpoints aside. The steps in the file are skipped permanently.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path

from trainer.checkpoint import fsio, layout
from trainer.checkpoint.layout import CheckpointInfo
from trainer.config import ConfigError
from trainer.runtime.progress import History, Position, Rollback, Rollbacks

FILE = "rollbacks.json"
STEPS_BEFORE_ONSET = 16
"""Checkpoints from this many steps before the trouble are not trusted."""
SKIPPED_AROUND = 8
"""Number of batches to skip on either side of the trouble."""
BATCHES = ("data", "train_batch_size", "seed", "data.order")
"""Fingerprints of the values that decide which samples a step trains."""


def read(run_dir: Path) -> Rollbacks:
    """Return the recorded rollbacks.

    Raises `ConfigError` for a file that cannot be read, because the run would otherwise train on
    batches that it must skip.
    """
    try:
        content = json.loads(fsio.read_bytes(run_dir / FILE))
        return Rollbacks(tuple(Rollback(**entry) for entry in content["rollbacks"]))
    except FileNotFoundError:
        return Rollbacks()
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"cannot read {run_dir / FILE}: {error}.\nFix: restore the file, or delete it to train "
            f"the skipped batches after all"
        ) from error


def has_same_batches(checkpoint: CheckpointInfo, fingerprints: Mapping[str, str]) -> bool:
    """Return True if the steps after the checkpoint trained the same batches as they would now."""
    saved = checkpoint.manifest.fingerprints
    return all(saved.get(name) == fingerprints.get(name) for name in BATCHES)


def take_over(run_dir: Path, checkpoint: CheckpointInfo | None) -> Rollbacks:
    """Return the rollbacks that precede `checkpoint`, and record them in `run_dir`.

    `checkpoint`: the start of a run that has no checkpoint in `run_dir`: a checkpoint of another
    run, or None. Replaces the record of an earlier start that ended before its first checkpoint.
    """
    rollbacks = Rollbacks()
    if checkpoint is not None:
        entries = read(checkpoint.path.resolve().parent).entries
        past = (entry for entry in entries if entry.target_step <= checkpoint.step)
        rollbacks = Rollbacks(tuple(past))
    if rollbacks != read(run_dir):
        _write(run_dir, rollbacks)
    return rollbacks


def candidates(
    run_dir: Path,
    *,
    onset: int,
    history: History,
    fingerprints: Mapping[str, str],
    leads_here: Callable[[Position], bool],
) -> list[CheckpointInfo]:
    """Return committed checkpoints well before `onset` that no earlier trouble affects, newest first.

    Only checkpoints whose next steps train the same batches as now qualify. `leads_here` returns
    False for a position from before steps of another batch size, whose fingerprints may be equal.
    """
    latest = onset - STEPS_BEFORE_ONSET
    trouble = [
        (first, last + STEPS_BEFORE_ONSET) for first, last in history.episodes if first < onset
    ]
    return [
        info
        for info in reversed(layout.committed(run_dir))
        if info.step <= latest
        and not any(first <= info.step <= last for first, last in trouble)
        and has_same_batches(info, fingerprints)
        and leads_here(info.manifest.position)
    ]


def decide(
    run_dir: Path,
    target: CheckpointInfo,
    *,
    onset: int,
    found_step: int,
    last_step: int,
    reason: str,
) -> Rollbacks:
    """Record that the run returns to `target`, then carry out the rollback.

    If this is interrupted after recording, the next start completes the rollback. `last_step` is
    never skipped, because the run ends with it.
    """
    newer = [info for info in layout.checkpoints(run_dir) if info.step > target.step]
    entry = Rollback(
        onset=onset,
        found_step=found_step,
        target_step=target.step,
        first_skipped=max(target.step + 1, onset - SKIPPED_AROUND),
        last_skipped=min(last_step - 1, found_step + SKIPPED_AROUND),
        reason=reason,
        discarded=[info.nonce for info in newer if info.nonce],
    )
    rollbacks = Rollbacks((*read(run_dir).entries, entry))
    _write(run_dir, rollbacks)
    complete(run_dir)
    return rollbacks


def _write(run_dir: Path, rollbacks: Rollbacks) -> None:
    content = {"rollbacks": [dataclasses.asdict(item) for item in rollbacks.entries]}
    text = json.dumps(content, indent=2) + "\n"
    fsio.atomic_write(run_dir / FILE, text.encode())


def complete(run_dir: Path) -> None:
    """Complete the newest recorded rollback, unless it is already complete.

    Point to its target checkpoint, and set aside the checkpoints that it discarded.
    """
    for entry in read(run_dir).entries[-1:]:
        found = layout.checkpoints(run_dir)
        discarded = [info for info in found if info.nonce in entry.discarded]
        if discarded:
            layout.publish(run_dir, entry.target_step)
        for info in discarded:
            reason = f"the run was rolled back to step {entry.target_step}: {entry.reason}"
            layout.quarantine(info.path, reason, layout.DISCARDED_PREFIX)
