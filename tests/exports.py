"""The export of a sharded model, made as in a save: every rank's shards, then the files made from
them.
"""

from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from trainer.checkpoint import export, fsio, layout, shards
from trainer.checkpoint.base_weights import Adapter
from trainer.checkpoint.export import ExportSource
from trainer.checkpoint.model_files import ModelFiles
from trainer.checkpoint.state import ModelShards
from trainer.model import adapters
from trainer.model.pretrained import whole_checkpoint


def tensors_in(directory):
    """Return every tensor in the safetensors files of a directory."""
    files = sorted(directory.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def export_model(
    world,
    model,
    target,
    source,
    *,
    dtype,
    lora="adapter",
):
    """Write `target`, and this rank's shards next to it. Returns this rank's part of the export."""
    root = target.with_name(f"{target.name}-shards")
    root.mkdir(exist_ok=True)
    parameters = shards.saved_parameters(model)
    buffers = shards.weight_buffers(model)
    shard = root / layout.model_file(world.size, world.rank)
    shards.write_torch(shard, ModelShards(model).state_dict(), root=root)
    if world.is_main:
        fsio.make_dir(target)
    dist.barrier()
    files = [layout.model_file(world.size, rank) for rank in range(world.num_shards)]
    saved = shards.Shards.read(root, files)
    plan = export.plan_export(
        parameters, buffers, export.meta_copy(model), source, dtype=dtype, lora=lora
    )
    records = export.write_export(plan, target, saved, buffers, share=(world.rank, world.size))
    dist.barrier()
    return records


def export_changed(world, model, source, target):
    """Change every tensor as an update would, and export the model with what else its checkpoint
    holds, in float32.
    """
    with torch.no_grad():
        for tensor in (*model.parameters(), *shards.weight_buffers(model).values()):
            tensor.mul_(1.25)
    files = ModelFiles.read(Path(source.path))
    whole = whole_checkpoint(source)
    export_model(world, model, target, ExportSource(files, None, (), whole), dtype="float32")


def export_adapted(world, model, source, target, dtype):
    """Let the adapters of the model add something, and export them to `target`-adapter, and merged
    to `target`-merged.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.add_(0.05)
    adapter = Adapter(adapters.settings(model), Path(source.path), source.whole)
    export_source = ExportSource(ModelFiles.read(adapter.base), None, (), adapter=adapter)
    for kind in ("adapter", "merged"):
        to = target.with_name(f"{target.name}-{kind}")
        export_model(world, model, to, export_source, dtype=dtype, lora=kind)
