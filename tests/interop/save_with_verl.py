"""Train and save with verl's own FSDP2 code: VERL_PYTHON save_with_verl.py '<JSON of Job>'."""

import json
import socket
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
import verl_parts
import verl_run

MESHES = "verl.workers.engine.fsdp.utils"
FSDP = "verl.utils.fsdp_utils"
OPTIMIZER = "verl.workers.config.optimizer"
SCHEDULES = "verl.utils.torch_functional"
MANAGER = "verl.utils.checkpoint.fsdp_checkpoint_manager"
HANDLER = "verl.utils.checkpoint.checkpoint_handler"
MODULES = (MESHES, FSDP, OPTIMIZER, SCHEDULES, MANAGER, HANDLER)


class Engine:
    """What verl's CheckpointHandler asks of its engine."""

    def __init__(self, manager: Any) -> None:
        self.manager = manager

    def is_mp_src_rank_with_outputs(self) -> bool:
        return True

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank()

    def save_checkpoint(self, **arguments: Any) -> None:
        self.manager.save_checkpoint(**arguments)


def sharded_model(config_dir: Path, settings: verl_run.Settings) -> Any:
    meshes, fsdp = verl_parts.load(MESHES), verl_parts.load(FSDP)
    meshes.get_device_name = lambda: "cpu"
    model = verl_run.build_model(config_dir, settings.seed)
    mesh = meshes.create_device_mesh(dist.get_world_size(), settings.fsdp_size)
    options = {"mesh": mesh, "mp_policy": fsdp.MixedPrecisionPolicy(), "reshard_after_forward": True}
    fsdp.apply_fsdp2(model, options, {})
    return model


def run(rank: int, world_size: int, port: int, job: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    settings = verl_run.Settings(**{**job["settings"], "save_steps": tuple(job["settings"]["save_steps"])})
    model = sharded_model(Path(job["config_dir"]), settings)
    optim = verl_parts.load(OPTIMIZER)
    optimizer = optim.build_optimizer(model.parameters(), optim.FSDPOptimizerConfig(lr=verl_run.PEAK_LR))
    scheduler = verl_parts.load(SCHEDULES).get_cosine_schedule_with_warmup(optimizer, 2, 20)
    manager = verl_parts.load(MANAGER).FSDPCheckpointManager(
        model, optimizer, scheduler, checkpoint_config={"save_contents": ["model", "optimizer", "extra"]}
    )

    def save(step: int, loader: Any) -> None:
        handler = verl_parts.load(HANDLER).CheckpointHandler(Engine(manager), loader, default_local_dir=job["run_dir"])
        handler.save_checkpoint(step)

    verl_run.train(model, optimizer, scheduler, settings, save=save, expected=Path(job["expected"]))
    dist.destroy_process_group()


def main(job: dict[str, Any]) -> None:
    verl_parts.prepare()
    verl_parts.stand_in_for_unused()
    for name in MODULES:  # imported once, then forked
        verl_parts.load(name)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = (job["world_size"], port, job)
    torch.multiprocessing.start_processes(run, arguments, nprocs=job["world_size"], start_method="fork")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
