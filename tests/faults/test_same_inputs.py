"""Ranks that read different files, or files that change during a start, never train a mixture of
them.

Each rank has a separate working directory, like a machine, and all share the run directory.
"""

import os
import re
import shutil
import time
from contextlib import chdir
from functools import partial
from pathlib import Path

import pytest
from small_files import read_json, write_json
from toy import change_tensors, write_weights
from whole_runs import curve, run, started, tiny_model, train

from trainer.errors import EXIT_BAD_DATA, EXIT_DONE, EXIT_USAGE
from trainer.quickstart import TRAIN_FILE
from trainer.runtime.heartbeat import Heartbeat
from trainer.train.start.compose import load_config
from trainer.train.start.inputs import prepare_inputs
from trainer.train.start.preflight import TEMPLATES

LIMIT_S = 30.0
NUM_ROWS = 40
TEMPLATE = (TEMPLATES / "chatml.jinja").read_text()
WORDS = (
    "data.train_files=data.jsonl",
    "data.chat_template=chat.jinja",
    "data.cache_dir=cache",
    "model.partial_pretrain=model",
    "model.random_weights=false",
    "data.num_workers=0",
    "data.val_ratio=0.2",
    "trainer.total_training_steps=2",
)


def quickstart_rows(first, end):
    return "".join(TRAIN_FILE.read_text().splitlines(keepends=True)[first:end])


@pytest.fixture(scope="module")
def machine(root):
    """The files of a machine, to be copied."""
    tiny_model(root)
    write_weights(root / "model")
    (root / "data.jsonl").write_text(quickstart_rows(0, NUM_ROWS))
    (root / "chat.jinja").write_text(TEMPLATE)
    return root


def other_rows(root):
    """Write the same number of different rows."""
    (root / "data.jsonl").write_text(quickstart_rows(NUM_ROWS, 2 * NUM_ROWS))


def other_weights(root):
    file = root / "model" / "model.safetensors"
    change_tensors(file, lambda tensors: [tensor.add_(0.05) for tensor in tensors.values()])


def other_tokenizer(root):
    """Exchange the ids of two tokens."""
    file = root / "model" / "tokenizer.json"
    tree = read_json(file)
    vocabulary = tree["model"]["vocab"]
    *_, one, other = sorted(vocabulary, key=vocabulary.__getitem__)
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    write_json(file, tree)


def other_template(root):
    (root / "chat.jinja").write_text(TEMPLATE + "{# another one #}")


CHANGES = {
    "training data": other_rows,
    "weights": other_weights,
    "tokenizer": other_tokenizer,
    "chat template": other_template,
}


def machines_of(machine, root, count):
    return [Path(shutil.copytree(machine, root / f"machine{number}")) for number in range(count)]


def words_of(machine):
    used = ("model.fsdp", "trainer.device", "data.train_b")
    small = [word for word in tiny_model(machine) if word.startswith(used)]
    return (*small, *WORDS)


def enter_machine(root):
    """Change to the directory of this rank's machine."""
    os.chdir(root / f"machine{os.environ['RANK']}")


@pytest.mark.parametrize("what", CHANGES)
def test_ranks_with_different_files_are_refused_as_soon_as_they_meet(tmp_path, machine, what):
    machines = machines_of(machine, tmp_path, 2)
    CHANGES[what](machines[1])
    words = (*words_of(machine), f"trainer.default_local_dir={tmp_path}/run")
    before = partial(enter_machine, tmp_path)
    with started(2, *words, log=tmp_path / "log", before=before) as attempt:
        code = attempt.wait(LIMIT_S)
        output = attempt.output
    assert code == EXIT_USAGE, output
    assert re.search(
        rf"^  {what}: \w+ on \S+ \(rank 0\), \w+ on \S+ \(rank 1\)$", output, re.MULTILINE
    ), output
    assert "Fix: " in output and "Traceback" not in output
    assert {process.exitcode for process in attempt.ranks} == {EXIT_USAGE}, "every rank refuses"
    assert not list((tmp_path / "run").glob("*"))


def test_ranks_with_equal_files_at_different_places_train(tmp_path, machine):
    machines_of(machine, tmp_path, 2)
    before = partial(enter_machine, tmp_path)
    train(tmp_path / "run", 2, *words_of(machine), before=before)


# What follows changes files at moments of the start.


def grow(path):
    """Append rows, like a process that is still writing the file."""
    with path.open("a") as file:
        file.write(quickstart_rows(0, 5))


def swap(path):
    """Write different rows into the same file."""
    path.write_text("".join(reversed(path.read_text().splitlines(keepends=True))))


def change_at(root, change, moment):
    """Change the data at a heartbeat while it is prepared, or when rank 0 enters a phase. The other
    rank then reads the changed data.
    """
    from trainer.data import readers, token_cache

    token_cache.HASHED_BYTES = 1000
    readers.BLOCK_ROWS = 1  # each row is progress
    os.chdir(root / "machine0")
    done = root / "changed"
    beat = Heartbeat.beat
    enter = Heartbeat.enter
    num_beats = 0

    def act():
        try:
            done.touch(exist_ok=False)
        except FileExistsError:
            return
        change(Path("data.jsonl"))

    def beating(self):
        nonlocal num_beats
        beat(self)
        if self._phase_name == "prepare":
            num_beats += 1
            if num_beats == moment:
                act()

    def entering(self, phase, *, limit_s):
        if phase == moment and os.environ["RANK"] == "0":
            act()
        enter(self, phase, limit_s=limit_s)
        is_late = moment == "meet" and os.environ["RANK"] == "1"
        while phase == "prepare" and is_late and not done.exists():
            time.sleep(0.01)

    Heartbeat.beat = beating
    Heartbeat.enter = entering


def fingerprint(machine, words, *more):
    with chdir(machine):
        return prepare_inputs(load_config([*words, *more]), progress=lambda: None).train.fingerprint


MOMENTS = {
    "hashed": (3, grow, 2),
    "between hash and rows": ("first row", swap, 1),
    "before the tokens get their name": ("last row", grow, 2),
    "prepared": ("meet", swap, 1),
    "prepared by one rank": ("meet", swap, 2),
}


@pytest.mark.parametrize("name", MOMENTS)
def test_data_that_changes_while_a_run_starts_is_refused_or_trained_as_first_read(
    tmp_path, machine, name
):
    (root,) = machines_of(machine, tmp_path, 1)
    moment, change, num_ranks = MOMENTS[name]
    words = words_of(machine)
    words = (*words, f"trainer.default_local_dir={tmp_path}/run")
    data = root / "data.jsonl"
    first_content = data.read_bytes()
    num_hashed = -(-len(first_content) // 1000)
    numbers = {"first row": num_hashed + 1, "last row": num_hashed + NUM_ROWS}
    before = partial(change_at, tmp_path, change, numbers.get(str(moment), moment))
    code, output = run(num_ranks, *words, log=tmp_path / "log", before=before)
    assert (tmp_path / "changed").exists() and "Traceback" not in output, output
    if code == EXIT_DONE:
        assert moment == "meet" and num_ranks == 1 and curve(tmp_path / "run")
    elif code == EXIT_USAGE:
        assert moment == "meet" and "  training data: " in output
    else:
        assert (
            code == EXIT_BAD_DATA and "'data.jsonl' changed while its rows were prepared" in output
        ), output
    data.write_bytes(first_content)
    assert fingerprint(root, words) == fingerprint(root, words, "data.cache_dir=other"), (
        "nothing else was kept"
    )
