"""Case 4, power loss: a start never loses anything, and each sync is needed for that."""

import random
import re
from dataclasses import dataclass, replace
from pathlib import Path

import toy_runs
from checkpoint_fakes import Run, is_whole
from crash_oracle import Explorer, Promise, visible
from crash_states import (
    ACKNOWLEDGED,
    MOVED_BACK,
    Disk,
    Tree,
    coalesced,
    merge,
    read_tree,
    recording,
)
from ranks import run_ranks
from sweeps import is_full, short_or_full, some
from toy import write_model_config

from trainer.checkpoint import fsio, layout
from trainer.checkpoint.fsio import Operation

NUM_STATES = short_or_full(2_000, full=10_000)
"""The minimum number of different states to judge."""
MAX_COMBINATIONS = short_or_full(2**7, full=2**14)
"""From a cut with more states, a sample is drawn; with `pytest --full`, all states are used."""
NUM_RESTARTED = short_or_full(12, full=10_000)
"""Number of restarts from states that a start can distinguish."""
NUM_SAVED_AGAIN = short_or_full(1, full=3)
"""Number of further restarts that are followed by a save."""
SEED = 0


@dataclass(frozen=True)
class Recorded:
    """A log, its directory, the directory's initial content, and the promises before it."""

    root: Path
    start: Tree
    log: list[Operation]
    promise: Promise

    def explore(self, explorer, *, first=0):
        return explorer.explore(self.log, self.start, self.root, self.promise, first=first)


def record(run, prepare, act):
    """Record `act`. The result of `prepare` is durable at its beginning."""
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


def save(*steps):
    def act(run):
        for step in steps:
            run.step = step - 1
            run.save()

    return act


def move_back(run, step):
    """Do what a user does with an editor and `sync`. Before the sync, either step may be found."""
    fsio.phase(f"{ACKNOWLEDGED}.{step}")
    fsio.atomic_write(run.run_dir / layout.POINTER, str(step).encode())
    fsio.phase(f"{MOVED_BACK}.{step}")
    run.step = step


def saved_and_moved_back(run):
    save(10, 20, 30)(run)
    move_back(run, 20)


def continued_and_moved_back(run):
    save(25, 30, 35)(run)  # 30 again: the abandoned one is set aside
    move_back(run, 30)


def damage_newest(run):
    save(10, 20)(run)
    (run.run_dir / layout.step_dir_name(20) / layout.DATA).unlink()
    move_back(run, 10)
    (run.run_dir / layout.POINTER).write_bytes(b"20")


def restart_and_save(run):
    run.restart()
    save(20)(run)


SCENARIOS = {
    "first saves, one kept": (1, save(), save(10, 20, 30)),
    "first saves, two kept": (2, save(), save(10, 20, 30)),
    "fewer kept than before": (1, save(10, 20, 30), save(40)),
    "moved back, continued, moved back": (3, saved_and_moved_back, continued_and_moved_back),
    "newest damaged, saved again": (2, damage_newest, restart_and_save),
}


def test_no_power_loss_loses_a_checkpoint(memory_dir):
    place = memory_dir / "explorer"
    explorer = Explorer(place, is_whole=is_whole, max_combinations=MAX_COMBINATIONS, seed=SEED)
    for name, (keep, prepare, act) in SCENARIOS.items():
        report = record(Run(memory_dir / name, keep), prepare, act).explore(explorer)
        report.require_good()
        assert not is_full() or report.num_sampled_cuts == 0, "every combination is judged"
        restart_from_some(explorer, report, keep)
    assert len(explorer.outcomes) >= NUM_STATES


def restart_from_some(explorer, report, keep):
    """Restart from some states. A restart leaves nothing behind, and the power may fail again in it
    and in a following save.
    """
    one_of_each = {visible(state): state for state in report.reached}.values()
    others = random.Random(SEED).sample(list(report.reached), NUM_SAVED_AGAIN)
    for state in dict.fromkeys([*some(one_of_each, NUM_RESTARTED), *others]):
        promise = report.reached[state]
        root = explorer.stage.show(state)
        run = Run(root, keep)
        with recording() as log:
            run.restart()
            assert layout.leftovers(root) == []
            if state in others:
                run.save()
        explorer.stage.forget()
        explorer.explore(merge(log), state, root, promise).require_good()


def save_recorded(world, run_dir, source, recipe):
    with recording() as log:
        toy_runs.run(world, run_dir, source, recipe)
    return log


def test_no_power_loss_in_the_save_of_two_ranks_loses_a_checkpoint(memory_dir):
    """Two saves with rotation by the real manager; a sample of the many combinations.

    A state that keeps everything is the result of a kill at this operation.
    """
    root = memory_dir / "run"
    root.mkdir()
    source = write_model_config(memory_dir / "model")
    recipe = toy_runs.Recipe(total_steps=2, save_freq=1, keep=1)
    log = coalesced(merge(*run_ranks(save_recorded, 2, root, source, recipe)))
    judge = whole_in(log, root)
    explorer = Explorer(memory_dir / "explorer", is_whole=judge, max_combinations=2**6, seed=SEED)
    report = explorer.explore(log, (), root, Promise())
    report.require_good()
    assert {promise.acknowledged for promise in report.reached.values()} == {None, 1, 2}
    assert len(explorer.outcomes) > 1000 and report.num_sampled_cuts > 50


def whole_in(log, root):
    """Judge a directory by the content that the log had written when the directory got its final
    name.
    """
    disk = Disk((), root)
    written = {}
    for operation in log:
        disk.apply(operation)
        if operation.kind == "rename" and operation.target is not None:
            written[operation.target.name] = disk.now(operation.target)

    def judge(path):
        entries = read_tree(path)
        return tuple(e for e in entries if e[0] != layout.PUBLISHED) == written[path.name]

    return judge


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
    # or the pointer, moved back, is mistaken for one not yet moved
    "fsync_dir global_step_N after .published": "lost",
    # half-deleted under its own name: never chosen, never deleted either
    "fsync_dir . after rename .trash": "torn",
    "fsync global_step_N/.published": "harmless",  # it has no bytes
    "fsync_dir . after mkdir": "harmless",  # the sync after the final rename covers it
    "fsync_dir global_step_N after mkdir": "harmless",  # as does the sync of the whole tree
}
"""Every sync of a save and a rotation, and the effect of a power loss if only this sync is missing.
"""


def test_every_sync_left_out_shows_unless_it_is_known_to_be_spare(memory_dir):
    def act(run):
        save(22, 25)(run)  # with 25 the oldest is deleted
        move_back(run, 20)

    whole = record(Run(memory_dir / "run", 3), saved_and_moved_back, act)
    place = memory_dir / "explorer"
    explorer = Explorer(place, is_whole=is_whole, max_combinations=MAX_COMBINATIONS // 2, seed=SEED)
    found = {}
    for index, operation in enumerate(whole.log):
        if operation.kind in ("fsync", "fsync_dir"):
            without = replace(whole, log=whole.log[:index] + whole.log[index + 1 :])
            report = without.explore(explorer, first=index)
            verdict = "lost" if report.faults else "torn" if report.num_torn else "harmless"
            verdicts = (verdict, found.get(role_of(whole, index), "harmless"))
            found[role_of(whole, index)] = max(verdicts, key=("harmless", "torn", "lost").index)
    assert found == SYNCS


def role_of(recorded, index):
    """Name a sync without the numbers of its save and, for a directory, with the preceding
    operation in it.
    """
    operation = recorded.log[index]
    name = plain(operation.path.relative_to(recorded.root))
    if operation.kind == "fsync":
        return f"fsync {name}"
    changes = ("mkdir", "create", "rename")
    before = next(o for o in reversed(recorded.log[:index]) if o.kind in changes)
    changed = plain((before.target or before.path).name)
    reasons = {"mkdir": " after mkdir", "rename": f" after rename {changed}"}
    reason = f" after {changed}" if changed == layout.PUBLISHED else reasons.get(before.kind, "")
    return f"fsync_dir {name}{reason}"


def plain(path):
    text = re.sub(r"^\.(trash)_global.*", r".\1", str(path))
    text = re.sub(r"(\.staging_)?global_step_\d+(\.[0-9a-f]{8})?", "global_step_N", text)
    return re.sub(r"^\.(latest.*)\.[0-9a-f]{8}\.tmp$", r"\1", text)
