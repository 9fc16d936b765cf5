"""Mixed sources over three epochs, killed and grown inside one: every row comes as often as its source says."""

import json
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

from source_files import NUM_ANSWERS, NUM_CHATS, answers, chats, words, write_sources
from whole_runs import run, tiny_model

from trainer.cli import data
from trainer.loop.run import Run

CHATS, ANSWERS = "chats", "answers"


def append_chats(files: Path, count: int) -> None:
    with (files / "chats.jsonl").open("a") as file:
        for number in range(count):
            chat = [{"role": "user", "content": f"Take {number}."}, {"role": "assistant", "content": f"taken {number}"}]
            file.write(json.dumps({"messages": chat}) + "\n")


def settings(files: Path, *entries: str) -> tuple[str, ...]:
    """Three epochs; repeat 2 of the chats and 1 of the answers make 32 rows an epoch, 7 steps of 5."""
    more = ("data.train_batch_size=5", "data.val_ratio=0", "trainer.save_freq=2", "trainer.logger=[]")
    more += (
        "trainer.total_epochs=3",
        "trainer.checkpoint.async_save=false",
        f"trainer.default_local_dir={files}/run",
        "data.num_workers=0",
    )
    return (*tiny_model(files), *words(files, *entries), *more)


def die_at(step: int) -> None:
    """In a rank: killed as soon as this step is trained and logged."""
    log = Run.log

    def log_and_die(self: Run, row: Any, at: int, kind: str | None = None) -> None:
        log(self, row, at, kind)
        if at == step:
            os.kill(os.getpid(), signal.SIGKILL)

    Run.log = log_and_die  # type: ignore[method-assign]


def killed_at(step: int, num_ranks: int, given: tuple[str, ...], files: Path) -> None:
    code, output = run(num_ranks, *given, log=files / "log", before=partial(die_at, step))
    assert code not in (0, 2) and (files / "run" / f"global_step_{step - 1}").is_dir(), output


def ledger(files: Path, capsys: Any) -> dict[str, Any]:
    capsys.readouterr()
    assert data.main(["ledger", str(files / "run"), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_killed_grown_and_resumed_on_other_ranks_every_row_comes_as_often_as_it_should(
    tmp_path: Path, capsys: Any
) -> None:
    write_sources(tmp_path)
    old = settings(tmp_path, chats(tmp_path, ",repeat:2"), answers(tmp_path))
    killed_at(3, 2, old, tmp_path)
    append_chats(tmp_path, 5)
    grown = settings(tmp_path, chats(tmp_path, ",repeat:2"), answers(tmp_path))
    code, output = run(1, *grown, log=tmp_path / "refused")
    assert code == 2 and "resume_allow=[data_growth]" in output and "has 17 training rows for 12" in output
    killed_at(5, 4, (*grown, "trainer.resume_allow=[data_growth]"), tmp_path)
    code, output = run(1, *grown, "trainer.resume_allow=[data_growth]", log=tmp_path / "last")
    assert code == 0, output
    found = ledger(tmp_path, capsys)
    by_name = {source["name"]: source for source in found["sources"]}
    assert found["last_step"] == 7 + 2 * 9 and found["attempts"] == 3 and not found["notes"]
    file = tmp_path / "chats.jsonl"
    old_rows, new_rows = range(1, NUM_CHATS + 1), range(NUM_CHATS + 1, NUM_CHATS + 6)
    times = {f"{file}:{line}": 3 * 2 for line in old_rows} | {f"{file}:{line}": 2 * 2 for line in new_rows}
    assert by_name[CHATS]["by_row"] == times, "the new rows joined with the second epoch"
    assert by_name[ANSWERS]["times"] == {"3": NUM_ANSWERS}
