"""Cases 16 to 18: every damage to any file of a checkpoint is found and named, and the previous
one is continued.
"""

import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from checkpoint_fakes import save
from fake_run import FakeRun
from ranks import run_ranks
from sweeps import short_or_full
from toy import write_model_config
from toy_runs import Recipe, run

from trainer.checkpoint import choice, finished, layout
from trainer.checkpoint.manifest import MANIFEST, verify_files

OLD, NEW = 2, 4
NUM_FLIPS = short_or_full(60, full=300)
"""In each file."""
NUM_OTHERS = short_or_full(2, full=6)
"""Of each other kind of damage in each file."""


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run directory with two checkpoints as two ranks saved them, in memory; tests leave it
    as they found it.
    """
    shared = Path("/dev/shm")
    place = tmp_path_factory.mktemp("real")
    if os.access(shared, os.W_OK):
        shutil.rmtree(place)
        place = shared / f"{place.parent.name}_{place.name}_{os.getpid()}"
        place.mkdir()
    try:
        save_on_two_ranks(place)
        yield place / "run"
    finally:
        shutil.rmtree(place)


def save_on_two_ranks(place: Path) -> None:
    """The only place that knows how a real save is started: steps `OLD` and `NEW` into `place /
    "run"`.
    """
    source = write_model_config(place / "model", vocab_size=163, intermediate_size=97)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (place / "model" / name).write_text(f'{{"stands for": "{name}"}}')
    run_ranks(run, 2, place / "run", source, Recipe(total_steps=NEW, save_freq=OLD))


def files_of(run_dir: Path, step: int = NEW) -> list[str]:
    """Every file of a checkpoint that says something, by name."""
    root = run_dir / layout.step_dir_name(step)
    names = [str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()]
    return sorted(name for name in names if name not in (layout.PUBLISHED, finished.FILE_NAME))


@dataclass(frozen=True)
class Start:
    """The step continued from, and all that was said about others."""

    step: int | None
    said: str


def start_of(run_dir: Path, *touched: str) -> Start:
    """What a start does; of the newest checkpoint only the `touched` files are read, no other
    has changed.
    """
    selection = choice.select(run_dir)
    said = [note for note in selection.notes if "passed over" in note]
    for info in selection.candidates:
        assert info.manifest is not None
        files = tuple(
            r
            for r in info.manifest.files
            if info.step == NEW and (not touched or r.path.startswith(touched))
        )
        problems = verify_files(info.path, replace(info.manifest, files=files))
        said += [f"{info.path.name}: {problem}" for problem in problems]
        if all(layout.is_export(problem) for problem in problems):
            return Start(info.step, "\n".join(said))
    return Start(None, "\n".join(said))


def require_found(run_dir: Path, what: str, *names: str) -> None:
    """The damage to one of these files is named, and the older checkpoint continued unless only
    the export is hurt.
    """
    start = start_of(run_dir, *names)
    is_export_only = what.startswith(layout.HUGGINGFACE) or (
        bool(names) and all(layout.is_export(name) for name in names)
    )
    assert start.step == (NEW if is_export_only else OLD), (
        f"{what}: continued from {start.step}; {start.said}"
    )
    is_named = not names or any(Path(name).name in start.said for name in names)
    assert is_named and layout.step_dir_name(NEW) in start.said, f"{what}: {start.said}"


def test_the_real_checkpoint_is_whole_and_has_every_kind_of_file(real):
    names = files_of(real)
    ranks = [
        f"{kind}_world_size_2_rank_{rank}.pt"
        for kind in ("extra_state", "model", "optim")
        for rank in (0, 1)
    ]
    beside = [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    exported = [f"huggingface/{name}" for name in (*beside, "model.safetensors")]
    assert names == sorted([*ranks, *exported, layout.DATA, layout.FSDP_CONFIG, MANIFEST])
    for info in layout.checkpoints(real):
        assert (
            info.manifest is not None
            and info.published
            and verify_files(info.path, info.manifest) == []
        )
    assert start_of(real) == Start(NEW, "")


def flip(data: bytearray, chance: random.Random) -> None:
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def truncate(data: bytearray, chance: random.Random) -> None:
    del data[chance.randrange(1, len(data.rstrip())) :]  # the end of line after JSON says nothing


def zero_4_kib(data: bytearray, chance: random.Random) -> None:
    zero(data, chance, 4 << 10)


def zero_64_kib(data: bytearray, chance: random.Random) -> None:
    zero(data, chance, 64 << 10)


def zero(data: bytearray, chance: random.Random, size: int) -> None:
    """A block of the disk, or the whole of a smaller file, that was not zero before."""
    blocks = [start for start in range(0, len(data), size) if any(data[start : start + size])]
    start = chance.choice(blocks)
    data[start : start + size] = bytes(len(data[start : start + size]))


def empty(data: bytearray, chance: random.Random) -> None:
    data.clear()


def append(data: bytearray, chance: random.Random) -> None:
    data += chance.randbytes(chance.randrange(1, 100)) + b"."


def shift(data: bytearray, chance: random.Random) -> None:
    """Same size, one byte lost and one too many."""
    del data[chance.randrange(len(data) // 2)]
    data += b"."


OTHERS = (truncate, zero_4_kib, zero_64_kib, empty, append, shift)


@contextmanager
def damaged(
    path: Path, damage: Callable[[bytearray, random.Random], None], chance: random.Random
) -> Iterator[None]:
    """The file is changed in place and restored at the end."""
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


def test_every_change_of_bytes_in_every_file_is_found(real, capsys):
    num_found = 0
    for name in files_of(real):
        for damage, count in ((flip, NUM_FLIPS), *((other, NUM_OTHERS) for other in OTHERS)):
            for seed in range(count):
                chance = random.Random(f"{name} {seed}")
                with damaged(real / layout.step_dir_name(NEW) / name, damage, chance):
                    require_found(real, f"{damage.__name__}, {name}, seed {seed}", name)
                num_found += 1
    with capsys.disabled():
        print(f"\n{num_found} damaged files: all found")
    assert num_found >= 10 * (NUM_FLIPS + len(OTHERS) * NUM_OTHERS)
    assert start_of(real) == Start(NEW, ""), "everything is restored"


@contextmanager
def moved(path: Path, to: Path) -> Iterator[None]:
    os.rename(path, to)
    try:
        yield
    finally:
        os.rename(to, path)


def test_a_missing_file_is_found(real):
    root = real / layout.step_dir_name(NEW)
    for name in [*files_of(real), layout.HUGGINGFACE]:
        with moved(root / name, real / "aside"):
            require_found(real, f"{name} is missing", name)
            (root / name).mkdir()
            require_found(
                real,
                f"{name} is an empty directory",
                *([] if name == layout.HUGGINGFACE else [name]),
            )
            (root / name).rmdir()
    assert start_of(real) == Start(NEW, "")


def test_a_file_of_another_rank_or_step_is_found(real):
    old, new = real / layout.step_dir_name(OLD), real / layout.step_dir_name(NEW)
    num_found = 0
    for kind in (layout.model_file, layout.optim_file, layout.extra_file):
        first, second = kind(2, 0), kind(2, 1)
        with (
            moved(new / first, new / "aside"),
            moved(new / second, new / first),
            moved(new / "aside", new / second),
        ):
            require_found(real, f"{first} and {second} swapped", first, second)
    for name in files_of(real):
        with moved(new / name, real / "aside"):
            (new / name).symlink_to(real / "aside")
            require_found(real, f"{name} is a link to itself, elsewhere", name)
            (new / name).unlink()
            shutil.copyfile(old / name, new / name)
            if (new / name).read_bytes() != (real / "aside").read_bytes():
                require_found(real, f"{name} of the other step", name)
                num_found += 1
            (new / name).unlink()
    assert num_found >= 8, "shards, data, manifest and weights differ between steps"
    assert start_of(real) == Start(NEW, "")


def test_a_file_that_does_not_belong_there_changes_nothing(real):
    root = real / layout.step_dir_name(NEW)
    for name in (
        "model_world_size_4_rank_3.pt",
        "huggingface/model-00001-of-00002.safetensors",
        ".nfs01",
        "core",
    ):
        shutil.copyfile(root / layout.DATA, root / name)
        assert start_of(real) == Start(NEW, "")
        (root / name).unlink()


def lose_manifest(path: Path) -> None:
    """Of a checkpoint with all files of a real one, which the tiny ones here leave out."""
    for file in (layout.optim_file, layout.extra_file):
        for rank in range(2):
            (path / file(2, rank)).write_bytes(b"state")
    (path / MANIFEST).unlink()


STEPS = (10, 20, 30)
MARKS: dict[str, Callable[[Path], object]] = {
    "as written": lambda run_dir: None,
    "of the newest missing": lambda run_dir: mark_of(run_dir, 30).unlink(),
    "all missing": lambda run_dir: [mark_of(run_dir, step).unlink() for step in STEPS],
    "with bytes in them": lambda run_dir: [
        mark_of(run_dir, step).write_bytes(b"x\0") for step in STEPS
    ],
}
FAULTS_OF_OTHERS: dict[str, Callable[[Path], object]] = {
    "no other fault": lambda run_dir: None,
    "newest has a flipped bit": lambda run_dir: (
        run_dir / "global_step_30" / layout.DATA
    ).write_bytes(b"data 31"),
    "newest is cut short": lambda run_dir: os.truncate(run_dir / "global_step_30" / layout.DATA, 3),
    "newest has no manifest": lambda run_dir: lose_manifest(run_dir / "global_step_30"),
    "newest is deleted": lambda run_dir: shutil.rmtree(run_dir / "global_step_30"),
}
POINTERS: dict[str, bytes | None] = {
    "missing": None,
    "empty": b"",
    "a line feed": b"\n",
    "garbage": b"garbage",
    "negative": b"-1",
    "no such step": b"5\n",
    "huge": b"9" * 5000,
    "out of the directory": b"../x",
    "an absolute path": b"/global_step_20",
    "a name": b"global_step_20",
    "two numbers": b"20 10",
    "a leading zero": b"020",
    "a fraction": b"20.0",
    "other digits": "\u0662\u0660".encode(),
    "zero bytes": b"\0\0",
    "no text": b"\xff\xfe2\x000\x00",
    "uncommitted": b"25",
    "the newest": b"30",
    "the newest and a line feed": b"30\r\n",
}


def mark_of(run_dir: Path, step: int) -> Path:
    return run_dir / layout.step_dir_name(step) / layout.PUBLISHED


@pytest.mark.parametrize("other", FAULTS_OF_OTHERS)
@pytest.mark.parametrize("marks", MARKS)
def test_a_damaged_pointer_or_mark_never_means_step_0(memory_dir, marks, other):
    for number, (pointer, text) in enumerate(POINTERS.items()):
        run_dir = memory_dir / str(number)
        run_dir.mkdir()
        save(run_dir, *STEPS)
        (run_dir / "global_step_25").mkdir()  # of a trainer that was killed
        MARKS[marks](run_dir)
        FAULTS_OF_OTHERS[other](run_dir)
        if text is None:
            (run_dir / layout.POINTER).unlink()
        else:
            (run_dir / layout.POINTER).write_bytes(text)
        # the newest whole one: no pointer names an older one
        expected = 30 if other == "no other fault" else 20
        trainer = FakeRun(run_dir, keep=3)
        assert trainer.restart() == expected, f"pointer: {pointer}"
        assert layout.read_pointer(run_dir).step == expected and mark_of(run_dir, expected).exists()
        assert trainer.restart() == expected, f"pointer: {pointer}, after the repair"


@pytest.mark.parametrize("kind", ["a directory", "a link", "a link to nothing"])
def test_a_pointer_that_is_no_file(memory_dir, kind):
    save(memory_dir, *STEPS)
    pointer = memory_dir / layout.POINTER
    pointer.unlink()
    if kind == "a directory":
        pointer.mkdir()
    else:
        pointer.symlink_to(
            memory_dir / ("global_step_10/data.pt" if kind == "a link" else "nothing")
        )
    selection = choice.select(memory_dir)
    assert selection.chosen is not None and selection.chosen.step == 30
    assert selection.notes[0].startswith("WARNING")


@pytest.mark.parametrize("marks", MARKS)
def test_a_pointer_moved_back_falls_back_to_older_ones_only(memory_dir, marks):
    save(memory_dir, *STEPS)
    MARKS[marks](memory_dir)
    (memory_dir / layout.POINTER).write_bytes(b"20")
    if "missing" in marks:
        assert FakeRun(memory_dir, keep=3).restart() == 30, (
            "taken for one whose pointer was not yet moved"
        )
        return
    (memory_dir / "global_step_20" / layout.DATA).write_bytes(b"data 21")
    assert FakeRun(memory_dir, keep=3).restart() == 10
