"""A model whose experts are stored one by one and computed as one tensor is never completely in a
rank's memory.

The kernel enforces the bound: it refuses memory beyond it (RLIMIT_DATA).
"""

import ctypes
import resource
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from exports import export_model
from ranks import run_ranks
from toy import model_config, write_model_config, write_weights
from transformers import AutoModelForCausalLM

from trainer.checkpoint import export
from trainer.checkpoint.export import ExportSource
from trainer.checkpoint.model_files import ModelFiles
from trainer.model import assemble, load, parallelize
from trainer.model.pretrained import ModelSource

NUM_LAYERS = 16
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "hidden_size": 256,
}
NOISE_BYTES = 3 << 20
"""Memory that Python and gloo take in the meantime, measured at less than 2 MiB."""
M_MMAP_THRESHOLD = -3


def bounded(extra_bytes):
    """Limit the additional private memory of this process from here on."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    limit = int(status["VmData"].split()[0]) * 1024 + extra_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def load_and_export(world, path, target):
    """{tensor: whole} of one layer, loaded and exported within the shard and one layer."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 64 << 10)  # what is freed is given back
    source = ModelSource(str(path))
    model = assemble.on_meta(model_config(), source, is_packed=True)
    parallelize.parallelize(model, model_config(), world)
    load.materialize(model, world.device, buffer_device=world.device)
    layer_bytes = 4 * sum(parameter.numel() for parameter in model.model.layers[0].parameters())
    model_bytes = 4 * sum(parameter.numel() for parameter in model.parameters())
    assert model_bytes > 12 * layer_bytes
    # mapped, which counts here too
    files = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    bounded(files + layer_bytes + NOISE_BYTES)
    load.load_weights(model, source, seed=1)
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        torch.empty(model_bytes // 2 + files, dtype=torch.uint8)
    bounded(model_bytes + layer_bytes + NOISE_BYTES)  # the shards of all ranks are mapped
    with patch.object(export, "MAX_FILE_BYTES", layer_bytes // 4):
        export_model(
            world, model, target, ExportSource(ModelFiles.read(path), None, ()), dtype="bfloat16"
        )
    resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return {
        name: tensor.full_tensor() for name, tensor in model.model.layers[-1].named_parameters()
    }


def test_a_rank_holds_no_more_than_one_layer_beside_its_shard(tmp_path):
    path = tmp_path / "model"
    write_model_config(path, "qwen3_moe", num_hidden_layers=NUM_LAYERS, **EXPERTS)
    whole = write_weights(path, torch.bfloat16)
    found = run_ranks(load_and_export, 2, path, tmp_path / "export")[0]
    for name, parameter in whole.model.layers[-1].named_parameters():
        assert torch.equal(found[name], parameter.detach().float()), name
    exported = AutoModelForCausalLM.from_pretrained(
        tmp_path / "export", dtype=torch.bfloat16
    ).state_dict()
    assert all(torch.equal(exported[name], tensor) for name, tensor in whole.state_dict().items())
