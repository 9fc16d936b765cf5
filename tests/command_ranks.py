"""Ranks that stay: each runs the real command again and again, without the time to start a process
and import torch.

What a rank leaves behind in its process the next run would meet; so after a run that ended
otherwise than with success or a refusal all ranks are made anew.
"""

import os
import shutil
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from rank_server import CONTEXT

from trainer.errors import EXIT_DONE, EXIT_USAGE
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
    """`code` None: it did not end. `has_prepared`: whether the data was."""

    code: int | None
    has_prepared: bool
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
        ends: list[tuple[int | None, bool]] = []
        while len(ends) < num_ranks:
            ready = wait(connections, timeout=TIMEOUT_S)
            try:
                ends += [connections.pop(connections.index(c)).recv() for c in ready]  # type: ignore[arg-type, union-attr]
            except EOFError:
                ready = []
            if not ready or ends[-1][0] not in (EXIT_DONE, EXIT_USAGE):
                break
        codes = {code for code, _ in ends}
        is_sound = len(ends) == num_ranks and len(codes) == 1 and codes <= {EXIT_DONE, EXIT_USAGE}
        if not is_sound:
            self.__exit__()
        worst = next((code for code in codes if code != EXIT_DONE), EXIT_DONE if is_sound else None)
        return CommandEnd(
            worst, any(has_prepared for _, has_prepared in ends), log.read_text(errors="replace")
        )


def _serve(rank: int, connection: Connection) -> None:
    import torch

    from trainer.runtime import distributed
    from trainer.train.start import end, inputs

    torch.set_num_threads(1)
    end.write_final_report = lambda run_dir: None  # half a second, and not what is compared
    prepare_data, prepared = inputs.prepare_data, list[bool]()

    def noted(*args: Any, **kwargs: Any) -> Any:
        prepared.append(True)
        return prepare_data(*args, **kwargs)

    inputs.prepare_data = noted
    while True:
        try:
            num_ranks, start = connection.recv()
        except EOFError:
            return
        prepared.clear()
        code = _run(rank, num_ranks, start)
        distributed.stop()
        torch.use_deterministic_algorithms(False)
        connection.send((code, bool(prepared)))


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
