"""Tests of the log lines about a run's data before its first step."""

from dataclasses import replace

import prepared
import tokenizer_fixtures as fixtures
from prepared import CHATS, OPTIONS, good_rows, run, run_rows
from small_files import write_lines

from trainer.data.batch_plan import Limits, RankPlan, Schedule
from trainer.data.formats import vocabulary_digest
from trainer.data.samples import Samples
from trainer.data.show import announce

ASK = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "hello"}
THINKING = {**ANSWER, "reasoning_content": "hm", "rating": 5}


def announced(caplog, train, validation=None):
    """Return the lines that announce samples at the start of a run on one rank."""
    caplog.clear()
    caplog.set_level("INFO")
    announce(
        train,
        validation,
        schedule=Schedule(train.shares, batch_size=2, seed=1),
        plan=RankPlan(0, 1, Limits(None, None), 0.0),
        total_steps=1,
        tokenizer=fixtures.make_tokenizer(),
        lr="",
        device="CPU",
    )
    return caplog.text


def test_the_start_names_what_is_not_trained_and_counts_turns_apart(tmp_path, caplog):
    chats = [[ASK, THINKING], [ASK, ANSWER, ASK, ANSWER]]
    rows = [{"messages": messages, "context": 1} for messages in chats]
    path = write_lines(tmp_path / "rows.jsonl", rows)
    options = replace(OPTIONS, keys=CHATS)

    def lines(template):
        prepared = run(path, options, cache=tmp_path, template=template)
        return announced(caplog, Samples([prepared.whole("rows")]))

    plain = lines(fixtures.CHATML)
    apart = lines(fixtures.QWEN3)
    assert "1 assistant turns rendered without their reasoning" in plain
    assert "unused keys of messages: 'rating' 1" in plain
    assert "unused columns: 'context' 2" in plain
    assert "divided into one sample per turn" not in plain
    assert "1 conversations divided into one sample per turn" in apart
    assert "3 samples, " in apart and "without their reasoning" not in apart
    opens = fixtures.CHATML.replace("assistant\n' }}", "assistant\n<think>\n' }}")
    assert "3 turns that do not begin with their generation prompt's header" in lines(opens)


def test_the_start_warns_about_validation_samples_that_are_also_trained(tmp_path, caplog):
    rows = run_rows(tmp_path, *good_rows(9)).whole("rows")
    train, held_out = rows.split(0.4, seed=1)

    def lines(validation):
        return announced(caplog, Samples([train]), Samples([validation]))

    assert "about 100% of the validation samples are also training samples" in lines(train)
    assert "about 56% of the validation samples" in lines(rows)
    assert "also training samples" not in lines(held_out)


def test_the_start_warns_about_supervised_text_that_the_tokenizer_does_not_know(
    tmp_path, caplog, monkeypatch
):
    made = fixtures.make_tokenizer

    def make_tokenizer(*args):
        tokenizer = made(*args)
        tokenizer.unk_token = "!"
        return tokenizer

    for module in (fixtures, prepared):
        monkeypatch.setattr(module, "make_tokenizer", make_tokenizer)
    rows = run_rows(tmp_path, {"q": "so!", "a": "well ! !"}, {"q": "hi", "a": "ha !"})
    assert "3 supervised tokens are '!'" in announced(caplog, Samples([rows.whole("rows")]))


def test_the_start_says_if_rows_of_tokens_have_no_end_token(tmp_path, caplog):
    tokenizer = fixtures.make_tokenizer()
    digest = vocabulary_digest(tokenizer)
    row = {"input_ids": [5, 6], "loss_mask": [0, 1], "vocabulary_digest": digest}
    rows = run_rows(tmp_path, row, keys=CHATS)
    lines = announced(caplog, Samples([rows.whole("rows")]))
    assert "supervised text ends with no end token\n" in lines
