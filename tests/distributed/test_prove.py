"""`prove` accepts an export that serves the trained model, and refuses a broken export with the
cause.
"""

import hashlib
import re
import shutil

import pytest
from small_files import read_json, write_json
from test_lora import LORA
from test_lora import words as words
from toy import change_tensors
from unit.checkpoint_fakes import rewrite_manifest
from whole_runs import train

from trainer.checkpoint.manifest import MANIFEST
from trainer.config import ConfigError
from trainer.errors import CannotWriteError
from trainer.tools.evaluate import prove
from trainer.tools.evaluate.prove import prove_serving
from trainer.tools.report.readers import read_run

STEP = "global_step_4"
MODEL = "model.safetensors"
ADAPTER = "adapter_model.safetensors"
LAYER = "model.layers.0.self_attn"


@pytest.fixture(scope="module")
def trained(words, root):
    """{case: run directory}: full training exported in bfloat16, adapters in float32.

    With random weights, attention is nearly uniform. With larger keys, the loss depends on the
    positions of tokens.
    """
    keys = f"{LAYER}.k_proj.weight"
    change_tensors(root / "model" / MODEL, lambda found: found[keys].mul_(30))
    for name, changes in {"full": ("optim.lr=0.01",), "lora": (*LORA, "optim.lr=0.2")}.items():
        train(root / name, 2, *words, *changes)
    return {name: root / name for name in ("full", "lora")}


def proven(checkpoint):
    found, path = prove_serving(checkpoint, engine="transformers", python="")
    written = read_json(path)
    assert written["is_equal"] is found.is_equal
    assert written["nonce"] == read_json(checkpoint / MANIFEST)["nonce"]
    return found


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_an_export_as_it_was_written_serves_the_loss_of_its_validation(trained, kind):
    found = proven(trained[kind] / STEP)
    assert found.is_equal and found.causes == [] and found.first_difference is None
    assert abs(found.served_loss - found.val_loss) <= found.tolerance < 0.01 * found.val_loss
    proofs = read_run(trained[kind]).proofs
    assert [(proof.engine, proof.served_loss, proof.is_equal) for proof in proofs] == [
        (found.engine, found.served_loss, True)
    ], "what the report shows"
    assert (found.base_loss is None) == (kind == "full")
    if found.base_loss is not None:
        assert abs(found.base_loss - found.served_loss) > 10 * found.tolerance


def change_json(file, change):
    tree = read_json(file)
    change(tree)
    write_json(file, tree)


def halve(directory):
    change_tensors(directory / MODEL, lambda found: found["model.norm.weight"].mul_(0.5))


def other_template(export):
    file = export / "chat_template.jinja"
    file.write_text(file.read_text().replace("user", "human"))


def other_model(export):
    def swap_tensors(found):
        names = [f"{LAYER}.{part}_proj.weight" for part in "kv"]
        found.update(zip(names, [found[name] for name in reversed(names)], strict=True))

    def swap_tokens(tree):
        vocab = tree["model"]["vocab"]
        first, second = list(vocab)[300:302]
        vocab[first], vocab[second] = vocab[second], vocab[first]

    change_tensors(export / MODEL, swap_tensors)
    change_json(export / "tokenizer.json", swap_tokens)
    change_json(export / "config.json", lambda tree: tree["rope_parameters"].update(rope_theta=9.0))


def torn(export):
    (export / MODEL).write_bytes((export / MODEL).read_bytes()[:1000])


def no_adapter(export):
    def clear(found):
        for name in found:
            if "lora_B" in name:
                found[name].zero_()

    change_tensors(export / ADAPTER, clear)
    change_json(export / "adapter_config.json", lambda tree: tree.update(lora_alpha=1))


def other_base(export):
    base = export.parent.parent / "base"

    def move(tree):
        shutil.copytree(tree["base_model_name_or_path"], base)
        tree["base_model_name_or_path"] = str(base)

    change_json(export / "adapter_config.json", move)
    halve(base)


FILES = "files: huggingface/"
SPOILED = {
    # fault: run, whether the loss of so small a model shows it, the beginnings of the causes
    other_template: ("full", False, {"chat template"}),
    torn: ("full", False, {f"weights: .*{MODEL}", "transformers cannot load it"}),
    other_model: (
        "full",
        True,
        {
            "tokenizer: its vocabulary",
            f"weights: 2 tensors .*{LAYER}.k_proj",
            "config.json: rope_parameters.rope_theta is 9.0",
        },
    ),
    no_adapter: ("lora", True, {"adapter_config.json: lora_alpha", "adapter: .* without"}),
    other_base: ("lora", True, {"base: "}),
}


def copied(run_dir, target):
    shutil.copytree(run_dir, target)
    return target / STEP


@pytest.mark.parametrize("spoil", SPOILED)
def test_a_broken_export_is_refused_with_its_causes(trained, tmp_path, spoil):
    kind, shows_in_loss, causes = SPOILED[spoil]
    checkpoint = copied(trained[kind], tmp_path / "run")
    spoil(checkpoint / "huggingface")
    found = proven(checkpoint)
    assert not found.is_equal
    for cause in (FILES, *causes):
        assert any(re.match(cause, one) for one in found.causes), (cause, found.causes)
    assert {one for one in found.causes if not re.match("|".join({FILES, *causes}), one)} == set()
    assert (abs(found.served_loss - found.val_loss) > found.tolerance) == shows_in_loss, found
    if shows_in_loss:
        assert "train.jsonl:" in found.first_difference


def test_an_export_that_was_written_wrong_is_found_by_its_loss(trained, tmp_path):
    """The manifest matches the wrong file, as after a fault of the program."""
    checkpoint = copied(trained["full"], tmp_path / "run")
    halve(checkpoint / "huggingface")
    data = (checkpoint / "huggingface" / MODEL).read_bytes()

    def fit(tree):
        (record,) = (one for one in tree["files"] if one["path"] == f"huggingface/{MODEL}")
        record.update(size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())

    rewrite_manifest(checkpoint, fit)
    found = proven(checkpoint)
    assert abs(found.served_loss - found.val_loss) > found.tolerance
    assert found.causes == ["weights: 1 tensors differ from the trained tensors: model.norm.weight"]
    assert found.first_difference


def test_nothing_to_compare_with_is_said(trained, tmp_path):
    with pytest.raises(ConfigError, match="no validation at step 2"):
        prove_serving(trained["full"] / "global_step_2", engine="transformers", python="")
    checkpoint = copied(trained["full"], tmp_path / "run")
    log = checkpoint.parent / "metrics.jsonl"
    log.write_text(
        log.read_text().replace('"val/total_valid_token_count":', '"val/total_valid_token_count":1')
    )
    with pytest.raises(ConfigError, match="changed after step 4"):
        prove_serving(checkpoint, engine="transformers", python="")
    log.unlink()
    with pytest.raises(ConfigError, match="no validation at step 4"):
        prove_serving(checkpoint, engine="transformers", python="")


def test_a_certificate_that_cannot_be_written_has_an_exit_code(trained, monkeypatch):
    monkeypatch.setattr(prove, "PROOFS", "run.json")
    with pytest.raises(CannotWriteError, match=r"run\.json"):
        prove_serving(trained["full"] / STEP, engine="transformers", python="")
