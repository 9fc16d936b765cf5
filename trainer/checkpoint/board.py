"""What ranks tell each other during a save: acknowledgements with a status and a deadline, instead of a barrier.

They go through a key-value store of their own and not through a collective, so a save may run behind training, and a
rank that is slow or gone costs a deadline, never a hang.
"""

import json
import os
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from trainer.runtime.distributed import World

GRACE_S = 10.0
"""How much longer than the main rank the others wait for its verdict, and it for them to have read it."""
NO_ANSWER = "gave no answer in time"


class SaveFailedError(RuntimeError):
    """The save was given up on all ranks alike; the message names rank and cause."""


class UnresolvedSaveError(SaveFailedError):
    """The main rank gave no answer in time: only this rank knows, and a checkpoint may or may not exist."""


class Board:
    """One store per run, hosted by the main rank. Creating it is collective; using it is not."""

    def __init__(self, world: World, *, grace_s: float = GRACE_S) -> None:
        self._world, self._grace_s = world, grace_s
        host = os.environ.get("MASTER_ADDR", "127.0.0.1")
        port: list[int] = [0]
        if world.is_main:
            self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
            port = [self._store.port]
        dist.broadcast_object_list(port, src=0)
        if not world.is_main:
            self._store = dist.TCPStore(host, port[0], is_master=False)

    def agree(self, topic: str, *, value: Any = None, error: str | None = None, deadline: float) -> list[Any]:
        """Report `value` (plain JSON) or `error`; returns every rank's value in rank order.

        `deadline` is a `time.monotonic()` of this rank. Raises `SaveFailedError` on every rank if any rank reported
        an error or, by the main rank's deadline, nothing.
        """
        report = json.dumps({"value": value, "error": error})
        if self._world.is_main:
            verdict = self._collect(topic, report, deadline)
            self._announce(topic, verdict)
        else:
            self._store.set(f"{topic}/{self._world.rank}", report)
            verdict = self._await_verdict(topic, deadline + self._grace_s)
            self._store.set(f"{topic}/read by {self._world.rank}", "")
        if verdict["error"] is not None:
            raise SaveFailedError(verdict["error"])
        return list(verdict["values"])

    def forget(self, topic: str) -> None:
        """Main rank: free what was said about a topic that every rank is done with."""
        ranks = range(1, self._world.size)
        for name in ("verdict", *ranks, *(f"read by {rank}" for rank in ranks)):
            self._store.delete_key(f"{topic}/{name}")

    def _collect(self, topic: str, own: str, deadline: float) -> dict[str, Any]:
        reports = [json.loads(own)]
        for rank in range(1, self._world.size):
            try:
                reports.append(json.loads(self._wait_for(f"{topic}/{rank}", deadline)))
            except dist.DistStoreError:
                reports.append({"value": None, "error": NO_ANSWER})
        errors = [f"rank {rank}: {report['error']}" for rank, report in enumerate(reports) if report["error"]]
        silent = [rank for rank, report in enumerate(reports) if report["error"] == NO_ANSWER]
        values = [report["value"] for report in reports]
        return {"values": values, "error": errors[0] if errors else None, "silent": silent}

    def _announce(self, topic: str, verdict: dict[str, Any]) -> None:
        """Main rank: tell all, and stay until they have read it, for the store ends with this process."""
        self._store.set(f"{topic}/verdict", json.dumps(verdict))
        deadline = time.monotonic() + self._grace_s
        for rank in range(1, self._world.size):
            if rank not in verdict["silent"]:
                with suppress(dist.DistStoreError):
                    self._wait_for(f"{topic}/read by {rank}", deadline)

    def _await_verdict(self, topic: str, deadline: float) -> dict[str, Any]:
        """Asked for in a thread: torch's client waits for a store whose process is stopped without any limit."""
        answers: list[bytes] = []

        def ask() -> None:
            with suppress(dist.DistError):
                answers.append(self._wait_for(f"{topic}/verdict", deadline))

        asking = threading.Thread(target=ask, name="board", daemon=True)
        asking.start()
        asking.join(max(0.0, deadline - time.monotonic()) + 1.0)
        if not answers:
            raise UnresolvedSaveError("rank 0 gave no answer in time")
        verdict: dict[str, Any] = json.loads(answers[0])
        return verdict

    def _wait_for(self, key: str, deadline: float) -> bytes:
        self._store.wait([key], timedelta(seconds=max(0.1, deadline - time.monotonic())))
        value: bytes = self._store.get(key)
        return value
