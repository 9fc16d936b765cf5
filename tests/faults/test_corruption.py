"""Cases 16 to 18: any damage to any file of a checkpoint is found and named, and the run continues
from the previous checkpoint.
"""

import os
import random
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest
from checkpoint_fakes import Run, save
from ranks import run_ranks
from sweeps import short_or_full
from toy_runs import Recipe, odd_model, run

from trainer.checkpoint import choice, finished, layout
from trainer.checkpoint.manifest import MANIFEST, verify_files

OLD = 2
NEW = 4
NUM_FLIPS = short_or_full(30, full=300)
"""Number of damaged places in each file."""
NUM_OTHERS = short_or_full(2, full=6)
"""Number of damages of each other kind in each file."""
BLOCK_BYTES = 4 << 10


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """A run directory in memory with two checkpoints of two ranks. Tests do not change it."""
    place = tmp_path_factory.mktemp("real")
    if os.access("/dev/shm", os.W_OK):
        place = Path("/dev/shm", f"{place.parent.name}_{place.name}_{os.getpid()}")
        place.mkdir()
    try:
        source = odd_model(place / "model")
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            (place / "model" / name).write_text(f'{{"stands for": "{name}"}}')
        run_ranks(run, 2, place / "run", source, Recipe(total_steps=NEW, save_freq=OLD))
        yield place / "run"
    finally:
        shutil.rmtree(place)


def files_of(run_dir):
    """Return the name of every file with content in the newest checkpoint."""
    root = run_dir / layout.step_dir_name(NEW)
    names = [str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()]
    return sorted(name for name in names if name not in (layout.PUBLISHED, finished.FILE_NAME))


def start_of(run_dir):
    """Return the step from which a start continues, and its messages about other checkpoints."""
    selection = choice.select(run_dir)
    said = [note for note in selection.notes if "skipped" in note]
    for info in selection.candidates:
        problems = verify_files(info.path, info.manifest)
        said += [f"{info.path.name}: {problem}" for problem in problems]
        if all(layout.is_export(problem) for problem in problems):
            return info.step, "\n".join(said)
    return None, "\n".join(said)


def require_found(run_dir, what, *names):
    """The damage to one of these files is named. The run continues from the older checkpoint,
    unless only the export is damaged.
    """
    step, said = start_of(run_dir)
    is_export_only = all(name.startswith(layout.HUGGINGFACE) for name in names)
    assert step == (NEW if is_export_only else OLD), f"{what}: continued from {step}; {said}"
    assert any(Path(name).name in said for name in names), f"{what}: {said}"
    assert layout.step_dir_name(NEW) in said


def flip(data, chance):
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def truncate(data, chance):
    del data[chance.randrange(len(data.rstrip())) :]  # the end of line after JSON says nothing


def zero(data, chance):
    """Zero a block of the disk, or a smaller file, that was not already zero."""
    blocks = [slice(start, start + BLOCK_BYTES) for start in range(0, len(data), BLOCK_BYTES)]
    block = chance.choice([block for block in blocks if any(data[block])])
    data[block] = bytes(len(data[block]))


def append(data, chance):
    data += chance.randbytes(chance.randrange(1, 100)) + b"."


def shift(data, chance):
    """Remove one byte and append one."""
    del data[chance.randrange(len(data) // 2)]
    data += b"."


DAMAGES = {flip: NUM_FLIPS} | dict.fromkeys((truncate, zero, append, shift), NUM_OTHERS)


@contextmanager
def damaged(path, damage, chance):
    """Change the file in place, and restore it at the end."""
    original = path.read_bytes()
    changed = bytearray(original)
    damage(changed, chance)
    assert changed != original
    with open(path, "r+b", buffering=0) as file:
        try:
            file.truncate(len(changed))
            file.write(changed)
            yield
        finally:
            file.seek(0)
            file.write(original)
            file.truncate(len(original))


def test_every_change_of_bytes_in_every_file_is_found(real):
    for name in files_of(real):
        for damage, count in DAMAGES.items():
            for seed in range(count):
                chance = random.Random(f"{name} {seed}")
                with damaged(real / layout.step_dir_name(NEW) / name, damage, chance):
                    require_found(real, f"{damage.__name__}, {name}, seed {seed}", name)
    assert start_of(real) == (NEW, ""), "everything is restored"


@contextmanager
def moved(path, to):
    os.rename(path, to)
    try:
        yield
    finally:
        os.rename(to, path)


def test_a_missing_foreign_or_linked_file_is_found(real):
    old = real / layout.step_dir_name(OLD)
    new = real / layout.step_dir_name(NEW)
    num_of_other_step = 0
    for name in files_of(real):
        path = new / name
        with moved(path, real / "aside"):
            require_found(real, f"{name} is missing", name)
            path.mkdir()
            require_found(real, f"{name} is an empty directory", name)
            path.rmdir()
            path.symlink_to(real / "aside")
            require_found(real, f"{name} is a link to itself, elsewhere", name)
            path.unlink()
            shutil.copyfile(old / name, path)
            if path.read_bytes() != (real / "aside").read_bytes():
                require_found(real, f"{name} of the other step", name)
                num_of_other_step += 1
            path.unlink()
    assert num_of_other_step >= 8, "shards, data, manifest and weights differ between steps"
    with moved(new / layout.HUGGINGFACE, real / "aside"):
        require_found(real, "no export", layout.HUGGINGFACE)
    assert start_of(real) == (NEW, "")


def test_files_that_do_not_belong_there_change_nothing(real):
    root = real / layout.step_dir_name(NEW)
    others = ("model_world_size_4_rank_3.pt", "huggingface/model-00001-of-00002.safetensors")
    for name in (*others, ".nfs01", "core"):
        shutil.copyfile(root / layout.DATA, root / name)
        assert start_of(real) == (NEW, "")
        (root / name).unlink()


STEPS = (10, 20, 30)
MARKS = {
    "as written": lambda run_dir: None,
    "of the newest missing": lambda run_dir: mark_of(run_dir, 30).unlink(),
    "all missing": lambda run_dir: [mark_of(run_dir, step).unlink() for step in STEPS],
    "with bytes": lambda run_dir: [mark_of(run_dir, step).write_bytes(b"x\0") for step in STEPS],
}
FAULTS_OF_OTHERS = {
    "no other fault": lambda newest: None,
    "newest has a flipped bit": lambda newest: (newest / layout.DATA).write_bytes(b"data 31"),
    "newest is cut short": lambda newest: os.truncate(newest / layout.DATA, 3),
    "newest has no manifest": lambda newest: (newest / MANIFEST).unlink(),
    "newest is deleted": shutil.rmtree,
}
POINTERS = (
    *(None, b"", b"\n", b"garbage", b"-1", b"5\n", b"9" * 5000, b"../x", b"/global_step_20"),
    *(b"global_step_20", b"20 10", b"020", b"20.0", "\u0662\u0660".encode(), b"\0\0"),
    *(b"\xff\xfe2\x000\x00", b"25", b"30", b"30\r\n"),
)
"""None: no file. Step 25 is not committed, and 30 is the newest."""


def mark_of(run_dir, step):
    return run_dir / layout.step_dir_name(step) / layout.PUBLISHED


@pytest.mark.parametrize("other", FAULTS_OF_OTHERS)
@pytest.mark.parametrize("marks", MARKS)
def test_a_damaged_pointer_or_mark_never_means_step_0(memory_dir, marks, other):
    for number, text in enumerate(POINTERS):
        run_dir = memory_dir / str(number)
        run_dir.mkdir()
        save(run_dir, *STEPS)
        (run_dir / "global_step_25").mkdir()
        MARKS[marks](run_dir)
        FAULTS_OF_OTHERS[other](run_dir / "global_step_30")
        (run_dir / layout.POINTER).unlink()
        if text is not None:
            (run_dir / layout.POINTER).write_bytes(text)
        # the newest whole one: no pointer names an older one
        expected = 30 if other == "no other fault" else 20
        trainer = Run(run_dir, keep=3)
        assert trainer.restart() == expected, f"pointer: {text!r}"
        assert layout.read_pointer(run_dir).step == expected and mark_of(run_dir, expected).exists()
        assert trainer.restart() == expected, f"pointer: {text!r}, after the repair"


@pytest.mark.parametrize("marks", MARKS)
def test_a_pointer_moved_back_falls_back_to_older_ones_only(memory_dir, marks):
    save(memory_dir, *STEPS)
    MARKS[marks](memory_dir)
    (memory_dir / layout.POINTER).write_bytes(b"20")
    if "missing" in marks:
        assert Run(memory_dir, keep=3).restart() == 30, "as if the pointer was not yet moved"
        return
    (memory_dir / "global_step_20" / layout.DATA).write_bytes(b"data 21")
    assert Run(memory_dir, keep=3).restart() == 10
