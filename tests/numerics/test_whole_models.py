"""Checkpoints with several parts: the text part computes like the whole model, and the whole model
is exported again.
"""

import pytest
import torch
from exports import export_adapted, export_changed, tensors_in
from families import family_settings
from peft import PeftModel
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from small_files import read_json
from toy import ToySamples, build, differing
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    logging,
)
from whole_models import EXTRA, WRAPPERS, write_whole_model

from trainer.config import ConfigError
from trainer.data.loader import pack
from trainer.model.packed_lm import run_plain
from trainer.model.pretrained import whole_checkpoint
from trainer.model.weights import match

SAMPLES = ToySamples()
DOCUMENTS = [index for index, length in enumerate(SAMPLES.lengths) if 10 <= length <= 30][:3]
IDS = torch.from_numpy(SAMPLES.sample(DOCUMENTS[0])[0])[None].long()


def original(path):
    """Return the whole model as its own class loads it, and the tensors that did not fit."""
    return AutoModelForMultimodalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )


def logits_of(whole):
    # transformers 5.24 can run Llama 4 as a whole only with images
    model = whole.language_model if whole.config.model_type == "llama4" else whole
    return model(input_ids=IDS, use_cache=False).logits


def train_one(world, source, export_dir):
    """Every parameter is changed as by an update, the logits measured, and the model exported."""
    model = build(world, source, random_weights=False)
    export_changed(world, model, source, export_dir)
    with torch.no_grad():
        logits = run_logits(model)
    return {"logits": logits, "passes": len(whole_checkpoint(source).others)}


def train_adapter(world, source, export_dir):
    """Export adapters that add something, alone and merged. Returns the logits with them."""
    lora = {"lora_rank": 3, "partial_pretrain": source.path}
    model = build(world, source, random_weights=False, **lora)
    export_adapted(world, model, source, export_dir, dtype="float32")
    begun = {"lora_adapter_path": f"{export_dir}-adapter", "partial_pretrain": source.path}
    again = build(world, source, random_weights=False, **begun)
    with torch.no_grad():
        return run_logits(again)


def run_logits(model):
    ours = model.forward
    plain = model.original_forward
    model.forward = lambda batch: run_plain(model, plain, batch).logits
    logits = model(pack(SAMPLES, DOCUMENTS[:1]))
    model.forward = ours
    return logits


def train_both(world, source, export_dir):
    logging.disable_progress_bar()
    adapted = train_adapter(world, source, export_dir)
    return train_one(world, source, export_dir), adapted


@pytest.fixture(scope="module", params=WRAPPERS)
def trained(request, tmp_path_factory):
    """A checkpoint, what `train_one` measured, and the logits with adapters."""
    model = tmp_path_factory.mktemp("whole") / "model"
    source = write_whole_model(model, request.param)
    return model, *run_ranks(train_both, 2, source, model.with_name("export"))[0]


def unchanged(ours, theirs):
    """Return the names of the tensors with equal bits; both sides must have the same names."""
    assert ours.keys() == theirs.keys()
    return ours.keys() - set(differing(ours, theirs))


def test_the_export_is_the_whole_again_with_another_text_part(trained):
    model_dir, result, _ = trained
    export = model_dir.with_name("export")
    theirs = tensors_in(model_dir)
    same = unchanged(tensors_in(export), theirs)
    assert EXTRA in same and len(same) == result["passes"] > 10
    assert {theirs[key].dtype for key in same} == {torch.float32, torch.bfloat16}
    assert not any("vis" in key or "projector" in key for key in theirs.keys() - same)
    before, after = (
        {**read_json(d / "config.json"), "torch_dtype": 0} for d in (model_dir, export)
    )
    assert (
        before == after
        and (export / "preprocessor_config.json").read_text() == '{"image_size": 28}'
    )
    model, report = original(export)
    assert not report.pop("unexpected_keys") - {EXTRA} and not any(report.values()), report
    with torch.no_grad():
        logits = logits_of(model)
    torch.testing.assert_close(result["logits"], logits, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(logits_of(original(model_dir)[0]), logits, atol=1e-2)


def test_adapters_of_the_text_part_load_in_the_whole(trained):
    model_dir, _, adapted = trained
    adapter = model_dir.with_name("export-adapter")
    merged = model_dir.with_name("export-merged")
    base = original(model_dir)[0]
    with torch.no_grad():
        before = logits_of(base)
        in_peft = PeftModel.from_pretrained(base, adapter)
        of_adapter = logits_of(base)  # peft put the adapters into it
        of_merged = logits_of(original(merged)[0])
    loaded = {n.replace(".default.", "."): p for n, p in in_peft.named_parameters()}
    lora = load_file(adapter / "adapter_model.safetensors")
    assert differing({n: p for n, p in loaded.items() if ".lora_" in n}, lora) == []
    assert not torch.allclose(before, adapted, atol=1e-2)
    torch.testing.assert_close(of_adapter, adapted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(of_merged, adapted, rtol=1e-5, atol=1e-4)
    theirs = tensors_in(model_dir)
    changed = theirs.keys() - unchanged(tensors_in(merged), theirs)
    assert len(changed) == len(lora) // 2
    assert not any("vis" in key or "projector" in key for key in changed)


@pytest.mark.skipif("inkling2" not in CONFIG_MAPPING, reason="since transformers 5.23")
def test_equal_patterns_of_two_parts_are_converted_each_by_its_own_part(tmp_path):
    text_config = family_settings("inkling2_text")
    sight = {"text_hidden_size": text_config["hidden_size"]}
    source = write_whole_model(
        tmp_path, "inkling2", has_extra=False, text_config=text_config, vision_config=sight
    )
    stored = load_file(tmp_path / "model.safetensors")
    checkpoint = whole_checkpoint(source)
    with torch.device("meta"):
        text = AutoModelForCausalLM.from_config(source.config)
    groups, others = match(text, checkpoint.model, stored)
    assert len(others) == len(checkpoint.others) and "model.llm.unembed.weight" not in others
    for group in groups:
        tensors = [stored[name] for name in group.stored]
        own = group.to_own(tensors)
        again = group.to_stored([own[name] for name in group.own])
        assert differing(again, dict(zip(group.stored, tensors, strict=True))) == []


def rewritten(path, family, change):
    """A checkpoint with changed tensors."""
    source = write_whole_model(path, family)
    tensors = change(load_file(path / "model.safetensors"))
    save_file(tensors, path / "model.safetensors")
    return source


def test_names_of_the_files_are_kept_whichever_transformers_reads(tmp_path):
    """Gemma 3 is written as `language_model.model.…`, and read under its new names too; a tied
    head may be there.
    """

    def renamed(tensors):
        new = {
            name.replace("language_model.model.", "model.language_model."): t
            for name, t in tensors.items()
        }
        return new | {"lm_head.weight": new["model.language_model.embed_tokens.weight"].clone()}

    source = rewritten(tmp_path / "model", "gemma3", renamed)
    result = run_ranks(train_one, 2, source, tmp_path / "export")[0]
    exported = tensors_in(tmp_path / "export")
    assert exported.keys() == tensors_in(tmp_path / "model").keys()
    embeddings = exported["model.language_model.embed_tokens.weight"]
    assert torch.equal(exported["lm_head.weight"], embeddings)
    usual = write_whole_model(tmp_path / "usual", "gemma3")
    assert result["passes"] == len(whole_checkpoint(usual).others)


def test_a_text_tensor_that_is_not_found_is_named(tmp_path):
    def renamed(tensors):
        return {
            name.replace("layers.1.mlp", "layers.1.ffn"): tensor for name, tensor in tensors.items()
        }

    source = rewritten(tmp_path, "qwen3_5", renamed)
    with pytest.raises(
        ConfigError, match=r"lacks weights for \['model\.layers\.1\.mlp\.down_proj\.weight'"
    ):
        whole_checkpoint(source)
