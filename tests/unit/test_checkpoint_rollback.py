"""What a run knows of its rollbacks: read as written, also by the first versions; never guessed."""

import json
from pathlib import Path

import pytest
from checkpoint_fakes import save

from trainer.checkpoint import layout, rollback
from trainer.config import ConfigError


def test_a_rollback_that_was_only_decided_is_completed_under_either_name_of_what_it_discards(
    tmp_path: Path,
) -> None:
    for name in ("discarded", "condemned"):
        run_dir = tmp_path / name
        run_dir.mkdir()
        save(run_dir, 10, 30)
        target = layout.inspect(run_dir / "global_step_10")
        decided = rollback.decide(
            run_dir, target, onset=30, found_step=32, last_step=90, reason="diverged"
        )
        (entry,) = json.loads((run_dir / rollback.FILE).read_text())["rollbacks"]
        assert entry.pop("discarded") == ["a1b30"] and decided.skipped_steps == frozenset(
            range(22, 41)
        )
        # as if killed right after deciding
        (run_dir / ".corrupt_global_step_30.0").rename(run_dir / "global_step_30")
        (run_dir / rollback.FILE).write_text(
            json.dumps({"rollbacks": [{**entry, name: ["a1b30"]}]})
        )
        layout.publish(run_dir, 30)
        rollback.complete(run_dir)
        assert rollback.read(run_dir) == decided and layout.read_pointer(run_dir).step == 10
        assert [info.step for info in layout.checkpoints(run_dir)] == [10]


@pytest.mark.parametrize("text", ["{", "{}", '{"rollbacks": [{"onset": 1}]}', '{"rollbacks": [1]}'])
def test_a_file_that_cannot_be_read_ends_the_start(tmp_path: Path, text: str) -> None:
    (tmp_path / rollback.FILE).write_text(text)
    with pytest.raises(ConfigError, match=r"cannot read .*rollbacks\.json"):
        rollback.read(tmp_path)
