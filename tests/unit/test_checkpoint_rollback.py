"""A run reads its rollbacks as they were written, and never guesses them."""

import pytest
from checkpoint_fakes import save

from trainer.checkpoint import layout, rollback
from trainer.config import ConfigError


def test_a_rollback_that_was_only_decided_is_completed(tmp_path):
    save(tmp_path, 10, 30)
    target = layout.inspect(tmp_path / "global_step_10")
    decided = rollback.decide(
        tmp_path, target, onset=30, found_step=32, last_step=90, reason="diverged"
    )
    assert decided.skipped_steps == frozenset(range(22, 41))
    # as if killed right after deciding
    (tmp_path / ".corrupt_global_step_30.0").rename(tmp_path / "global_step_30")
    layout.publish(tmp_path, 30)
    rollback.complete(tmp_path)
    assert rollback.read(tmp_path) == decided and layout.read_pointer(tmp_path).step == 10
    assert [info.step for info in layout.checkpoints(tmp_path)] == [10]


@pytest.mark.parametrize("text", ["{", "{}", '{"rollbacks": [{"onset": 1}]}', '{"rollbacks": [1]}'])
def test_a_file_that_cannot_be_read_ends_the_start(tmp_path, text):
    (tmp_path / rollback.FILE).write_text(text)
    with pytest.raises(ConfigError, match=r"cannot read .*rollbacks\.json"):
        rollback.read(tmp_path)
