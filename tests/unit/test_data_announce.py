"""Tests of the log lines about a run's data before its first step."""

from dataclasses import replace

import tokenizer_fixtures as fixtures
from prepared import CHATS, OPTIONS, announced, run, write_rows

from trainer.data.samples import Samples

ASK = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "hello"}
THINKING = {**ANSWER, "reasoning_content": "hm", "rating": 5}


def test_the_start_names_what_is_not_trained_and_counts_turns_apart(tmp_path, caplog):
    chats = [[ASK, THINKING], [ASK, ANSWER, ASK, ANSWER]]
    rows = [{"messages": messages, "context": 1} for messages in chats]
    path = write_rows(tmp_path / "rows.jsonl", *rows)
    options = replace(OPTIONS, keys=CHATS)

    def lines(template: str) -> str:
        prepared = run(path, options, cache=tmp_path, template=template)
        samples = Samples([prepared.whole("rows")])
        return "\n".join(announced(samples, None, fixtures.make_tokenizer(), caplog))

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
