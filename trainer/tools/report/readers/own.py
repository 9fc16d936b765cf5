"""Reads the files that accompany a log in this trainer's run directory."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.checkpoint import layout, rollback
from trainer.config import ConfigError
from trainer.runtime.evaluations import read_summaries
from trainer.runtime.heartbeat import is_live
from trainer.runtime.json_lines import JsonLines, flat, read_object
from trainer.tools.report.readers.parsing import as_step
from trainer.tools.report.readers.store import Store
from trainer.tools.report.run_log import LogEvent, ServingCheck
from trainer.tracking import events_file, row_losses, run_info

NUM_HARD_ROWS = 10
PROOF_FIELDS = ServingCheck.__dataclass_fields__.keys()


def add_run_directory(run_dir: Path, store: Store) -> None:
    """Add a run's configuration, environment, sample, events, evaluations, proofs and hard rows."""
    run = read_object(run_dir / run_info.FILE_NAME)
    is_current = _currency(run_dir)
    proofs = map(read_object, run_dir.glob("proofs/step_*.json"))
    served = [
        ServingCheck(**{name: proof[name] for name in PROOF_FIELDS})
        for proof in proofs
        if proof.keys() >= PROOF_FIELDS and is_current(proof)
    ]
    store.facts |= {
        "source": "fsdp-sft",
        "config": flat(run.get("config") or {}),
        "environment": flat(run.get("environment") or {}),
        "sample": run.get("sample", ""),
        "total_steps": run.get("total_steps") or None,
        "proofs": tuple(sorted(served, key=lambda proof: proof.step)),
        "is_running": is_live(run_dir),
    }
    try:
        _add_events(run_dir, store)
        summaries = {
            name: {step: row for step, row in rows.items() if is_current(row)}
            for name, rows in read_summaries(run_dir).items()
        }
        store.facts["evaluations"] = {name: rows for name, rows in summaries.items() if rows}
        row_file = run_dir / row_losses.FILE_NAME
        hard_rows, by_step = row_losses.read_hard_rows(row_file, limit=NUM_HARD_ROWS)
        store.facts |= {"hard_rows": tuple(hard_rows), "hardest_by_step": by_step}
    except OSError as error:
        store.facts["notes"] = (f"{error.filename} cannot be read: {error.strerror}",)


def _currency(run_dir: Path) -> Callable[[Mapping[str, Any]], bool]:
    """Return a function that returns True if the result in a row belongs to this run's checkpoints.

    A result belongs to a discarded checkpoint if a rollback recorded its nonce, or if the
    checkpoint of its step now has a different one. Rotation does not discard results. Results
    without a nonce count.
    """
    saved = {info.step: info.nonce for info in layout.committed(run_dir)}
    discarded: frozenset[str] = frozenset()
    with suppress(ConfigError):  # a start refuses a record that cannot be read
        discarded = rollback.read(run_dir).discarded_nonces

    def is_current(row: Mapping[str, Any]) -> bool:
        nonce = row.get("nonce")
        return not nonce or (nonce not in discarded and saved.get(row["step"], nonce) == nonce)

    return is_current


def _add_events(run_dir: Path, store: Store) -> None:
    """Add the events, and the exit code unless the run has been continued since it ended."""
    lines = JsonLines(run_dir / events_file.FILE_NAME, is_final=True)
    events = []
    for _, row in lines:
        if row.get("kind") == "start" or "exit_code" in row:
            store.facts["exit_code"] = row.get("exit_code")
        words = (str(row.get(name, "")) for name in ("kind", "message", "level"))
        events.append(LogEvent(as_step(row.get("step")) or 0, *words))
    store.facts["events"] = tuple(events)
    store.num_unparsed += lines.num_unparsed
