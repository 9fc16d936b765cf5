"""Rank processes that run the real command many times, which saves starting Python and torch.

After a run that failed all ranks are started again: the next run must not meet what it left.
"""

import os
import shutil
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from rank_server import CONTEXT

from trainer.errors import EXIT_DONE
from trainer.runtime.distributed import free_port

TIMEOUT_S = 120.0


@dataclass(frozen=True)
class CommandStart:
    """One start of the command; `image` is where rank 0 copies the run directory to as a kill in
    step `killed_in` would leave it.
    """

    words: tuple[str, ...]
    log: Path
    port: int
    run_dir: Path
    killed_in: int = 0
    image: Path | None = None


@dataclass(frozen=True)
class CommandEnd:
    """The exit code, and what was printed; the code is None where the command did not end."""

    code: int | None
    output: str


class CommandRanks:
    """As many as are asked for at a time; gone at the end of the block."""

    def __init__(self) -> None:
        self._ranks: list[tuple[BaseProcess, Connection]] = []

    def __enter__(self) -> "CommandRanks":
        return self

    def __exit__(self, *_: object) -> None:
        for process, connection in self._ranks:
            process.kill()
            process.join()
            connection.close()
        self._ranks = []

    def run(
        self,
        num_ranks: int,
        *words: str,
        run_dir: Path,
        killed_in: int = 0,
        image: Path | None = None,
    ) -> CommandEnd:
        while len(self._ranks) < num_ranks:
            ours, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(target=_serve, args=(len(self._ranks), theirs), daemon=False)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))
        log = run_dir.with_suffix(".log")
        log.write_text("")
        words = (*words, f"trainer.default_local_dir={run_dir}")
        start = CommandStart(words, log, free_port(), run_dir, killed_in, image)
        connections = [connection for _, connection in self._ranks[:num_ranks]]
        for connection in connections:
            connection.send((num_ranks, start))
        codes: list[int] = []
        while len(codes) < num_ranks:
            ready = wait(connections, timeout=TIMEOUT_S)
            try:
                codes += [connections.pop(connections.index(c)).recv() for c in ready]  # type: ignore[arg-type, union-attr]
            except EOFError:
                ready = []
            if not ready or codes[-1] != EXIT_DONE:
                break
        output = log.read_text(errors="replace")
        if codes == [EXIT_DONE] * num_ranks:
            return CommandEnd(EXIT_DONE, output)
        self.__exit__()
        failed = [code for code in codes if code != EXIT_DONE]
        return CommandEnd(failed[0] if failed else None, output)


def _serve(rank: int, connection: Connection) -> None:
    import torch

    from trainer.runtime import distributed
    from trainer.train.start import end

    torch.set_num_threads(1)
    end.write_final_report = lambda run_dir: None  # half a second, and not what is compared
    while True:
        try:
            num_ranks, start = connection.recv()
        except EOFError:
            return
        code = _run(rank, num_ranks, start)
        distributed.stop()
        torch.use_deterministic_algorithms(False)
        connection.send(code)


def _run(rank: int, num_ranks: int, start: CommandStart) -> int:
    from trainer.__main__ import main
    from trainer.train import fit

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(start.port), HF_HUB_OFFLINE="1")
    output = os.open(start.log, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    training_step = fit.training_step

    def stepped(run: Any, batch: Any) -> Any:
        if batch.step == start.killed_in:
            run.checkpoints.finish()
            if rank == 0 and start.image is not None:
                shutil.copytree(
                    start.run_dir,
                    start.image,
                    symlinks=True,
                    ignore=shutil.ignore_patterns("*.tmp"),
                )
        return training_step(run, batch)

    fit.training_step = stepped
    try:
        return main(list(start.words))
    finally:
        fit.training_step = training_step
