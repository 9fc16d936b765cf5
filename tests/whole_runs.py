"""Whole runs of the real command on forked ranks, like `run_sft.sh` but without importing torch.

The ranks are children of a server that has imported torch once. This file does the work of
torchrun's agent: a rank that exits with a code other than 0 ends the others.
"""

import os
import shutil
import signal
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path

from processes import free_port
from rank_server import CONTEXT
from small_files import change_json

from trainer.checkpoint import layout
from trainer.launch.supervise import run_exit_code
from trainer.quickstart import MODEL_DIR
from trainer.runtime.status import VARIABLE, Status, new_status
from trainer.tracking import read_metrics

AGENT_PATIENCE_S = 30.0
POLL_S = 0.002


def tiny_model(root):
    """Return overrides for a run on the quickstart's samples with a model of one small layer.
    `root` holds the model and the cache.
    """
    if not (root / "model").exists():
        shutil.copytree(MODEL_DIR, root / "model")
        shrink(root / "model", hidden_size=32, intermediate_size=64)
    return (
        f"data.cache_dir={root}/cache",
        f"model.partial_pretrain={root}/model",
        "model.random_weights=true",
        "model.fsdp_config.param_dtype=float32",
        "trainer.device=cpu",
        "data.train_max_samples=64",
        "data.train_batch_size=4",
        "data.val_ratio=0.1",
    )


def shrink(model, **sizes):
    """Let a directory with the quickstart's config.json describe one small layer."""
    small = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    change_json(model / "config.json", **small, head_dim=16, **sizes)


@dataclass
class Attempt:
    """One start of a run."""

    ranks: list[BaseProcess]
    status: Status
    log: Path
    was_signalled: bool = False
    failed_at: float | None = None
    codes: dict[int, int] = field(default_factory=dict)

    def send(self, number, *ranks):
        """Signal some ranks, or all of them like the launcher's stop request. SIGKILL is not
        announced to anyone.
        """
        self.was_signalled |= number != signal.SIGKILL
        for rank in ranks or range(len(self.ranks)):
            if self.ranks[rank].is_alive():
                with suppress(ProcessLookupError):  # it ended just now
                    os.kill(self.ranks[rank].pid, number)

    @property
    def can_be_signalled(self):
        """Return True if every rank has registered. The launcher sends signals only after that."""
        return len(self.status.beats()) == len(self.ranks)

    def is_over(self):
        """Return True if all ranks are gone. Does the agent's work in the meantime."""
        alive = [process for process in self.ranks if process.is_alive()]
        now = time.monotonic()
        if self.failed_at is None and any(process.exitcode for process in self.ranks):
            self.failed_at = now
            for process in alive:
                process.terminate()
        if self.failed_at is not None and now - self.failed_at > AGENT_PATIENCE_S:
            for process in alive:
                process.kill()
        return not alive

    def wait(self, timeout_s):
        """Return the exit code of the run; None if it does not end in time."""
        deadline = time.monotonic() + timeout_s
        while not self.is_over():
            if time.monotonic() > deadline:
                return None
            time.sleep(POLL_S)
        agent_code = int(any(process.exitcode for process in self.ranks))
        return run_exit_code(
            self.status.exit_code(), agent_code=agent_code, was_signalled=self.was_signalled
        )

    def stacks(self):
        """Return the stacks of all living ranks, as the watchdog requests them."""
        for process in self.ranks:
            if process.is_alive():
                os.kill(process.pid, signal.SIGUSR2)
        time.sleep(1.0)
        return "\n".join(
            f"rank {number}:\n{self.status.stacks(number).decode(errors='replace')}"
            for number in range(len(self.ranks))
        )

    @property
    def output(self):
        return self.log.read_text(errors="replace")


@contextmanager
def started(num_ranks, *words, log, before=None):
    """Start a run that ends with the block. `before` is called first in every rank."""
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("")
    with new_status(num_ranks) as status:
        arguments = (num_ranks, free_port(), status.address, words, log, before)
        ranks = [
            CONTEXT.Process(target=_rank, args=(rank, *arguments)) for rank in range(num_ranks)
        ]
        for process in ranks:
            process.start()
        try:
            yield Attempt(ranks, status, log)
        finally:
            for process in ranks:
                process.kill()
                process.join()


def _rank(rank, num_ranks, port, status, words, log, before):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks))
    os.environ[VARIABLE] = status
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), HF_HUB_OFFLINE="1")
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    import torch

    from trainer.__main__ import main
    from trainer.runtime.signals import leave

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    torch.set_num_threads(1)
    if before is not None:
        before()
    leave(main(list(words)))


def run(
    num_ranks,
    *words,
    log,
    before=None,
    timeout_s=180.0,
):
    """Return (exit code, output) of one start."""
    with started(num_ranks, *words, log=log, before=before) as attempt:
        return attempt.wait(timeout_s), attempt.output


def train(
    run_dir,
    num_ranks,
    *words,
    code=0,
    before=None,
    timeout_s=180.0,
):
    """Start a run in `run_dir` and return its output. It must end with `code`; None means that it
    is killed.
    """
    words = (*words, f"trainer.default_local_dir={run_dir}")
    log = run_dir.with_suffix(".log")
    found, output = run(num_ranks, *words, log=log, before=before, timeout_s=timeout_s)
    assert (found not in (0, 2, None)) if code is None else found == code, output
    return output


def curve(run_dir, key="train/loss"):
    """Return {step: value} from the newest attempt of each step; empty before the first step."""
    path = run_dir / "metrics.jsonl"
    rows = read_metrics(path) if path.exists() else []
    return {int(row["step"]): row[key] for row in rows if key in row}


def saved_steps(run_dir):
    return [info.step for info in layout.checkpoints(run_dir)]


def before_steps(act):
    """In this process, call `act(run, step)` before each step, counted from 1."""
    from trainer.train import fit

    whole = fit.training_step

    def training_step(run, batch):
        act(run, batch.step)
        return whole(run, batch)

    fit.training_step = training_step


def stop_in_step(step, number=signal.SIGTERM):
    """In this process, send the signal within the step. Before a SIGKILL, the saves of earlier
    steps are completed.
    """

    def stop(run, at):
        if at == step:
            if number == signal.SIGKILL:
                run.checkpoints.finish()
            os.kill(os.getpid(), number)

    before_steps(stop)
