"""Damaged logs: truncated, with flipped bytes, or with garbage in them. Readers read the rest or
refuse the log.
"""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from log_formats import WRITERS, make_curves
from small_files import write_lines

from trainer.tools.report.readers import UnreadableLogError, read_run, store

SEED = 20
NUM_DAMAGES = 25
LINE_FORMATS = [name for name in WRITERS if name not in ("transformers", "tensorboard")]


def written(directory, name):
    """Return the path of a short run to read, and the file of it to damage."""
    target = WRITERS[name](directory, make_curves(num_steps=60))
    return target, target if target.is_file() else next(target.iterdir())


def read_or_refuse(path, damage):
    """Read the log and check the reader's promises, unless it refuses the log."""
    try:
        log = read_run(path)
    except UnreadableLogError as error:
        assert str(path) in str(error), damage
        return
    except Exception as error:
        raise AssertionError(f"{damage}: {type(error).__name__}: {error}") from error
    for key, series in log.series.items():
        assert len(series.steps) == len(series.values) > 0, (damage, key)
        assert (series.steps.dtype, series.values.dtype) == (np.int64, np.float64), (damage, key)
        assert bool(np.all(np.diff(series.steps) > 0)), (damage, key)


@pytest.mark.parametrize("name", WRITERS)
def test_damage_anywhere_is_survived_or_refused(tmp_path, name):
    target, file = written(tmp_path, name)
    content = file.read_bytes()
    generator = np.random.default_rng(SEED)
    sizes = generator.integers(0, len(content), NUM_DAMAGES).tolist()
    for size in (*range(0, 40, 3), *sizes, len(content) - 1):
        file.write_bytes(content[:size])
        read_or_refuse(target, f"{name} cut to {size} of {len(content)} bytes")
    for attempt in range(NUM_DAMAGES):
        damaged = bytearray(content)
        for place in generator.integers(0, len(content), 1 + attempt).tolist():
            damaged[place] = int(generator.integers(0, 256))
        file.write_bytes(damaged)
        read_or_refuse(target, f"{name}, seed {SEED}, attempt {attempt}")


@pytest.mark.parametrize("name", LINE_FORMATS)
def test_a_torn_tail_costs_one_row_and_is_counted(tmp_path, name):
    target, file = written(tmp_path, name)
    whole = read_run(target)
    lines = file.read_bytes().rstrip(b"\n").splitlines(keepends=True)
    rows = [n for n, line in enumerate(lines) if b"60" in line and b"runtime" not in line]
    place = rows[-1]
    file.write_bytes(b"".join(lines[:place]) + lines[place][: len(lines[place]) // 2])
    torn = read_run(target)
    assert torn.num_rows >= whole.num_rows - 3
    # A console line is free text: a torn one still has its first metrics.
    assert torn.num_unparsed == (0 if name == "verl-console" else 1)


def read_text(path, text):
    path.write_text(text)
    return read_run(path)


DEEP = "[" * 100_000
LONG = "0" * 5000


@pytest.mark.parametrize(
    ("text", "losses", "num_unparsed"),
    [
        # a whole row glued to a torn one
        ('{"step": 1, "loss": 1}\n{"step": 2, "lo{"step": 3, "loss": 2}\n{"st', {1: 1, 3: 2}, 2),
        (f'{{"step": 1, "loss": 1}}\n{{"step": {DEEP}\n{DEEP}\n', {1: 1}, 2),
        (f'{{"step": 1, "loss": 1e999}}\n{{"step": 1{LONG}}}\n', {1: np.inf}, 1),
        ('{"step": 1, "loss": 1}\n{"step": 1e400}\n{"step": -1, "loss": 1}\n', {1: 1}, 2),
        (f'{{"step": 1, "loss": 1}}\n{{"step": 2, "loss": 1{LONG[:400]}}}\n', {1: 1}, 0),
    ],
    ids=["glued", "nested", "digits", "step", "overflow"],
)
def test_damaged_json_lines_cost_only_themselves(tmp_path, text, losses, num_unparsed):
    log = read_text(tmp_path / "log.jsonl", text)
    assert log.series["train/loss"].by_step() == losses
    assert log.num_unparsed == num_unparsed


def test_new_keys_in_every_row_do_not_fill_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "MAX_KEYS", 8)
    rows = [{"step": step, "loss": step / 8, f"key{step}": 1.0} for step in range(1, 41)]
    with pytest.raises(UnreadableLogError, match="more than 8 metrics"):
        read_run(write_lines(tmp_path / "log.jsonl", rows))


@pytest.mark.parametrize("name", ["global_step_7", "checkpoint-7"])
def test_a_checkpoint_that_is_deleted_while_it_is_looked_at_is_left_out(
    tmp_path, monkeypatch, name
):
    """A run that trains rotates its checkpoints."""
    log = write_lines(tmp_path / "log.jsonl", [{"step": 1, "loss": 0.5}])
    list_directory = os.listdir

    def listed(path):
        if Path(path).name == name:
            Path(path).rmdir()
        return list_directory(path)

    (tmp_path / name).mkdir()
    monkeypatch.setattr(os, "listdir", listed)
    assert read_run(log).checkpoints == ()


def test_damage_beside_the_log_does_not_hide_it(tmp_path):
    row = {"step": 1, "attempt": 1, "kind": "train", "nonfinite": 3, "train/loss": 0.5}
    write_lines(tmp_path / "metrics.jsonl", [row])
    for name in ("run.json", "events.jsonl", "rollbacks.json", "latest_checkpointed_iteration.txt"):
        (tmp_path / name).write_bytes(b"\xff{[\n" + json.dumps([1]).encode())
    (tmp_path / "global_step_7").write_text("a file")
    (tmp_path / "evaluations.jsonl").mkdir()
    log = read_run(tmp_path)
    assert (log.checkpoints, log.events) == ((), ())
    (note,) = log.notes
    assert "evaluations.jsonl cannot be read: " in note
