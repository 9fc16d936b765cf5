"""Weights & Biases, online or offline (WANDB_MODE): one run continued over all attempts, and its offline files."""

import logging
import os
import struct
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.tracking.backend import Backend, Held, last_steps
from trainer.tracking.events_file import Event
from trainer.tracking.metrics_file import MetricsRow
from trainer.tracking.run_info import RunInfo

FILE_HEADER_BYTES = 7
BLOCK_BYTES = 32768
FRAGMENT = struct.Struct("<IHB")
FULL, LAST = 1, 4
"""Types of the fragment that ends a record."""


def offline_files(directory: Path, run_id: str) -> list[Path]:
    """Of a run, in order of their start."""
    return sorted(directory.glob(f"offline-run-*-{run_id}/run-{run_id}.wandb"))


def history(path: Path) -> Iterator[dict[str, str]]:
    """The rows logged, with wandb's own `_step` and `_timestamp`, each value as JSON."""
    for record in read_records(path):
        if record.WhichOneof("record_type") == "history":
            yield {item.key or ".".join(item.nested_key): item.value_json for item in record.history.item}


def read_records(path: Path) -> Iterator[Any]:
    """Protobuf records (`wandb_internal_pb2.Record`)."""
    from wandb.proto import wandb_internal_pb2

    content, parts, place = path.read_bytes(), b"", FILE_HEADER_BYTES
    while place + FRAGMENT.size <= len(content):
        left_in_block = BLOCK_BYTES - place % BLOCK_BYTES
        if left_in_block < FRAGMENT.size:
            place += left_in_block
            continue
        _, num_bytes, kind = FRAGMENT.unpack_from(content, place)
        place += FRAGMENT.size
        if not kind or place + num_bytes > len(content):
            return
        parts += content[place : place + num_bytes]
        place += num_bytes
        if kind in (FULL, LAST):
            yield wandb_internal_pb2.Record.FromString(parts)  # type: ignore[attr-defined]
            parts = b""


logger = logging.getLogger(__name__)

INIT_TIMEOUT_S = 30.0
FINISH_TIMEOUT_S = 50.0
MAX_TITLE_CHARS = 63
STEP = "trainer/step"
LAST_STEP = "trainer/last_{}_step"
"""In the summary, by kind of row: what a resume online asks for."""


def project(info: RunInfo) -> str:
    """WANDB_PROJECT puts training and evaluation runs of several configurations into one project."""
    return os.environ.get("WANDB_PROJECT") or info.project_name


def where(info: RunInfo) -> str:
    if os.environ.get("WANDB_MODE") in ("offline", "dryrun"):
        return f"offline, to upload: wandb sync {info.run_dir}/wandb/offline-run-*"
    return f"project {project(info)}, its address follows"


def require_login() -> None:
    """Without a key wandb would ask for one on the terminal. Raises `RuntimeError`, or wandb's error of a bad one."""
    import wandb

    if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False):
        raise RuntimeError("no API key: run `wandb login`, or set WANDB_MODE=offline")


class WandbBackend(Backend):
    """Steps are sent as the metric `trainer/step`: wandb's own step counts rows, as it must never go back.

    What another attempt sent is taken from the run's summary (online) or from the offline files in `run_dir/wandb`.
    After a rollback the steps repeated appear a second time: wandb cannot take rows back.
    """

    def __init__(self, info: RunInfo) -> None:
        self._info = info
        self._run: Any = None
        self._held = Held({})
        self._next_step = 0

    def open(self) -> None:
        import wandb

        require_login()
        run_id = self._info.run_file.get("wandb")
        if run_id is None:
            run_id = uuid.uuid4().hex[:12]
            self._info.run_file.set("wandb", run_id)
        self._run = wandb.init(
            project=project(self._info),
            name=self._name(),
            group=self._info.group,
            config=dict(self._info.config),
            dir=str(self._info.run_dir),
            id=run_id,
            resume="allow",
            # The finish timeout also bounds wandb's exit hook: a dead network must not hold the process.
            settings=wandb.Settings(
                console="off", quiet=True, init_timeout=INIT_TIMEOUT_S, finish_timeout=FINISH_TIMEOUT_S
            ),
        )
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)
        if self._run.offline:
            self._held = Held(last_steps(self._points(run_id), self._info.rollbacks()))
        else:
            logger.info("wandb: %s", self._run.url)
            self._next_step = self._run.step
            self._held = Held({}, self._last_steps_online())
        for row in self._info.earlier_rows():
            self.log(row)

    def log(self, row: MetricsRow) -> None:
        if data := self._held.missing(row):
            self._run.log({**data, STEP: row.step, "_timestamp": row.ts}, step=self._next_step, commit=True)
            self._next_step += 1
            if not self._run.offline:
                self._run.summary[LAST_STEP.format(row.kind)] = row.step

    def rewind(self, step: int) -> None:
        self._held.rewind(step)
        if not self._run.offline:
            for kind, last in self._last_steps_online().items():
                self._run.summary[LAST_STEP.format(kind)] = min(step, last)

    def _name(self) -> str:
        """WANDB_NAME is that of the training, not of its evaluations."""
        given = None if "evaluation" in self._info.config else os.environ.get("WANDB_NAME")
        return given or self._info.experiment_name

    def table(self, name: str, step: int, rows: Sequence[Mapping[str, str | float]]) -> None:
        import wandb

        columns: list[str | int] = list(rows[0])
        shown = wandb.Table(columns=columns, data=[list(row.values()) for row in rows])
        self._run.log({name: shown, STEP: step}, step=self._next_step, commit=True)
        self._next_step += 1

    def alert(self, event: Event) -> None:
        self._run.alert(f"{event.kind} at step {event.step}"[:MAX_TITLE_CHARS], event.message, level="ERROR")

    def close(self, exit_code: int) -> None:
        import wandb

        self._run.finish(exit_code=exit_code)
        # finish() returns before wandb's service has written its file; a container that ends now would cut it.
        wandb.teardown(exit_code=exit_code)

    def _points(self, run_id: str) -> Iterator[tuple[str, int, float]]:
        """(metric, step, Unix seconds) of the offline files; counts their rows on the way."""
        for path in offline_files(self._info.run_dir / "wandb", run_id):
            for row in history(path):
                self._next_step = max(self._next_step, int(row["_step"]) + 1)
                if STEP in row:
                    step, ts = int(row[STEP]), float(row["_timestamp"])
                    yield from ((key, step, ts) for key in row)

    def _last_steps_online(self) -> dict[str, int]:
        """By kind of row, from the summary, which a continued run brings along."""
        prefix, suffix = LAST_STEP.split("{}")
        summary = dict(self._run.summary)
        keys = [key for key in summary if key.startswith(prefix) and key.endswith(suffix)]
        return {key.removeprefix(prefix).removesuffix(suffix): summary[key] for key in keys}
