"""Several processes prepare many rows, with the same result as one process."""

import dataclasses
import itertools
import os
import signal
import time
from multiprocessing import current_process, get_context
from pathlib import Path

import psutil
import pytest
import tokenizer_fixtures as fixtures
from prepared import OPTIONS, good_rows, run
from small_files import write_lines

from trainer.data import readers
from trainer.data.chat import RowEncoder
from trainer.data.prepare import BAD_ROWS, OVER_LONG_ROWS, ROWS, TOKENS, prepare_blocks
from trainer.data.readers import RowBlock
from trainer.runtime.exit_codes import explain
from trainer.runtime.signals import StopRequest

TOKENIZER = fixtures.make_tokenizer()
OPTIONS = dataclasses.replace(OPTIONS, on_bad_row="skip", truncation="right", max_length=40)


@pytest.fixture(autouse=True)
def _few_rows_are_many(monkeypatch):
    monkeypatch.setattr(readers, "BLOCK_ROWS", 4)


def with_cpus(monkeypatch, count):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(count)))


def endless():
    for number in itertools.count(1):
        yield 0, RowBlock(Path("endless.json"), [(number, {"q": "hi", "a": "answer"})])


def children_of(pid):
    children = psutil.Process(pid).children()
    return {child for child in children if child.status() != psutil.STATUS_ZOMBIE}


def test_the_number_of_processes_changes_nothing(tmp_path, monkeypatch):
    odd = [{"no": "chat"}, "{", {"q": "hi", "a": "word " * 90}, {"q": "hi", "a": "bye", "mood": 1}]
    file = write_lines(tmp_path / "rows.jsonl", [*good_rows(30), *odd, *good_rows(5)])
    found = []
    for count in (1, 3):
        with_cpus(monkeypatch, count)
        dataset = run(file, OPTIONS, cache=tmp_path / f"with{count}")
        names = (TOKENS, ROWS, BAD_ROWS, OVER_LONG_ROWS)
        found.append([dataset.summary, *((dataset.directory / n).read_bytes() for n in names)])
    assert found[0] == found[1]
    summary = found[0][0]
    assert (summary.num_samples, summary.num_bad_rows, summary.num_truncated) == (37, 2, 1)
    assert summary.num_conversations == 37 and summary.unread_columns == {"mood": 1}


def test_a_daemonic_process_prepares_alone(monkeypatch):
    """multiprocessing does not allow this process to have children."""
    with_cpus(monkeypatch, 2)
    monkeypatch.setitem(current_process()._config, "daemon", True)
    blocks = itertools.islice(endless(), 20)
    assert len(list(prepare_blocks(RowEncoder(TOKENIZER, OPTIONS), blocks))) == 20


def test_a_killed_process_is_an_error_and_the_others_end(monkeypatch):
    with_cpus(monkeypatch, 2)
    results = prepare_blocks(RowEncoder(TOKENIZER, OPTIONS), endless())
    before = children_of(os.getpid())
    assert not any(part.bad for part in itertools.islice(results, 20))
    started = children_of(os.getpid()) - before
    assert len(started) == 2
    for child in started:  # one alone is noticed when nothing else comes
        child.kill()
    with pytest.raises(RuntimeError, match="killed, most likely for lack of memory") as found:
        list(results)
    assert children_of(os.getpid()) == before
    code, message = explain(found.value, StopRequest())
    assert code == 1 and message.startswith("one of the 2") and message.count("Fix:") == 1


def _prepare_for_ever():
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads are not in a forked process
    for _ in prepare_blocks(RowEncoder(TOKENIZER, OPTIONS), endless()):
        pass


def test_they_end_with_the_process_that_is_killed(monkeypatch):
    with_cpus(monkeypatch, 2)
    waiting = get_context("fork").Process(target=_prepare_for_ever)
    waiting.start()
    deadline = time.monotonic() + 60
    while len(children := children_of(waiting.pid)) < 2:
        assert time.monotonic() < deadline and waiting.is_alive()
        time.sleep(0.05)
    os.kill(waiting.pid, signal.SIGKILL)
    waiting.join(60)
    _, left = psutil.wait_procs(children, timeout=60)
    assert not left
