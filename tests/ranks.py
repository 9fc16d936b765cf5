"""Run a function on several gloo ranks, each a process forked from a server that has imported
torch once.
"""

import faulthandler
import os
import pickle
import sys
import traceback
import warnings
from contextlib import contextmanager

from processes import free_port
from rank_server import CONTEXT


@contextmanager
def started_ranks(function, world_size, *args, **kwargs):
    """Run `function(world, *args, **kwargs)` on every rank. Yields (process, receiver of its
    result) for each rank.

    `kwargs` may hold `fsdp_size`, `sequence_size`, `expert_size` and `on_device`. The processes are
    gone at the end of the block.
    """
    port = free_port()
    ranks = []
    for rank in range(world_size):
        receiver, sender = CONTEXT.Pipe(duplex=False)
        process = CONTEXT.Process(
            target=_main, args=(function, rank, world_size, port, sender, args, kwargs), daemon=True
        )
        process.start()
        sender.close()
        ranks.append((process, receiver))
    try:
        yield ranks
    finally:
        for process, receiver in ranks:
            process.kill()
            process.join()
            receiver.close()


def run_ranks(
    function,
    world_size,
    *args,
    timeout_s=120.0,
    **kwargs,
):
    """Return the results of `started_ranks` in rank order. Fails with the first traceback."""
    with started_ranks(function, world_size, *args, **kwargs) as ranks:
        results = [_receive(receiver, rank, timeout_s) for rank, (_, receiver) in enumerate(ranks)]
        for process, _ in ranks:
            process.join(timeout=5)
    return results


def each(world, function, source, variants):
    """Return {variant: result of `function(world, source, **variant)`}, for `run_ranks` if ranks
    need not restart.
    """
    return {name: function(world, source, **changes) for name, changes in variants.items()}


def _receive(receiver, rank, timeout_s):
    assert receiver.poll(timeout_s), f"rank {rank} gave no result within {timeout_s} s"
    try:
        is_ok, value = pickle.loads(receiver.recv_bytes())
    except EOFError:
        raise AssertionError(f"rank {rank} died without a result") from None
    assert is_ok, f"rank {rank} failed:\n{value}"
    return value


def _main(function, rank, world_size, port, sender, args, kwargs):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    import torch

    from trainer.runtime import distributed
    from trainer.runtime.heartbeat import Heartbeat
    from trainer.tracking.metrics import UnknownMetricWarning

    torch.set_num_threads(1)
    faulthandler.enable()
    warnings.simplefilter("error", UnknownMetricWarning)
    try:
        device = torch.device(kwargs.pop("on_device", "cpu"))
        sizes = {
            "fsdp_size": kwargs.pop("fsdp_size", -1),
            "sequence_size": kwargs.pop("sequence_size", 1),
            "expert_size": kwargs.pop("expert_size", 1),
        }
        world = distributed.start(device, timeout_s=60, heartbeat=Heartbeat(), **sizes)
        sender.send_bytes(pickle.dumps((True, function(world, *args, **kwargs))))
        distributed.stop()
    except BaseException:
        sender.send_bytes(pickle.dumps((False, traceback.format_exc())))
        sys.exit(1)
