"""Weights in every form in which they occur, and invalid files: the result is never silently a
different model.
"""

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from toy import build_toy_model, differing, write_model_config, write_weights
from transformers import AutoModelForCausalLM, logging

from trainer.config import ConfigError
from trainer.model.pretrained import ModelSource


def save_model(path, model_type="qwen2", *, max_shard_size="1GB", **changes):
    write_model_config(path, model_type, **changes)
    write_weights(path, max_shard_size=max_shard_size)


def load_each(world, paths):
    """{case: names of tensors that differ from what transformers loads, or the refusal}."""
    logging.disable_progress_bar()
    results = {}
    for case, path in paths.items():
        try:
            model = build_toy_model(world, ModelSource(str(path)), random_weights=False)
        except ConfigError as error:
            results[case] = str(error)
            continue
        theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
        ours = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}
        results[case] = differing({name: ours[name] for name in theirs}, theirs)
    return results


def saved(change=dict, **settings):
    """Writes a model whose tensors are then changed."""

    def write(path):
        save_model(path, **settings)
        tensors = change(load_file(path / "model.safetensors"))
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(contiguous, path / "model.safetensors")

    return write


def in_files(path):
    save_model(path, max_shard_size="40KB", tie_word_embeddings=False)
    assert len(list(path.glob("*.safetensors"))) > 2


def old_names(files):
    """gpt2 as its authors wrote it."""
    return {name.removeprefix("transformer."): tensor for name, tensor in files.items()}


EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
NORM = "model.norm.weight"
MASK = {"h.0.attn.bias": torch.ones(1, 1, 4, 4).tril()}
OTHER_HEAD = {HEAD: torch.ones(160, 64)}
FORMS = {
    "one file": saved(),
    "several files": in_files,
    "head repeated": saved(lambda files: {**files, HEAD: files[EMBEDDING].clone()}),
    "only the head": saved(lambda files: {HEAD: files.pop(EMBEDDING), **files}),
    "bfloat16": saved(lambda files: {name: t.bfloat16() for name, t in files.items()}),
    "old names": saved(lambda files: old_names(files) | MASK, model_type="gpt2"),
}


def test_every_usual_form_loads(tmp_path):
    for name, write in FORMS.items():
        write(tmp_path / name)
    found = run_ranks(load_each, 2, {name: tmp_path / name for name in FORMS})
    assert found[0] == found[1] == {name: [] for name in FORMS}


def without_a_file(path):
    save_model(path, max_shard_size="40KB")
    next(path.glob("model-00002-of-*")).unlink()


def cut_short(path):
    save_model(path)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


FAULTS = {
    "wrong shape": (
        saved(lambda files: files | {NORM: torch.ones(9)}),
        [NORM, "(9,)", "(64,)", "model.safetensors"],
    ),
    "missing tensor": (
        saved(lambda files: {name: t for name, t in files.items() if name != NORM}),
        [NORM, "random_weights=true"],
    ),
    "missing file": (without_a_file, ["model-00002-of-", "do not exist"]),
    "cut file": (cut_short, ["model.safetensors", "cannot be read"]),
    "own head under a config that ties": (
        saved(lambda files: files | OTHER_HEAD),
        [HEAD, "tie_word_embeddings"],
    ),
    "the same, renamed": (
        saved(lambda files: old_names(files) | OTHER_HEAD, model_type="gpt2"),
        ["embeddings", "tie_word_embeddings"],
    ),
    "fp8": (
        saved(lambda files: files | {NORM: torch.ones(64).to(torch.float8_e4m3fn)}),
        [NORM, "F8_E4M3"],
    ),
    "no weights": (write_model_config, ["lacks weights"]),
}
"""{fault: (function that writes such a model, text that the message must contain)}."""


def test_every_fault_is_named(tmp_path):
    for fault, (write, _) in FAULTS.items():
        write(tmp_path / fault)
    found = run_ranks(load_each, 2, {fault: tmp_path / fault for fault in FAULTS})
    assert found[0] == found[1]
    for fault, (_, words) in FAULTS.items():
        message = found[0][fault]
        assert isinstance(message, str), (fault, message)
        assert all(word in message for word in words), (fault, message)


@pytest.mark.parametrize(
    "content",
    ["", "{", '{"model_type": "no such"}', '{"model_type": "qwen2", "hidden_size": "wide"}'],
)
def test_a_config_that_is_none_is_refused(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    source = ModelSource(str(tmp_path), random_weights=True)
    with pytest.raises(ConfigError, match="no usable config"):
        assert source.config
