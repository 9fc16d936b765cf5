"""What the log says of a run's data before its first step."""

import logging
from pathlib import Path

import pytest
import tokenizer_fixtures as fixtures
from prepared import run, write_rows

from trainer.data.announce import announce
from trainer.data.batch_plan import Limits, Schedule
from trainer.data.conversation import RowKeys
from trainer.data.loader import RankPlan
from trainer.data.order import Share
from trainer.data.sample_writer import PrepareOptions
from trainer.data.samples import Samples


@pytest.mark.parametrize("reasoning", [True, False])
def test_left_out_reasoning_and_unread_keys_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, reasoning: bool
) -> None:
    extra = {"reasoning_content": "hm", "rating": 5} if reasoning else {}
    row = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello", **extra}]}
    path = write_rows(tmp_path / "rows.jsonl", row, row)
    samples = Samples([run(path, PrepareOptions(RowKeys(), max_length=64), cache=tmp_path / "cache").whole("rows")])
    caplog.set_level(logging.INFO)
    announce(
        samples,
        None,
        schedule=Schedule((Share(2),), batch_size=2, seed=1),
        plan=RankPlan(data_rank=0, num_data_ranks=1, limits=Limits(None, None), quadratic_cost=0.0),
        total_steps=1,
        tokenizer=fixtures.make_tokenizer(),
        lr="",
        device="CPU",
    )
    plan, *others = caplog.messages
    assert ("; the template leaves out the reasoning of 2 assistant turns; " in plan) == reasoning
    assert ("nothing reads these keys of messages: 'rating' 2" in others) == reasoning
