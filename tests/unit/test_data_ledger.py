"""How often each row was trained, from the files of a run alone."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_data_growth import A, B, Run, dataset, division

from trainer.checkpoint import rollback
from trainer.cli import data
from trainer.config import ConfigError
from trainer.data.loader import DATA_EVENT
from trainer.data_tools.ledger import _by_row, as_lines, ledger
from trainer.tracking import Tracking


class LoggedRun(Run):
    """Writes what a run writes, and keeps which rows the weights have seen."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(division((dataset(*A), 1.5), (dataset(*B), 1.0)))
        self.run_dir, self.seen, self.num_left_out = run_dir, dict[int, Counter[int]](), 0
        self.tracking = self.begin()

    def begin(self) -> Tracking:
        """A new attempt from where the run stands."""
        tracking = Tracking("p", "e", [], run_dir=self.run_dir)
        record, step = self.loader.record, self.loader.step
        places = [{"directory": "gone", "files": []}] * len(record["sources"])
        tracking.start(step)
        sources = [source | place for source, place in zip(record.pop("sources"), places, strict=True)]
        del record["step"]
        tracking.event(DATA_EVENT, step, "", **record, sources=sources)
        self.seen = {at: rows for at, rows in self.seen.items() if at <= step}
        return tracking

    def train(self, *steps: int, left_out: tuple[int, ...] = (), is_logged: bool = True) -> None:
        for step in steps:
            self.num_left_out += step in left_out
            if is_logged:
                self.tracking.log({"train/loss": 1.0, "optim/skipped_steps": self.num_left_out}, step, "train")
            self.loader.step = step
            rows = self.loader.schedule.rows(step)
            numbers = [int(self.data.train.sample(int(i))[0][0]) for i in self.data.train.of_rows(rows)]
            self.seen[step] = Counter() if step in left_out else Counter(numbers)

    def restart(self, step: int, batch_size: int, now: Any = None) -> None:
        """Killed, and resumed from the checkpoint of `step`."""
        self.tracking.finish(0)
        self.loader.step = step
        self.resume(now or self.data_now, batch_size)
        self.loader.step = step
        self.tracking = self.begin()

    data_now = division((dataset(*A), 1.5), (dataset(*B), 1.0))

    @property
    def times(self) -> list[dict[str, int]]:
        """As a ledger should have it, by source."""
        trained = sum(self.seen.values(), Counter[int]())
        found = []
        for source in self.data.train.sources:
            numbers = [int(source.dataset.tokens[2 * row]) for row in np.asarray(source.indices)]
            times = Counter(trained[number] for number in numbers)
            found.append({str(count): times[count] for count in sorted(times)})
        return found


def check(run: LoggedRun) -> dict[str, Any]:
    found = ledger(run.run_dir, has_rows=False)
    assert [source["times"] for source in found["sources"]] == run.times
    return found


def test_kills_lost_lines_batch_sizes_left_out_updates_growth_and_a_rollback(tmp_path: Path) -> None:
    run = LoggedRun(tmp_path)
    run.train(1, 2, 3, 4, left_out=(3,))
    assert check(run)["updates_left_out"] == [3]
    run.restart(2, 4)  # the update of step 3 is not left out this time
    run.num_left_out = 0
    run.train(3, 4, 5, 6)
    assert not check(run)["updates_left_out"]
    run.train(7, 8, is_logged=False)  # the machine went down with the last lines; the checkpoint has the steps
    run.restart(8, 5)
    run.train(9, 10, 11)
    check(run)
    grown = division((dataset(*A, *range(40, 50)), 1.5), (dataset(*B), 1.0), (dataset(*range(60, 66)), 2.0))
    run.restart(10, 3, grown)
    run.train(*range(11, 40), left_out=(20, 21))
    assert check(run)["updates_left_out"] == [20, 21]

    target = run.loader.schedule.position(15)  # rolled back inside the attempt, and past the steps 18 to 23
    entry = rollback.Rollback(22, 24, 15, 18, 23, "", [])
    (tmp_path / rollback.FILE).write_text(json.dumps({"rollbacks": [vars(entry)]}))
    run.tracking.rewind(15)
    run.seen = {step: rows for step, rows in run.seen.items() if step <= 15}
    run.loader.rewind(target, skipped_steps=frozenset(range(18, 24)))
    run.train(16, 17, *range(24, 30))
    found = check(run)
    assert found["rollbacks"] == 1 and found["passed_over_steps"] == [*range(18, 24)] and not found["updates_left_out"]
    older = run.loader.schedule.position(24)
    run.restart(26, 4, grown)
    run.train(27, 28)
    found = check(run)
    assert (found["last_step"], found["attempts"], found["notes"]) == (28, 5, [])
    assert found["sources"][0]["held_out"] == 4 + 2 and "passed over by rollbacks: steps 18" in "\n".join(
        as_lines(found)
    )
    run.tracking.rewind(24)  # to a checkpoint of the attempt before, which had another batch size
    run.seen = {step: rows for step, rows in run.seen.items() if step <= 24}
    run.loader.rewind(older, skipped_steps=frozenset())
    run.train(25, 26)
    check(run)
    run.tracking.finish(0)


def test_a_run_that_branches_from_another_says_what_it_cannot_count(tmp_path: Path) -> None:
    run = LoggedRun(tmp_path / "first")
    run.train(1, 2, 3)
    run.tracking.finish(0)
    run.run_dir, run.seen = tmp_path / "second", {}
    run.resume(run.data_now)
    run.tracking = run.begin()
    run.train(4, 5)
    assert check(run)["notes"] == ["goes on from step 3 of another run or version: what that trained is not counted"]
    run.tracking.finish(0)


def test_a_directory_without_the_records_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="has no record of what was trained"):
        ledger(tmp_path, has_rows=False)
    assert data.main(["ledger", str(tmp_path)]) == 2 and "give the directory of a run" in capsys.readouterr().err


def test_rows_of_a_cache_that_another_version_wrote_have_no_places(tmp_path: Path) -> None:
    """Its summary lacks what today's has; this ended in a traceback."""
    for name in ("tokens.bin", "rows.bin"):
        (tmp_path / name).write_bytes(bytes(28))
    (tmp_path / "summary.json").write_text('{"num_rows": 1}')
    source = {"directory": str(tmp_path), "files": ["rows.jsonl"]}
    assert _by_row(source, np.ones(1, dtype=int)) is None
