"""`python -m trainer.cli data preview` and `stats` show the training data without reading weights."""

import json
import shutil
from unittest import mock

import numpy as np
from small_files import write_lines
from source_files import NUM_ANSWERS, answers, chats, words
from source_files import files as files  # a fixture

from trainer.cli.data import main
from trainer.quickstart import MODEL_DIR
from trainer.train.start.compose import load_config
from trainer.train.start.inputs import prepare_inputs


def append(path, *pairs):
    with path.open("a") as file:
        for question, answer in pairs:
            file.write(json.dumps({"q": question, "a": answer}) + "\n")


def stats(capsys, *given):
    assert main(["stats", *given]) == 0
    return json.loads(capsys.readouterr().out)


def test_each_kind_of_sample_is_shown_once_with_its_mask(files, capsys):
    append(files / "answers.jsonl", ("Say much. " * 9, "no"))
    given = [*words(files, chats(files), answers(files)), "data.val_ratio=0"]
    assert main(["preview", "--samples", "1", *given]) == 0
    shown = capsys.readouterr().out
    assert f"{files}/chats.jsonl:1: first of its source" in shown
    assert f"{files}/answers.jsonl:{NUM_ANSWERS + 1}: longest, least supervised" in shown
    assert "<|im_start|>assistant\n[[x + 0<|im_end|>]]\n" in shown


def test_what_is_shown_is_what_is_trained_and_needs_no_weights(files, capsys, monkeypatch):
    model = shutil.copytree(MODEL_DIR, files / "model")
    given = [*words(files, chats(files)), f"model.partial_pretrain={model}"]
    total = stats(capsys, *given)["train"]["total"]
    refuse = mock.Mock(side_effect=AssertionError("a run finds its tokens prepared"))
    monkeypatch.setattr("trainer.data.token_cache._make_whole", refuse)
    config = load_config([*given, "model.random_weights=true"])
    train = prepare_inputs(config, progress=lambda: None).train
    tokens, labels = train.counts(np.arange(len(train)))
    assert (total["tokens"], total["supervised_tokens"]) == (tokens.sum(), labels.sum())


def test_hostile_text_and_names_are_printed_escaped(files, capsys):
    hostile = "<script>alert(1)</script> \x1b[2J \u202e &amp; " + "long " * 1000
    turns = [
        {"role": "user", "content": hostile},
        {"role": "assistant", "content": "</pre><b>done"},
    ]
    write_lines(files / "chats.jsonl", [{"messages": turns, "\x1b[2J\u202e": 1}])
    given = [*words(files, chats(files)), "data.max_length=6000"]
    for command in ("preview", "stats"):
        assert main([command, *given]) == 0
        shown = capsys.readouterr().out
        assert "\x1b" not in shown and "\u202e" not in shown and "[2J" in shown


def test_counts_by_source_and_what_was_left_out(files, capsys):
    append(files / "answers.jsonl", ("", "empty"), ("long " * 60, "dropped"))
    given = [*words(files, chats(files, ",repeat:2.5"), answers(files)), "data.val_ratio=0.25"]
    more = ["data.on_bad_row=skip", "data.truncation=drop"]
    tree = stats(capsys, *given, *more)
    train = tree["train"]
    held_out = tree["validation"]
    assert [train["sources"][name]["rows"] for name in ("chats", "answers")] == [9, 6]
    assert [held_out["sources"][name]["rows"] for name in ("chats", "answers")] == [3, 2]
    assert train["total"]["rows_per_epoch"] == 29
    for side in (train, held_out):
        parts = side["sources"].values()
        for key in ("samples", "tokens", "supervised_tokens"):
            assert sum(part[key] for part in parts) == side["total"][key]
    read = tree["read"]["train answers"]
    assert (read["num_rows"], read["num_bad_rows"], read["num_dropped"]) == (NUM_ANSWERS + 2, 1, 1)
    assert read["bad_rows_by_kind"] == {"empty prompt": 1}


def test_duplicates_are_found_inside_train_and_in_validation(files, capsys):
    val = files / "val.jsonl"
    end = "it is, and no other number"
    append(files / "answers.jsonl", ("What is 1?", f"1 {end}"), ("What is 1?", "another"))
    append(val, ("What is 2?", f"2 {end}"), ("What is 99?", f"99 {end}"))
    held_out = f"data.val_files=[{{files:{val},prompt_key:q,response_key:a,chat_template:{files}/says.jinja}}]"
    given = [*words(files, answers(files)), held_out]
    found = stats(capsys, *given)["duplicates"]
    inside = found["train"]
    between = found["validation_in_train"]
    place = [[f"{files}/answers.jsonl:9", f"{files}/answers.jsonl:2"]]
    assert inside == {"count": 1, "num_samples": 10, "share": 0.1, "places": place}
    place = [[f"{val}:1", f"{files}/answers.jsonl:3"]]
    assert between == {"count": 1, "num_samples": 2, "share": 0.5, "places": place}
