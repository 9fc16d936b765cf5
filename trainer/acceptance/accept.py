"""Judges the lines on this machine, says each verdict as it falls, and makes what can be shared of them (floor 5)."""

import getpass
import math
import re
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import trainer
from trainer.acceptance.evidence import Evidence, MissingEvidenceError
from trainer.acceptance.lines import FAIL, LINES, NOT_POSSIBLE, OK, WARN, Judge, Judgement
from trainer.errors import CannotWriteError
from trainer.resume_proof.killed_runs import RunFailedError
from trainer.resume_proof.proof import Trial

_PATH = re.compile(r"(?<![\w.])~?/[^\s:'\",;)\]]+")
_KNOWN_VALUES = {"true", "false", "null", "auto", "selective", "offload", "packed", "per_document", "cpu", "cuda"}
_KNOWN_VALUES |= {"float32", "bfloat16", "adamw", "muon"}
_WIDTH = max(map(len, LINES))


def accept(trial: Trial, *, only: Collection[str], keep: Path | None) -> dict[str, Judgement]:
    """{line: its judgement}, of the lines in `only` or of all. Nothing is left but what `keep` names."""
    found: dict[str, Judgement] = {}
    with _directories(keep) as (work, scratch):
        evidence = Evidence(trial, work=work, scratch=scratch)
        for name, (_, judge) in LINES.items():
            if not only or name in only:
                started = time.monotonic()
                found[name] = _judged(judge, evidence)
                verdict, seconds = f"{found[name].verdict:{len(NOT_POSSIBLE)}}", time.monotonic() - started
                print(f"{verdict}  {name:{_WIDTH}}  {found[name].text} ({seconds:.0f} s)", flush=True)
    return found


def _judged(judge: Judge, evidence: Evidence) -> Judgement:
    """A failed run fails the line that asked for it first."""
    try:
        return judge(evidence)
    except MissingEvidenceError as error:
        return Judgement(NOT_POSSIBLE, str(error))
    except RunFailedError as error:
        print(error, file=sys.stderr)
        reasons = [line for line in str(error).splitlines() if "ERROR" in line]
        return Judgement(FAIL, (reasons[-1] if reasons else str(error).splitlines()[0]).strip())


@contextmanager
def _directories(keep: Path | None) -> Iterator[tuple[Path, Path]]:
    """For what runs write and their temporary files: short, sockets may be made in it. Raises `CannotWriteError`."""
    try:
        if keep is not None:
            keep.mkdir(parents=True)
        scratch = Path(tempfile.mkdtemp(prefix="sft-accept-"))
    except OSError as error:
        raise CannotWriteError(f"cannot write: {error}; --keep names a directory that is not there yet") from error
    try:
        work = keep.resolve() if keep is not None else scratch / "runs"
        work.mkdir(exist_ok=True)
        yield work, scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def summary(found: dict[str, Judgement]) -> str:
    counts = {verdict: [name for name in found if found[name].verdict == verdict] for verdict in (FAIL, WARN)}
    num_ok = sum(judgement.verdict == OK for judgement in found.values())
    parts = [f"{num_ok} of {len(found)} lines ok"]
    parts += [f"{verdict}: {', '.join(names)}" for verdict, names in counts.items() if names]
    return "; ".join(parts)


def shareable(trial: Trial, found: dict[str, Judgement], *, wall_s: float) -> dict[str, object]:
    """As JSON, without paths, names of hosts and of users; of overrides that could hold some, the key alone."""
    lines = [{"line": name, **asdict(judgement)} for name, judgement in found.items()]
    document: dict[str, object] = {
        "command": "accept",
        "version": trainer.__version__,
        "ranks": trial.num_ranks,
        "device": "cuda" if trial.is_on_gpu else "cpu",
        "steps": trial.steps,
        "overrides": [_harmless(word) for word in trial.overrides],
        "wall_s": round(wall_s, 1),
        "lines": [{key: _without_names(value) for key, value in line.items()} for line in lines],
    }
    return document


def _harmless(word: str) -> str:
    key, _, value = word.partition("=")
    is_shown = value in _KNOWN_VALUES or re.fullmatch(r"-?\d+(\.\d+)?(e-?\d+)?", value)
    return word if is_shown else f"{key}=(not shown)"


def _without_names(value: object) -> object:
    if isinstance(value, dict):
        return {key: _without_names(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if not isinstance(value, str):
        return value
    text = _PATH.sub("(path)", value)
    for private in (socket.gethostname(), getpass.getuser()):
        text = re.sub(rf"(?<!\w){re.escape(private)}(?!\w)", "(name)", text)
    return text
