"""Tiny checkpoints in the quantized forms in which models are published, and their tensors as
computed by plain arithmetic.
"""

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from small_files import change_json
from toy import EXPERTS, change_tensors, write_model_config, write_weights

Files = dict[str, torch.Tensor]
BLOCK = 32
VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
"""The 4-bit floats without their sign."""
PREDICTING = "mtp.layers.0.proj.weight"
"""A weight that transformers' class lacks. Exports include it."""


def in_blocks(weight, block):
    """Return float8 codes, and the scale of each block."""
    rows, columns = weight.shape
    padded = F.pad(weight, (0, -columns % block[1], 0, -rows % block[0]))
    blocks = padded.unflatten(1, (-1, block[1])).unflatten(0, (-1, block[0]))
    scales = blocks.abs().amax((1, 3)) / 448
    return (weight / spread(scales, block, weight)).to(torch.float8_e4m3fn), scales


def spread(scales, block, like):
    """The scale of each number of a weight."""
    rows, columns = like.shape
    return scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[:rows, :columns]


def plain(codes, scales, block):
    return (codes.float() * spread(scales.float(), block, codes)).bfloat16()


def is_linear(name, tensor):
    others = ("embed", "lm_head", "gate.w", "router", "vision", "norm", "conv")
    return tensor.ndim == 2 and not any(other in name for other in others)


def quantize_float8(path, form, *, size=BLOCK):
    """Rewrite the weights of a saved model in float8, in one of several forms. Returns its tensors
    in bfloat16.
    """
    files = {}
    expected = {}
    for name, tensor in load_file(path / "model.safetensors").items():
        if not is_linear(name, tensor):
            files[name] = expected[name] = tensor
            continue
        rows, columns = tensor.shape
        block = {"tensor": (rows, columns), "channel": (1, columns)}.get(form, (size, size))
        codes, scales = in_blocks(tensor.float(), block)
        suffix = "_scale" if form in ("tensor", "channel", "block") else "_scale_inv"
        if form == "exponents":
            exponents = (scales.log2().ceil() + 127).to(torch.uint8)
            files[name + suffix] = exponents
            scales = torch.exp2(exponents.float() - 127)
        else:
            files[name + suffix] = scales.reshape(1) if form == "tensor" else scales
        files[name] = codes
        expected[name] = plain(codes, scales, block)
        if form == "tensor":
            files[name.removesuffix("weight") + "input_scale"] = torch.ones(1)
    save_file(files, path / "model.safetensors", {"format": "pt"})
    settings = {"quant_method": "fp8", "weight_block_size": [size, size]}
    if form in ("tensor", "channel", "block"):
        more = {"block_structure": [size, size]} if form == "block" else {}
        weights = {"type": "float", "num_bits": 8, "strategy": form, **more}
        settings = {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        }
    change_json(path / "config.json", quantization_config=settings)
    return expected


def quantize_mxfp4(path):
    """Rewrite the experts of a saved gpt-oss as it is released, with random codes. Returns its
    tensors in bfloat16.
    """
    expected = load_file(path / "model.safetensors")
    files = dict(expected)
    signed = torch.tensor([*VALUES, *(-value for value in VALUES)])
    for name in [name for name in expected if name.endswith(("gate_up_proj", "down_proj"))]:
        num_experts, num_inputs, num_outputs = files.pop(name).shape
        blocks = torch.randint(0, 256, (num_experts, num_outputs, num_inputs // 32, 16)).byte()
        scales = torch.randint(115, 125, blocks.shape[:3]).byte()
        files |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        low = signed[(blocks % 16).long()]
        high = signed[(blocks // 16).long()]
        pairs = torch.stack([low, high], -1).flatten(-2)
        values = pairs * (2.0 ** (scales.float() - 127))[..., None]
        expected[name] = values.flatten(-2).transpose(1, 2).bfloat16().contiguous()
    save_file(files, path / "model.safetensors", {"format": "pt"})
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    change_json(path / "config.json", quantization_config=settings)
    return expected


def save_model(path, model_type, **changes):
    """Save a model in bfloat16, with one tensor that its class does not have."""
    write_model_config(path, model_type, tie_word_embeddings=False, **changes)
    write_weights(path, torch.bfloat16)
    predicting = {PREDICTING: torch.randn(40, 64).bfloat16()}
    change_tensors(path / "model.safetensors", lambda tensors: tensors.update(predicting))


def write(path, form):
    if form == "mxfp4":
        sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64}
        save_model(path, "gpt_oss", **sizes)
        return quantize_mxfp4(path)
    if form == "experts":
        save_model(path, "qwen3_moe", **EXPERTS)
        return quantize_float8(path, "blocks")
    save_model(path, "qwen3", intermediate_size=80 if form == "cut blocks" else 96)
    return quantize_float8(path, "blocks" if form == "cut blocks" else form)
