"""A short run of verl's SFT trainer in miniature: the same objects in the same order, whoever makes and saves them.

Imports nothing of this project, so that verl's own interpreter runs it too.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.utils.data import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import AutoConfig, AutoModelForCausalLM

PEAK_LR = 3e-3


@dataclass(frozen=True)
class Settings:
    """`save_steps` are the steps after which the run is saved; the run ends with the last of them."""

    save_steps: tuple[int, ...]
    num_samples: int = 22
    batch_size: int = 4
    num_workers: int = 0
    fsdp_size: int = -1
    seed: int = 5


class Tokens(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __init__(self, num_samples: int) -> None:
        self.ids = torch.randint(0, 150, (num_samples, 12), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.ids[index]


def build_model(config_dir: Path, seed: int) -> Any:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config_dir), dtype=torch.float32)


def build_loader(settings: Settings, *, rank: int, world_size: int) -> tuple[Any, Any]:
    """As `SFTTrainer._build_dataloader` does: (loader, its sampler)."""
    data = Tokens(settings.num_samples)
    sampler: Any = DistributedSampler(data, shuffle=True, num_replicas=world_size, rank=rank, drop_last=True)
    loader: Any = StatefulDataLoader(
        dataset=data,
        batch_size=settings.batch_size // world_size,
        sampler=sampler,
        num_workers=settings.num_workers,
        pin_memory=False,
        drop_last=True,
    )
    return loader, sampler


def steps(loader: Any, sampler: Any, settings: Settings) -> Iterator[tuple[int, torch.Tensor]]:
    """As `SFTTrainer.fit` walks: (finished steps after this one, batch)."""
    step = 0
    for epoch in range(100):
        sampler.set_epoch(epoch=epoch)
        for batch in loader:
            step += 1
            yield step, batch
            if step >= settings.save_steps[-1]:
                return


def train(
    model: Any, optimizer: Any, scheduler: Any, settings: Settings, *, save: Callable[[int, Any], None], expected: Path
) -> None:
    """Train and save; then write the whole parameters and moments of the last step to `expected` (rank 0)."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    loader, sampler = build_loader(settings, rank=rank, world_size=world_size)
    for step, batch in steps(loader, sampler, settings):
        optimizer.zero_grad()
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        scheduler.step()
        if step in settings.save_steps:
            save(step, loader)
    whole = {}
    for name, parameter in model.named_parameters():
        whole[name] = parameter.detach().full_tensor()
        for key in ("exp_avg", "exp_avg_sq"):
            whole[f"{name}.{key}"] = optimizer.state[parameter][key].full_tensor()
    if rank == 0:
        save_file(whole, expected)
