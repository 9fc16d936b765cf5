"""The model directory is read once: a run exports the model that it was trained from, even if the
directory changes.

Each case trains one recipe twice: undisturbed, and with the directory removed or changed after some
step has begun.
"""

import json
import os
import re
import shutil
from functools import partial
from itertools import product

import pytest
from family_runs import prepare, save_tokenizer, words_of_run, write_samples
from small_files import read_json
from sweeps import short_or_full
from transformers import AutoTokenizer
from whole_models import write_whole_model
from whole_runs import before_steps, tiny_model, train

from trainer.checkpoint.offline_export import export_from_shards

KINDS = ("text", "several parts", "merged")
MERGED = (
    "model.lora_rank=4",
    "optim.lr=0.01",
    "trainer.checkpoint.save_contents=[model,optimizer,extra,merged_model]",
)
FOUR_STEPS = "trainer.total_training_steps=4"
CODE = "modeling_own.py"


def words_of(root, kind):
    return (
        *words_of_run(root, root / "model"),
        FOUR_STEPS,
        *(MERGED if kind == "merged" else ()),
    )


def write_model(root, kind):
    if kind == "several parts":
        write_whole_model(root / "model", "gemma3")
        save_tokenizer(root / "model")
        write_samples(root / "samples.jsonl")
    else:
        prepare(root, "qwen2")
    (root / "model" / "generation_config.json").write_text('{"temperature": 0.5}')
    (root / "model" / CODE).write_text("# taken along, never run\n")


def replace_small_files(model):
    """Replace the files like a download of another revision: new files, renamed over the old ones."""
    config = read_json(model / "config.json")
    config["rope_theta"] = 7.0
    contents = {
        "config.json": json.dumps(config),
        "generation_config.json": '{"temperature": 0.9}',
        "chat_template.jinja": "{{ 'another' }}",
        CODE: "# another\n",
    }
    for name, text in contents.items():
        (model / "new").write_text(text)
        (model / "new").rename(model / name)
    (model / "tokenizer.json").unlink()


def overwrite_weights(model):
    """Overwrite the file in place. A process that has the file open or mapped sees the change."""
    for file in model.glob("*.safetensors"):
        size = file.stat().st_size
        with file.open("r+b") as opened:
            opened.write(os.urandom(size))


def truncate_weights(model):
    """A mapped page past the end of its file kills the process that reads it."""
    for file in model.glob("*.safetensors"):
        os.truncate(file, 16)


CHANGES = {
    "removed": shutil.rmtree,
    "replaced": replace_small_files,
    "overwritten": overwrite_weights,
    "truncated": truncate_weights,
}


SHORT = [
    ("text", "replaced", 1),
    ("text", "overwritten", 3),
    ("several parts", "removed", 1),
    ("several parts", "truncated", 3),
    ("merged", "truncated", 1),
    ("merged", "replaced", 3),
]
CASES = short_or_full(SHORT, full=list(product(KINDS, CHANGES, (1, 3))))


def disturb_in(step, change, model):
    """Runs in every rank. The first rank makes the change just before the step."""

    def disturb(run, at):
        if at == step and run.world.is_main:
            change(model)

    before_steps(disturb)


def exports_of(run_dir):
    found = [path for path in run_dir.glob("global_step_*/huggingface/**/*") if path.is_file()]
    return {str(path.relative_to(run_dir)): path.read_bytes() for path in found}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """{kind: (directory of its model and samples, exports of an undisturbed run)}"""
    found = {}
    for kind in KINDS:
        root = tmp_path_factory.mktemp(kind.replace(" ", "-"))
        write_model(root, kind)
        shutil.copytree(root / "model", root / "kept")
        train(root / "undisturbed", 2, *words_of(root, kind))
        found[kind] = root, exports_of(root / "undisturbed")
    return found


@pytest.mark.parametrize(("kind", "change", "step"), CASES)
def test_exports_are_those_of_an_undisturbed_run(undisturbed, tmp_path, kind, change, step):
    root, expected = undisturbed[kind]
    model = root / "model"
    run_dir = tmp_path / "run"
    shutil.rmtree(model, ignore_errors=True)
    shutil.copytree(root / "kept", model)
    before = partial(disturb_in, step, CHANGES[change], model)
    train(run_dir, 2, *words_of(root, kind), before=before)
    found = exports_of(run_dir)
    assert found.keys() == expected.keys()
    assert [name for name in expected if found[name] != expected[name]] == []


def change_while_starting(change, model):
    """Runs in every rank. The first rank makes the change once the weights are loaded."""
    from trainer.train.start import main

    whole = main.build_model

    def build_model(*args, **kwargs):
        built = whole(*args, **kwargs)
        if kwargs["world"].is_main:
            change(model)
        return built

    main.build_model = build_model


@pytest.mark.parametrize(
    ("change", "name"),
    [(replace_small_files, "tokenizer.json"), (overwrite_weights, "model.safetensors")],
)
def test_files_that_change_while_the_run_starts_are_refused(tmp_path, change, name):
    write_model(tmp_path, "text")
    model = tmp_path / "model"
    run_dir = tmp_path / "run"
    before = partial(change_while_starting, change, model)
    output = train(run_dir, 2, *words_of(tmp_path, "text"), code=2, before=before)
    assert re.search(f"'{model}' changed while this run read them: .*{name}", output), output
    assert not list(run_dir.glob("global_step_*"))


def test_an_export_has_every_template_of_the_tokenizer(tmp_path):
    """Rows with tools have a separate template, in a directory next to the file of the other
    template.
    """
    words = (*tiny_model(tmp_path), "trainer.total_training_steps=1")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    own = tokenizer.chat_template
    tokenizer.chat_template = {"default": own, "tool_use": own + "{# with tools #}"}
    tokenizer.save_pretrained(tmp_path / "model")
    assert (tmp_path / "model" / "additional_chat_templates" / "tool_use.jinja").exists()
    train(tmp_path / "run", 1, *words)
    checkpoint = tmp_path / "run" / "global_step_1"
    export_from_shards(checkpoint, tmp_path / "afterwards", dtype="bfloat16")
    for export in (checkpoint / "huggingface", tmp_path / "afterwards"):
        assert AutoTokenizer.from_pretrained(export).chat_template == tokenizer.chat_template

    (tmp_path / "other.jinja").write_text(own + "{# other #}")
    train(tmp_path / "other", 1, *words, f"data.chat_template={tmp_path}/other.jinja")
    export = tmp_path / "other" / "global_step_1" / "huggingface"
    assert AutoTokenizer.from_pretrained(export).chat_template == own + "{# other #}"
