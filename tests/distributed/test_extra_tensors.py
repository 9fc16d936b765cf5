"""The files of a text model may hold additional tensors, for example for multi-token prediction.
Exports include them.
"""

import pytest
import torch
from exports import export_changed, tensors_in
from families import VOCAB
from family_trials import heard, save_model
from ranks import run_ranks
from toy import build, change_tensors, differing
from transformers import AutoModelForCausalLM

from trainer.model.pretrained import ModelSource, whole_checkpoint

EXTRA = {
    "qwen3_next": (
        "mtp.fc.weight",
        "mtp.norm.weight",
        "mtp.layers.0.mlp.experts.0.up_proj.weight",
    ),
    "deepseek_v3": (
        "model.layers.2.eh_proj.weight",
        "model.layers.2.shared_head.norm.weight",
        "model.layers.2.embed_tokens.weight",
    ),
}
"""{family: tensor names in its released checkpoints}. test_whole_models.py covers the whole
qwen3_5.
"""


def add_tensors(model, names):
    """Random ones, half of them in bfloat16."""
    generator = torch.Generator().manual_seed(1)
    added = {name: torch.randn(VOCAB, 4, generator=generator) for name in names}
    added |= {name: added[name].bfloat16() for name in names[::2]}
    change_tensors(model / "model.safetensors", lambda tensors: tensors.update(added))


def export(world, root):
    """Export the model after a change of every parameter; return what is logged. Collective."""
    source = ModelSource(str(root / "model"))
    with heard() as lines:
        model = build(world, source, random_weights=False)
        export_changed(world, model, source, root / "export")
    return lines


@pytest.mark.parametrize("name", EXTRA)
def test_every_tensor_is_in_the_export(tmp_path, name):
    save_model(tmp_path / "model", name)
    add_tensors(tmp_path / "model", EXTRA[name])
    lines, _ = run_ranks(export, 2, tmp_path)
    theirs = tensors_in(tmp_path / "model")
    ours = tensors_in(tmp_path / "export")
    assert ours.keys() == theirs.keys()
    assert ours.keys() - set(differing(ours, theirs)) == set(EXTRA[name])
    (line,) = [line for line in lines if "contain them unchanged" in line]
    assert f"{len(EXTRA[name])} tensors" in line and min(EXTRA[name]) in line
    _, report = AutoModelForCausalLM.from_pretrained(tmp_path / "export", output_loading_info=True)
    assert not report.pop("unexpected_keys") - set(EXTRA[name])
    assert not any(report.values()), report


def test_a_tied_head_that_is_stored_twice_is_named_and_never_exported_as_it_was(tmp_path):
    save_model(tmp_path, "qwen2", tie_word_embeddings=True)

    def repeat(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    change_tensors(tmp_path / "model.safetensors", repeat)
    with heard() as lines:
        assert whole_checkpoint(ModelSource(str(tmp_path))) is None
    assert [
        line for line in lines if "lm_head.weight" in line and "so exports contain it once" in line
    ]
