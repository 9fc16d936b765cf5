"""Saves that are requested by time or by a file, and the model card in every export."""

import time
from functools import partial
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from whole_equality import compare_runs
from whole_runs import before_steps, saved_steps, tiny_model, train

from trainer.checkpoint import requests
from trainer.checkpoint.model_card import model_card

STEPS = 6


def ask_in_step(asked_step, run_dir):
    """The run looks for files immediately."""
    requests.LOOK_EVERY_S = 0.0

    def ask(run, step):
        if run.world.is_main and step == asked_step:
            (run_dir / requests.FILE_NAME).touch()

    before_steps(ask)


def wait_in_steps():
    before_steps(lambda run, step: time.sleep(0.4))


@pytest.fixture(scope="module")
def straight(root):
    """A run that is asked for no save: its directory and its words."""
    words = (
        *tiny_model(root),
        f"trainer.total_training_steps={STEPS}",
        "trainer.save_freq=-1",
        "trainer.test_freq=-1",
        "trainer.logger=[]",
    )
    train(root / "run", 2, *words)
    return root / "run", words


@pytest.mark.parametrize("is_async", ["true", "false"])
def test_the_file_save_asks_once_and_changes_nothing_else(tmp_path, straight, is_async):
    run_dir, words = straight
    words = (*words, f"trainer.checkpoint.async_save={is_async}")
    asked = tmp_path / "asked"
    train(asked, 2, *words, before=partial(ask_in_step, 3, asked))
    assert saved_steps(run_dir) == [STEPS] and saved_steps(asked) == [3, STEPS]
    assert not (asked / requests.FILE_NAME).exists()
    found = compare_runs(run_dir, asked, steps=STEPS)
    assert found.differences == ["checkpoints kept: 1 and 2"]


def test_a_save_is_due_when_the_time_has_passed(tmp_path, straight):
    run_dir = tmp_path / "run"
    train(run_dir, 1, *straight[1], "trainer.save_every=1s", before=wait_in_steps)
    assert 2 <= len(saved_steps(run_dir)) <= 4


def test_a_file_that_comes_during_a_save_asks_for_another(tmp_path, monkeypatch):
    monkeypatch.setattr(requests, "LOOK_EVERY_S", 0.0)
    made = requests.SaveRequests(tmp_path)
    assert not made.is_due()
    made.begin()
    (tmp_path / "SAVE").touch()
    made.settle()
    assert made.is_due(), "the committed state is older than the file"
    made.begin()
    made.settle()
    assert not (tmp_path / "SAVE").exists() and not made.is_due()


def test_a_file_that_cannot_be_deleted_does_not_save_for_ever(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(requests, "LOOK_EVERY_S", 0.0)
    made = requests.SaveRequests(tmp_path)
    (tmp_path / "SAVE").touch()
    assert made.is_due()
    made.begin()

    def refuse(path, missing_ok):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "unlink", refuse)
    made.settle()
    assert not made.is_due() and "cannot be deleted" in caplog.text


def test_an_export_has_a_card_that_the_hub_reads(straight):
    card = ModelCard.load(straight[0] / f"global_step_{STEPS}" / "huggingface" / "README.md")
    assert card.data.library_name == "transformers" and card.data.base_model is None
    for line in (f"    step: {STEPS}", "    train/loss: ", "    data.train_batch_size: 4"):
        assert line in card.text, line


def test_a_name_cannot_forge_the_card():
    hostile = '"]\n---\nlicense: mit\n---\n# Other\n```'
    text = model_card(
        {"step": 1},
        base_model="org/base",
        is_adapter=True,
        settings={"trainer.experiment_name": hostile},
        origins={"base": hostile},
    )
    card = ModelCard(text.decode())
    assert card.data.to_dict() == {
        "base_model": "org/base",
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["fsdp-sft", "lora"],
    }
    assert [line for line in card.text.splitlines() if line.startswith(("#", "---", "`"))] == [
        "# Model card"
    ]
