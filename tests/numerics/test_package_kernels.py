"""The kernels of flash-linear-attention, mamba-ssm and causal-conv1d on a GPU: packed documents
equal transformers' own forward pass of each document alone on a CPU.

`tests/numerics/test_state_mixers.py` checks the choice of these kernels with stand-ins, without a
GPU.
"""

import importlib.util
import sys

import pytest
from family_trials import DOCUMENTS, NUM_TOKENS, SAMPLES, heard, plain_step, save_model
from ranks import run_ranks
from torch.nn.utils import get_total_norm
from toy import build

from trainer.data.loader import pack
from trainer.model.pretrained import ModelSource
from trainer.model.state_mixers import kernel_kinds

PACKAGES = ("fla", "mamba_ssm", "causal_conv1d")
COMMON = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "initializer_range": 0.02,
}
DELTA_RULE = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
}
MAMBA = {
    "mamba_num_heads": 8,
    "mamba_n_heads": 8,
    "mamba_head_dim": 64,
    "mamba_d_head": 64,
    "mamba_d_ssm": 512,
    "mamba_d_state": 64,
    "ssm_state_size": 64,
    "mamba_d_conv": 4,
    "mamba_n_groups": 1,
    "n_groups": 1,
    "conv_kernel": 4,
    "mamba_expand": 2,
    "expand": 2,
    "chunk_size": 64,
    "mamba_chunk_size": 64,
}
NO_HEAD_DIM = {"head_dim": None}
FAMILIES = {
    "qwen3_next": ("fla", DELTA_RULE),
    "qwen3_5_text": ("fla", DELTA_RULE),
    "olmo_hybrid": ("fla", {**DELTA_RULE, **NO_HEAD_DIM, "linear_num_key_heads": 4}),
    "falcon_h1": ("mamba_ssm", MAMBA),
    "nemotron_h": ("mamba_ssm", MAMBA),
    "bamba": ("mamba_ssm", {**MAMBA, **NO_HEAD_DIM}),
}
"""{family: (package with its kernels, sizes that these kernels support)}."""


def packed_step(world, source, recomputes, has_packages):
    """Return (mean loss, gradients, classes that use kernels, log) of one packed batch in bfloat16."""
    if not has_packages:
        hide_packages()
    settings = {"param_dtype": "bfloat16", "enable_gradient_checkpointing": recomputes}
    with heard() as lines:
        model = build(world, source, **settings)
    model.train()
    batch = pack(SAMPLES, DOCUMENTS).to(world.device)
    loss = model(batch).loss_sum / NUM_TOKENS
    loss.backward()
    gradients = {
        name: parameter.grad.full_tensor().cpu()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return loss.item(), gradients, kernel_kinds(model), lines


def reference_step(world, path):
    """Run transformers' own torch code in float32 on the CPU, each document alone."""
    hide_packages()
    return plain_step(path)


def hide_packages():
    """Let imports of the packages fail. This process must not have built the model before."""
    sys.modules.update(dict.fromkeys(PACKAGES))


def gradient_error(found, expected):
    """Return the norm of the difference over the norm of the expected gradient."""
    assert found.keys() == expected.keys()
    difference = get_total_norm([found[name] - expected[name] for name in expected])
    return float(difference / get_total_norm(expected.values()))


@pytest.mark.gpu
@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_of_packages_equal_documents_alone(tmp_path, family, recomputes):
    """Both the kernels and the loop without them round to bfloat16."""
    package, sizes = FAMILIES[family]
    for name in (package, "causal_conv1d"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"needs the package {name}")
    save_model(tmp_path, family, **COMMON | sizes)
    expected_loss, expected = run_ranks(reference_step, 1, tmp_path, timeout_s=300)[0]
    source = ModelSource(str(tmp_path))
    (looped_loss, looped, no_kinds, _), (loss, gradients, kinds, lines) = (
        run_ranks(packed_step, 1, source, recomputes, has, on_device="cuda:0", timeout_s=300)[0]
        for has in (False, True)
    )
    assert no_kinds == [] and kinds, lines
    assert abs(loss - expected_loss) / expected_loss < 5e-3
    looped_error = gradient_error(looped, expected)
    assert abs(looped_loss - expected_loss) / expected_loss < 5e-3 and looped_error < 0.2
    assert gradient_error(gradients, expected) < 1.5 * looped_error + 1e-3
