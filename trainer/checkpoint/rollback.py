"""Going back to an older checkpoint and past the batches that did harm: decided once, written down,
then carried out.

`rollbacks.json` in the run directory is written before anything else changes, so a crash at any
point leaves either the run as it was or a rollback that the next start completes: the pointer goes
back, and what was saved after the checkpoint is set aside. The steps it names are passed over for
good.
"""

import dataclasses
import json
from pathlib import Path

from trainer.checkpoint import fsio, layout
from trainer.checkpoint.layout import CheckpointInfo
from trainer.config import ConfigError
from trainer.runtime.progress import History, Rollback, Rollbacks

FILE = "rollbacks.json"
STEPS_BEFORE_ONSET = 16
"""Checkpoints saved this shortly before the trouble showed are not trusted."""
SKIPPED_AROUND = 8
"""Batches passed over on either side."""


def read(run_dir: Path) -> Rollbacks:
    """Raises `ConfigError` for a file that cannot be read: without it the run would train what
    it must not.
    """
    try:
        text = fsio.read_bytes(run_dir / FILE)
    except FileNotFoundError:
        return Rollbacks()
    except OSError as error:
        raise _unreadable(run_dir, error) from error
    try:
        return Rollbacks(tuple(Rollback(**entry) for entry in json.loads(text)["rollbacks"]))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _unreadable(run_dir, error) from error


def _unreadable(run_dir: Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"cannot read {run_dir / FILE}: {error}; restore it, or remove it to forget them"
    )


def candidates(
    run_dir: Path, *, onset: int, history: History, data: str | None
) -> list[CheckpointInfo]:
    """Whole checkpoints from well before `onset` and outside any earlier trouble, newest first.

    Only of the same data (its fingerprint): where rows came since, a restart would let them join in
    another epoch.
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
        and info.manifest is not None
        and info.manifest.fingerprints.get("data") == data
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
    """Write down that the run goes back to `target`, then carry it out. From the first write on it
    is the truth.

    `last_step`, the last of the run, is never passed over: with it a run ends.
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
    content = {"rollbacks": [dataclasses.asdict(item) for item in rollbacks.entries]}
    fsio.atomic_write(run_dir / FILE, (json.dumps(content, indent=2) + "\n").encode())
    complete(run_dir)
    return rollbacks


def complete(run_dir: Path) -> None:
    """Carry out the newest rollback as far as it is not: point to its checkpoint, set aside
    what it discarded.
    """
    entries = read(run_dir).entries
    if not entries:
        return
    entry = entries[-1]
    discarded = [info for info in layout.checkpoints(run_dir) if info.nonce in entry.discarded]
    if not discarded:
        return
    layout.publish(run_dir, entry.target_step)
    for info in discarded:
        layout.quarantine(
            info.path, f"the run was rolled back to step {entry.target_step}: {entry.reason}"
        )
