"""What the log says of a run's data before its first step."""

from pathlib import Path
from typing import Any

import pytest
import tokenizer_fixtures as fixtures
from prepared import announced, run, write_rows

from trainer.config import RowKeys
from trainer.data.rows import PrepareOptions
from trainer.data.samples import Samples

ASK, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}


def told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, template: str, *rows: Any, **options: Any
) -> list[str]:
    """Return the lines that announce these rows."""
    path = write_rows(
        tmp_path / "rows.jsonl", *({"messages": row, "context": 1, "id": 2} for row in rows)
    )
    prepared = run(
        path, PrepareOptions(RowKeys(), max_length=64, **options), cache=tmp_path, template=template
    )
    samples = Samples([prepared.whole("rows")])
    return announced(samples, None, fixtures.make_tokenizer(), caplog)


@pytest.mark.parametrize("reasoning", [True, False])
def test_left_out_reasoning_and_unread_keys_are_named(tmp_path, caplog, reasoning):
    row = [ASK, {**ANSWER, **({"reasoning_content": "hm", "rating": 5} if reasoning else {})}]
    lines = told(tmp_path, caplog, fixtures.CHATML, row, row)
    left_out = "            the template leaves out the reasoning of 2 assistant turns"
    assert (left_out in lines) == reasoning
    assert ("nothing reads these keys of messages: 'rating' 2" in lines) == reasoning
    assert "            nothing reads these columns: 'context' 2, 'id' 2" in lines


def test_the_start_says_what_became_of_turns_and_why(tmp_path, caplog):
    rows = [[ASK, ANSWER], [ASK, ANSWER, ASK, ANSWER]]

    def lines(template: str, **options: Any) -> list[str]:
        return told(tmp_path, caplog, template, *rows, **options)

    assert not [line for line in lines(fixtures.CHATML) if line.startswith("turns ")]
    apart = lines(fixtures.QWEN3)
    assert "turns       1 of 2 conversations are trained turn by turn (data.turns)" in apart
    assert apart[0].startswith("data        3 samples, ")
    assert "batch       2 samples; ranks: 1 (CPU); micro-batches of each: 1" in apart
    opens = fixtures.CHATML.replace("assistant\n' }}", "assistant\n<think>\n' }}")
    unlike = "            3 turns are not rendered as their generation prompt begins"
    assert unlike in lines(opens)
