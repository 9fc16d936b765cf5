"""Case 4, power loss: a start loses nothing whatever it left; and what would lose something is
caught.
"""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import sweeps
import toy_runs
from checkpoint_fakes import expected_files, is_whole
from crash_oracle import Explorer, Promise, Report, visible
from crash_states import (
    ACKNOWLEDGED,
    MOVED_BACK,
    Disk,
    TimedOperation,
    Tree,
    coalesced,
    merge,
    read_tree,
    recording,
)
from fake_run import FakeRun
from ranks import run_ranks
from sweeps import short_or_full, some
from toy import write_model_config

from trainer.checkpoint import fsio, layout
from trainer.checkpoint.fsio import Operation
from trainer.runtime.distributed import World

NUM_STATES = short_or_full(2_000, full=10_000)
"""At least so many different states are judged, and none is bad."""
MAX_COMBINATIONS = short_or_full(2**7, full=2**14)
"""Of what a cut may leave; of more a sample is drawn, with `pytest --full` there are none with
more.
"""
NUM_KINDS_RESTARTED = 12
"""From one state of so many kinds that a start can tell apart it restarts: of every kind with
`pytest --full`.
"""
NUM_RESTARTED = short_or_full(1, full=3)
"""From so many others it also saves again."""
SEED = 0


@dataclass(frozen=True)
class Recorded:
    """A log with the directory it was recorded in, what that held before, and what had been
    acknowledged there.
    """

    root: Path
    start: Tree
    log: list[Operation]
    promise: Promise

    def explore(self, explorer: Explorer, *, first: int = 0) -> Report:
        return explorer.explore(self.log, self.start, self.root, self.promise, first=first)


def record(
    run: FakeRun, prepare: Callable[[FakeRun], None], act: Callable[[FakeRun], None]
) -> Recorded:
    """`prepare` is on the disk for good when `act` begins."""
    run.run_dir.mkdir(parents=True)
    with recording() as before:
        prepare(run)
    promise = Promise()
    for operation in merge(before):
        promise = promise.after(operation)
    start = read_tree(run.run_dir)
    with recording() as log:
        act(run)
    return Recorded(run.run_dir, start, merge(log), promise)


def save(*steps: int) -> Callable[[FakeRun], None]:
    def act(run: FakeRun) -> None:
        for step in steps:
            run.step = step - 1
            run.save()

    return act


def move_back(run: FakeRun, step: int) -> None:
    """What a person does with an editor and `sync`; before the sync either step may be found."""
    fsio.phase(f"{ACKNOWLEDGED}.{step}")
    fsio.atomic_write(run.run_dir / layout.POINTER, str(step).encode())
    fsio.phase(f"{MOVED_BACK}.{step}")
    run.step = step


def saved_and_moved_back(run: FakeRun) -> None:
    save(10, 20, 30)(run)
    move_back(run, 20)


def continued_and_moved_back(run: FakeRun) -> None:
    save(25, 30, 35)(run)  # 30 again: the abandoned one is set aside
    move_back(run, 30)


def damage_newest(run: FakeRun) -> None:
    save(10, 20)(run)
    (run.run_dir / layout.step_dir_name(20) / layout.DATA).unlink()
    move_back(run, 10)
    (run.run_dir / layout.POINTER).write_bytes(b"20")


def restart_and_save(run: FakeRun) -> None:
    run.restart()
    save(20)(run)


ONE, TWO, THREE = ({"keep": number} for number in (1, 2, 3))
SCENARIOS: dict[
    str, tuple[dict[str, int], Callable[[FakeRun], None], Callable[[FakeRun], None]]
] = {
    "first saves, one kept": (ONE, save(), save(10, 20, 30)),
    "first saves, two kept": (TWO, save(), save(10, 20, 30)),
    "fewer kept than before": (ONE, save(10, 20, 30), save(40)),
    "pointer moved back, continued, moved back": (
        THREE,
        saved_and_moved_back,
        continued_and_moved_back,
    ),
    "newest damaged, saved anew": (TWO, damage_newest, restart_and_save),
}


def test_no_power_loss_loses_a_checkpoint(memory_dir, capsys):
    explorer = Explorer(
        memory_dir / "explorer", is_whole=is_whole, max_combinations=MAX_COMBINATIONS, seed=SEED
    )
    for name, (kept, prepare, act) in SCENARIOS.items():
        report = record(FakeRun(memory_dir / name, **kept), prepare, act).explore(explorer)
        require_good(report)
        assert not sweeps.is_full() or report.num_sampled_cuts == 0, (
            "every combination is looked at"
        )
        again = restart_from_some(explorer, report, kept)
        print(f"{name}: {report}; power lost again in the restart or the next save: {again}")
    num_kinds = len({visible(state) for state in explorer.outcomes})
    with capsys.disabled():
        print(
            f"\n{len(explorer.outcomes)} crash states, {num_kinds} in what a start looks at: 0 bad"
        )
    assert len(explorer.outcomes) >= NUM_STATES


def require_good(report: Report) -> None:
    if report.faults:
        pytest.fail(f"seed {SEED}: {report}\n{report.faults[0]}", pytrace=False)
    assert report.num_torn == 0, f"seed {SEED}: {report}"


def restart_from_some(explorer: Explorer, report: Report, kept: dict[str, int]) -> Report:
    """Restart from some of the states: it leaves nothing behind, and the power may fail in it
    and in a next save.
    """
    one_of_each = some(
        {visible(state): state for state in report.reached}.values(), NUM_KINDS_RESTARTED
    )
    others = random.Random(SEED).sample(list(report.reached), NUM_RESTARTED)
    total = Report()
    for state in dict.fromkeys([*one_of_each, *others]):
        promise, root = report.reached[state], explorer.stage.show(state)
        run = FakeRun(root, **kept)
        with recording() as log:
            run.restart()
            left = [
                name
                for name in fsio.list_dir(root)
                if name.startswith((".staging_", ".trash_", ".latest"))
            ]
            assert left == [], f"a restart leaves {left}"
            if state in others:
                run.save()
        explorer.stage.forget()
        again = explorer.explore(merge(log), state, root, promise)
        require_good(again)
        total.num_cuts += again.num_cuts
        total.reached |= again.reached
    return total


def save_recorded(
    world: World, run_dir: Path, source: Any, recipe: toy_runs.Recipe
) -> list[TimedOperation]:
    with recording() as log:
        toy_runs.run(world, run_dir, source, recipe)
    return log


def test_no_power_loss_in_the_save_of_two_ranks_loses_a_checkpoint(memory_dir):
    """Two saves with rotation by the real manager; of the many combinations of so many files a
    sample.
    """
    root = memory_dir / "run"
    root.mkdir()
    source = write_model_config(memory_dir / "model")
    recipe = toy_runs.Recipe(total_steps=2, save_freq=1, keep=1)
    log = coalesced(merge(*run_ranks(save_recorded, 2, root, source, recipe)))
    explorer = Explorer(
        memory_dir / "explorer", is_whole=whole_in(log, root), max_combinations=2**6, seed=SEED
    )
    report = explorer.explore(log, (), root, Promise())
    print(f"two ranks: {report}")
    require_good(report)
    assert {promise.acknowledged for promise in report.reached.values()} == {None, 1, 2}
    assert len(explorer.outcomes) > 1000 and report.num_sampled_cuts > 50


def whole_in(log: list[Operation], root: Path) -> Callable[[Path], bool]:
    """Whether a directory holds what the log had written when it got its final name."""
    disk, written = Disk((), root), {}
    for operation in log:
        disk.apply(operation)
        if operation.kind == "rename" and operation.target is not None:
            written[operation.target.name] = disk.now(operation.target)
    return lambda path: (
        tuple(e for e in read_tree(path) if e[0] != layout.PUBLISHED) == written[path.name]
    )


SYNCS = {
    "fsync global_step_N/model_world_size_2_rank_0.pt": "lost",
    "fsync global_step_N/model_world_size_2_rank_1.pt": "lost",
    "fsync global_step_N/optim_world_size_2_rank_0.pt": "lost",
    "fsync global_step_N/data.pt": "lost",
    "fsync global_step_N/fsdp_config.json": "lost",
    "fsync global_step_N/huggingface/config.json": "lost",
    "fsync global_step_N/manifest.json": "lost",
    "fsync_dir global_step_N/huggingface": "lost",
    "fsync_dir global_step_N": "lost",
    "fsync_dir . after rename global_step_N": "lost",
    "fsync latest_checkpointed_iteration.txt": "lost",
    "fsync_dir . after rename latest_checkpointed_iteration.txt": "lost",
    # or the pointer, moved back, is taken for one not yet moved
    "fsync_dir global_step_N after .published": "lost",
    # half-deleted under its own name: never chosen, never deleted either
    "fsync_dir . after rename .trash": "torn",
    "fsync global_step_N/.published": "harmless",  # it has no bytes
    "fsync_dir . after mkdir": "harmless",  # the sync after the final rename covers it
    "fsync_dir global_step_N after mkdir": "harmless",  # as does the sync of the whole tree
}
"""Every sync of a save and a rotation, and what a power loss does if this one alone is left out."""


def test_every_sync_left_out_shows_unless_it_is_known_to_be_spare(memory_dir):
    def act(run: FakeRun) -> None:
        save(22, 25)(run)  # with 25 the oldest goes
        move_back(run, 20)

    whole = record(FakeRun(memory_dir / "run", keep=3), saved_and_moved_back, act)
    explorer = Explorer(
        memory_dir / "explorer",
        is_whole=is_whole,
        max_combinations=MAX_COMBINATIONS // 2,
        seed=SEED,
    )
    found: dict[str, str] = {}
    for index in range(len(whole.log)):
        if whole.log[index].kind in ("fsync", "fsync_dir"):
            report = replace(whole, log=whole.log[:index] + whole.log[index + 1 :]).explore(
                explorer, first=index
            )
            verdict = "lost" if report.faults else "torn" if report.num_torn else "harmless"
            role = role_of(whole, index)
            found[role] = max(
                found.get(role, "harmless"), verdict, key=("harmless", "torn", "lost").index
            )
    assert found == SYNCS


def role_of(recorded: Recorded, index: int) -> str:
    """A sync without the numbers of its save, and for a directory what has just happened in it."""
    operation = recorded.log[index]
    name = plain(operation.path.relative_to(recorded.root))
    if operation.kind == "fsync":
        return f"fsync {name}"
    before = next(
        o for o in reversed(recorded.log[:index]) if o.kind in ("mkdir", "create", "rename")
    )
    changed = plain(before.path.name if before.target is None else before.target.name)
    reasons = {"mkdir": " after mkdir", "rename": f" after rename {changed}"}
    return f"fsync_dir {name}" + (
        f" after {changed}" if changed == layout.PUBLISHED else reasons.get(before.kind, "")
    )


def plain(path: Path | str) -> str:
    text = re.sub(r"^\.(trash)_global.*", r".\1", str(path))
    text = re.sub(r"(\.staging_)?global_step_\d+(\.[0-9a-f]{8})?", "global_step_N", text)
    return re.sub(r"^\.(latest.*)\.[0-9a-f]{8}\.tmp$", r"\1", text)


def verl_save(run_dir: Path, step: int, *, old: int, removes_first: bool) -> None:
    """verl's order: into the final directory, and the old one goes before the pointer moves, or
    before all else.
    """
    victim, final = run_dir / layout.step_dir_name(old), run_dir / layout.step_dir_name(step)
    if removes_first:
        fsio.remove_tree(victim)
    fsio.make_dir(final)
    for name, data in expected_files(final.name).items():
        if name.startswith(layout.HUGGINGFACE):
            fsio.make_dir(final / layout.HUGGINGFACE)
        fsio.write_file(final / name, data, root=final)
    fsio.fsync_tree(final)
    if not removes_first:
        fsio.remove_tree(victim)
    fsio.atomic_write(run_dir / layout.POINTER, str(step).encode())
    fsio.phase(f"{ACKNOWLEDGED}.{step}")


@pytest.mark.parametrize(("removes_first", "syncs"), [(True, True), (True, False), (False, False)])
def test_the_order_of_verl_is_caught(memory_dir, removes_first, syncs):
    def act(run: FakeRun) -> None:
        verl_save(run.run_dir, 20, old=10, removes_first=removes_first)

    recorded = record(FakeRun(memory_dir / "run", keep=1), save(10), act)
    log = [
        operation
        for operation in recorded.log
        if syncs or operation.kind not in ("fsync", "fsync_dir")
    ]
    explorer = Explorer(
        memory_dir / "explorer", is_whole=is_whole, max_combinations=MAX_COMBINATIONS, seed=SEED
    )
    report = replace(recorded, log=log).explore(explorer)
    assert "refuses to start" in {fault.reason for fault in report.faults}, f"seed {SEED}: {report}"


def states_after(log: list[Operation], root: Path) -> set[Tree]:
    disk = Disk((), root)
    for operation in log:
        disk.apply(operation)
    states = list(disk.states())
    assert len(states) <= disk.num_combinations()
    return set(states)


def test_the_model_forgets_exactly_what_is_not_synced():
    root = Path("/run")
    a, d, f = root / "a", root / "d", root / "d" / "f"
    log = [Operation("mkdir", d), Operation("create", f), Operation("write", f, data=b"xy")]
    contents: list[Tree] = [(), *((("f", data),) for data in (b"", b"x", b"\0\0", b"xy"))]
    assert states_after(log, root) == {(), *((("d", content),) for content in contents)}
    log += [Operation("fsync", f), Operation("fsync_dir", root)]
    assert states_after(log, root) == {(("d", ()),), (("d", (("f", b"xy"),)),)}, (
        "a file's sync is not its entry's"
    )
    log += [Operation("fsync_dir", d), Operation("create", a), Operation("rename", d, root / "e")]
    whole: Tree = (("f", b"xy"),)
    assert states_after(log, root) == {
        (("d", whole),),
        (("a", b""), ("d", whole)),
        (("e", whole),),
        (("a", b""), ("e", whole)),
    }
    log += [
        Operation("write", a, data=b"1"),
        Operation("rename", a, root / "e"),
        Operation("fsync_dir", root),
    ]
    assert states_after(log, root) == {(("e", b""),), (("e", b"\0"),), (("e", b"1"),)}, (
        "a synced name of unsynced bytes"
    )
    log += [Operation("unlink", root / "e")]
    assert () in states_after(log, root) and len(states_after(log, root)) == 4


def test_logs_of_several_processes_are_merged_by_time(tmp_path):
    with recording() as log:
        for name in "abcd":
            fsio.phase(name)
        chunk = bytearray(b"old")
        with fsio.HashingFile(tmp_path / "file", root=tmp_path) as file:
            file.write(chunk)
            chunk[:] = b"new"
    merged = merge(log[1::2], log[::2])
    assert [operation.path.name for operation in merged[:4]] == ["a", "b", "c", "d"]
    assert next(operation.data for operation in merged if operation.kind == "write") == b"old", (
        "copied when announced"
    )
