"""Many rows are prepared in several processes: nobody can tell from the result."""

import dataclasses
import itertools
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing import current_process, get_context
from pathlib import Path
from typing import Any

import psutil
import pytest
import tokenizer_fixtures as fixtures
from prepared import OPTIONS, run, write_rows

from trainer.config import RowKeys
from trainer.data import readers, row_processes
from trainer.data.readers import RowBlock
from trainer.data.row_encoder import RowEncoder
from trainer.data.row_processes import prepare_blocks
from trainer.data.sample_writer import BAD_ROWS, OVER_LONG_ROWS
from trainer.data.template import ChatTemplate

TOKENIZER = fixtures.make_tokenizer(fixtures.CHATML)
KEYS = RowKeys("messages", "tools", None, None)
OPTIONS = dataclasses.replace(
    OPTIONS, keys=KEYS, on_bad_row="skip", truncation="right", max_length=40
)


@pytest.fixture(autouse=True)
def _few_rows_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_processes, "ROWS_HERE", 3)
    monkeypatch.setattr(readers, "BLOCK_ROWS", 4)


def with_cpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(count)))


def chat(answer: str, **more: str) -> dict[str, object]:
    return {
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": answer, **more},
        ]
    }


def rows() -> list[object]:
    """Good, without an answer, broken, long, with a key that nothing reads, and plain text."""
    good = [chat(f"answer {number}") for number in range(30)]
    text = {"prompt": "a text", "completion": " goes on"}
    return [*good, {"no": "chat"}, "{", chat("word " * 90), chat("bye", mood="x"), text, *good[:5]]


def test_the_number_of_processes_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, found = write_rows(tmp_path / "rows.jsonl", *rows()), []
    for count in (1, 3):
        with_cpus(monkeypatch, count)
        started: list[bool] = []
        begin = row_processes._in_processes
        monkeypatch.setattr(
            row_processes,
            "_in_processes",
            lambda *more, real=begin, to=started: to.append(True) or real(*more),
        )
        dataset = run(file, OPTIONS, cache=tmp_path / f"with{count}")
        assert bool(started) == (count > 1)
        directory = next((tmp_path / f"with{count}" / "tokens").glob("*/"))
        names = ("tokens.bin", "rows.bin", BAD_ROWS, OVER_LONG_ROWS)
        found.append([dataset.summary, *((directory / name).read_bytes() for name in names)])
    assert found[0] == found[1]
    summary = found[0][0]
    assert (summary.num_samples, summary.num_bad_rows, summary.num_truncated) == (38, 2, 1)
    assert (
        summary.num_conversations == 37
        and len(summary.rows_by_shape) == 2
        and summary.unread_keys == {"mood": 1}
    )


def test_a_daemonic_process_prepares_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """multiprocessing refuses it children: ten million rows ended in an assertion there."""
    with_cpus(monkeypatch, 2)
    monkeypatch.setitem(current_process()._config, "daemon", True)  # type: ignore[attr-defined]
    assert (
        len(list(prepare_blocks(RowEncoder(TOKENIZER, OPTIONS), itertools.islice(endless(), 20))))
        == 20
    )


def endless() -> Iterator[tuple[int, RowBlock]]:
    return (
        (0, RowBlock(Path("endless.json"), [(number, chat("answer"))]))
        for number in itertools.count(1)
    )


def test_rows_that_take_long_in_other_processes_are_progress(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The process of a rank waits for a block meanwhile, and the launcher would take its
    silence for a hang.
    """
    with_cpus(monkeypatch, 2)
    monkeypatch.setattr(row_processes, "LOOK_EVERY_S", 0.01)
    render, here, told, calls = (
        ChatTemplate.render,
        os.getpid(),
        get_context("fork").Event(),
        itertools.count(1),
    )

    def render_slowly(*args: Any, **more: Any) -> Any:
        assert os.getpid() == here or told.wait(20), (
            "no progress was told while this row was rendered"
        )
        return render(*args, **more)

    monkeypatch.setattr(ChatTemplate, "render", render_slowly)
    blocks = itertools.islice(endless(), 8)
    progress = lambda: told.set() if next(calls) > 3 else None  # noqa: E731  three rows are prepared here
    assert len(list(prepare_blocks(RowEncoder(TOKENIZER, OPTIONS), blocks, progress))) == 8


def test_a_row_that_never_ends_is_no_progress() -> None:
    begun = row_processes._RowsBegun()
    begun.add()
    assert [begun.have_grown(), begun.have_grown()] == [True, False]


def children_of(pid: int) -> list[psutil.Process]:
    return [
        child for child in psutil.Process(pid).children() if child.status() != psutil.STATUS_ZOMBIE
    ]


def test_a_process_that_is_killed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with_cpus(monkeypatch, 2)
    results = prepare_blocks(RowEncoder(TOKENIZER, OPTIONS), endless())
    before = {child.pid for child in children_of(os.getpid())}
    assert not any(part.bad for part in itertools.islice(results, 20))
    started = [child for child in children_of(os.getpid()) if child.pid not in before]
    assert len(started) == 2
    for child in started:  # one alone is noticed when nothing else comes
        child.kill()
    with pytest.raises(RuntimeError, match="killed, most likely because memory ran out"):
        list(results)
    assert not any(
        child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in started
    )


def test_an_end_before_the_last_row_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    with_cpus(monkeypatch, 2)
    results = prepare_blocks(RowEncoder(TOKENIZER, OPTIONS), endless())
    before = {child.pid for child in children_of(os.getpid())}
    next(itertools.islice(results, 20, None))
    assert len(children_of(os.getpid())) == len(before) + 2
    results.close()
    assert {child.pid for child in children_of(os.getpid())} == before


def test_they_end_with_the_process_that_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    with_cpus(monkeypatch, 2)
    waiting = get_context("fork").Process(target=_encode_for_ever)
    waiting.start()
    assert waiting.pid is not None
    deadline = time.monotonic() + 60
    while len(children := children_of(waiting.pid)) < 2:
        assert time.monotonic() < deadline and waiting.is_alive()
        time.sleep(0.05)
    os.kill(waiting.pid, signal.SIGKILL)
    waiting.join(60)
    _, left = psutil.wait_procs(children, timeout=60)
    assert not left


def _encode_for_ever() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads are not in a forked process
    for _ in prepare_blocks(RowEncoder(TOKENIZER, OPTIONS), endless()):
        pass
