"""Tests of the inputs of a run whose data has several sources."""

import shutil
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from families import FAMILIES
from source_files import NUM_CHATS, TEMPLATE, answers, chats, words
from source_files import files as files  # a fixture
from toy import VOCAB, write_model_config

from trainer.config import ConfigError
from trainer.data import token_cache
from trainer.errors import DataError
from trainer.quickstart import MODEL_DIR
from trainer.train.start import main
from trainer.train.start.compose import load_config
from trainer.train.start.inputs import Encoders, prepare_inputs


def inputs_of(*given):
    return prepare_inputs(load_config(list(given)), progress=lambda: None)


def texts(inputs):
    return [
        inputs.tokenizer.decode(inputs.train.sample(i)[0].tolist())
        for i in range(len(inputs.train))
    ]


def test_each_source_is_read_with_its_keys_and_rendered_with_its_template(files):
    inputs = inputs_of(
        *words(files, chats(files), answers(files, ",repeat:2.5")), "data.val_ratio=0"
    )
    assert [share.num_samples for share in inputs.train.shares] == [12, 20]
    said = "<|im_start|>user says What is 1?<|im_end|><|im_start|>assistant says 1 it is, and no other number<|im_end|>"
    assert texts(inputs)[NUM_CHATS + 1] == said
    assert inputs.train.location(NUM_CHATS + 1) == f"{files}/answers.jsonl:2"


def test_a_shard_that_was_not_copied_is_named(files, caplog):
    (files / "chats.jsonl").rename(files / "a-0-of-2.jsonl")
    inputs_of(*words(files, f"{{files:{files}/a-*.jsonl,name:a}}"))
    assert "a-*-of-2" in caplog.text


def test_a_variable_that_a_template_does_not_read_is_named(files, caplog):
    (files / "says.jinja").write_text("{{ polite }}" + TEMPLATE)
    inputs_of(
        *words(files, chats(files), answers(files)),
        "data.apply_chat_template_kwargs={polite: '', politr: ''}",
    )
    ours, says = [text for text in caplog.messages if "does not read" in text]
    assert "template of the model does not read polite, politr." in ours
    assert "says.jinja does not read politr." in says


def test_a_source_that_is_added_tokenises_no_other_and_is_another_run(files, monkeypatch):
    written = Mock(wraps=token_cache.write_samples)
    monkeypatch.setattr(token_cache, "write_samples", written)
    alone = inputs_of(f"data.train_files={files}/chats.jsonl", *words(files, chats(files))[1:])
    as_source = inputs_of(*words(files, chats(files)))
    assert written.call_count == 1 and as_source.train.fingerprint == alone.train.fingerprint
    both = inputs_of(*words(files, chats(files), answers(files)))
    again = inputs_of(*words(files, chats(files, ",repeat:0.5,name:other"), answers(files)))
    assert written.call_count == 2, "each once, whatever is beside it"
    assert len({inputs.train.fingerprint for inputs in (alone, both, again)}) == 3


def test_keys_of_conversations_do_not_prepare_plain_text_again(files):
    text = f"{{files:{files}/answers.jsonl,text_key:a}}"
    given = words(files, chats(files), text)
    others = ["data.turns=apart", "data.train_on=last", f"data.chat_template={files}/says.jinja"]
    plain = inputs_of(*given)
    changed = inputs_of(*given, *others, "data.apply_chat_template_kwargs={a: 1}")
    sources = zip(plain.train.sources, changed.train.sources, strict=True)
    assert [a.dataset.directory == b.dataset.directory for a, b in sources] == [False, True]


UNKNOWN_TOKEN = f"chats.jsonl:1: the token '.*' has the id .*, but the model knows only {VOCAB} "


def test_a_tokenizer_of_python_code_is_not_replaced_by_another(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text('{"auto_map": {}}')
    with pytest.raises(ConfigError, match="is Python code"):
        Encoders(load_config([]), Mock(path=str(tmp_path)))


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("gpt2", {}, UNKNOWN_TOKEN),
        (
            "apertus1p5_text",
            {"vocab_size": 4096, "output_vocab_size": VOCAB, "tie_word_embeddings": False},
            UNKNOWN_TOKEN,
        ),
        (
            "gpt2",
            {"vocab_size": 4096, "max_position_embeddings": 40},
            r"chats.jsonl:11: the sample has 50 tokens.*\nFix: data.max_length=40",
        ),
    ],
)
def test_a_sample_that_the_model_has_no_row_for_is_refused_with_its_place(
    files, family, changes, message
):
    if family not in FAMILIES:
        pytest.skip("an older transformers has no such family")
    shutil.copytree(MODEL_DIR, files / "model")
    write_model_config(files / "model", family, **changes)
    model = [f"model.partial_pretrain={files}/model", "model.random_weights=true"]
    with pytest.raises(DataError, match=message):
        inputs_of(*words(files, chats(files)), *model)


@pytest.mark.parametrize(
    ("words", "is_random", "rate"),
    [
        ([], True, 2e-3),
        (["model.lora_rank=4", "model.partial_pretrain=org/name"], False, 1e-4),
        (["optim.lr=3e-4"], False, 3e-4),
    ],
)
def test_the_peak_rate_follows_what_is_trained(words, is_random, rate):
    inputs = SimpleNamespace(source=SimpleNamespace(random_weights=is_random))
    setup = SimpleNamespace(config=load_config(words), inputs=inputs, total_steps=10)
    assert main._lr_schedule(setup).peak_lr == rate
