"""Schedules of saves, rotations, rollbacks, restarts, takeovers and uploads, drawn by seeds.

`python tests/faults/schedules.py --schedules 1000000` writes benchmarks/results/schedules.json. In
each schedule one command is started again and again, on one to three ranks, until its run is
complete. The real functions run: the start (`decide_start`), `CheckpointManager`, `Saver` with its
`Agreement`, rotation, rollback, the run's lock, upload and restore. Ranks, threads, launcher and
uploader are greenlets (`simulation.py`). A seed draws the next process at each operation, and what
goes wrong: `EVENTS`, and `STORAGE_FAULTS` of the mirror.

Small files that name their save replace the shards of torch. `--replay SEED` runs one schedule
again and prints it.
"""

import errno
import fcntl
import gc
import logging
import multiprocessing
import os
import random
import secrets
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / room) for room in ("faults", "unit", "")]

import torch  # noqa: E402  found by the paths above
from campaign import parser_of, run_campaign  # noqa: E402
from checkpoint_fakes import files_of  # noqa: E402
from crash_oracle import build, remove  # noqa: E402
from crash_states import Disk, read_tree  # noqa: E402
from mirror_faults import URL, FaultyStorage, Killed  # noqa: E402
from simulation import DistError, Distributed, Hub, Process, Ranks  # noqa: E402

from trainer.checkpoint import (  # noqa: E402
    finished,
    fsio,
    layout,
    lock,
    manager,
    reading,
    retention,
    rollback,
    save,
    start,
)
from trainer.checkpoint.choice import NoUsableCheckpointError  # noqa: E402
from trainer.checkpoint.manifest import MANIFEST, TensorInfo, parse_manifest  # noqa: E402
from trainer.checkpoint.storage import Storage  # noqa: E402
from trainer.config import CheckpointConfig, ConfigError, TrainerConfig  # noqa: E402
from trainer.errors import CannotWriteError, ResumableError  # noqa: E402
from trainer.runtime import distributed  # noqa: E402
from trainer.runtime.distributed import World  # noqa: E402
from trainer.runtime.progress import History, Position  # noqa: E402
from trainer.tools.mirror import __main__ as mirror_process  # noqa: E402
from trainer.tools.mirror import restore, upload  # noqa: E402

STRIDE = 10
NUM_STRIDES = 4
TOTAL = STRIDE * NUM_STRIDES
"""Steps of the run, enough for a rollback."""
MAX_JOBS = 30
MAX_TICKS = 40_000
DIST_TIMEOUT_S = 600.0
EVENTS = {
    "rank killed": 4,
    "all killed": 3,
    "power lost": 3,
    "machine lost": 2,
    "operation refused": 3,
    "held up": 3,
    "time passes": 2,
    "lock lost": 2,
    "started twice": 2,
    "told to stop": 2,
}
"""Possible faults, with the weights for drawing them. A lock is lost while its holder is delayed.
"""
STORAGE_FAULTS = ("killed before", "killed after", "killed within", "refused", "cut", "late")
STORAGE_FAULT_CHANCE = 0.02
COLLECT_EVERY = 20
"""Schedules between two garbage collections: garbage holds open files."""
FINGERPRINTS = {"data": "rows"}
EXPECTED = (ResumableError, CannotWriteError, DistError, SystemExit)
"""Errors with which a run may end, and from which the same command continues."""


class Fault(BaseException):
    """A promise is broken. No `except` in the code under test catches this."""


class SimulatedWorld(World):
    @property
    def mesh_sizes(self):
        return {"fsdp": self.size}


class SmallSaver(save.Saver):
    """A saver whose files name their staging directory, step and rank."""

    def __post_init__(self):
        self._agreement = save.Agreement(self.world, self.timeout_s)
        self.device = torch.device("cpu")
        self._tensors = {"weight": TensorInfo((2,), "float32")}
        source = SimpleNamespace(whole=None, adapter=None)
        self._plan = SimpleNamespace(source=source, others=(), num_bytes=0)

    def size_bytes(self, state):
        return 0

    def _write_shards(self, staging, snapshot):
        size = self.world.size
        rank = self.world.rank
        step = snapshot.position.step
        names = [layout.model_file(size, rank), layout.optim_file(size, rank)]
        names += [layout.DATA] if self.world.is_main else []
        content = f"{staging.name} {step} {rank}".encode()
        return [fsio.write_file(staging / name, content, root=staging) for name in names]

    def _write_export(self, staging, snapshot, written):
        self._await_files(staging, written)
        if not self.world.is_main:
            return []
        path = staging / layout.HUGGINGFACE / "model.safetensors"
        return [fsio.write_file(path, staging.name.encode(), root=staging)]


def part(values):
    return SimpleNamespace(state_dict=lambda: values)


PARTS = {
    "model": part({"weight": torch.zeros(2)}),
    "optimizer": part({"state": {"weight": torch.zeros(2)}}),
    "data": part({}),
}


class MirrorStorage(FaultyStorage):
    """The storage of the mirror; its faults are drawn."""

    def __init__(self, schedule):
        super().__init__(faults={}, late_by=schedule.chance.randint(1, 25))
        self._schedule = schedule

    def _strike(self):
        schedule = self._schedule
        if self._is_still or schedule.hub.current is None:
            return ""
        schedule.hub.pause("storage")
        self.count += 1
        if schedule.chance.random() >= STORAGE_FAULT_CHANCE:
            return ""
        kind = schedule.chance.choice(STORAGE_FAULTS)
        schedule.met[f"storage: {kind}"] += 1
        if kind == "refused":
            raise TimeoutError("the storage does not answer")
        if kind == "killed before":
            schedule.hub.die()
        return kind

    def _change(self, paths, action, half):
        try:
            super()._change(paths, action, half)
        except Killed:
            self._is_dead = False
            self._schedule.hub.die()


class Job:
    """One start of the command: a launcher, its ranks, and the processes of the mirror."""

    def __init__(self, schedule, number):
        self.schedule = schedule
        self.number = number
        self.size = schedule.chance.randint(1, 3)
        self.is_stopping = self.is_ending = self.is_complete = False
        self.window = 0
        """Above 0 the main rank is past its look at the lock."""
        self.held = None
        self.processes = []
        self._started("launcher", self._launch)

    @property
    def is_over(self):
        return all(process.is_over for process in self.processes)

    def kill(self):
        for process in self.processes:
            process.kill()

    def _started(self, name, work):
        process = Process(f"{self.number} {name}", self.schedule.hub)
        process.group = Ranks([process], timeout_s=DIST_TIMEOUT_S)
        self.processes.append(process)
        self.schedule.hub.spawn(process, work)
        return process

    def _launch(self):
        schedule = self.schedule
        hub = self.schedule.hub
        uploads = None
        if schedule.config.checkpoint.mirror is not None:
            work = partial(restore.prepare, schedule.config, schedule.mirror)
            prepared = self._started("prepare", work)
            hub.wait("launcher", lambda: prepared.is_over)
            schedule.follow_disk()
            schedule.judge_error(prepared, self)
            if prepared.is_dead or prepared.error is not None:
                return
            uploads = self._started("uploads", self._follow)
        ranks = [
            self._started(f"rank {rank}", partial(run_rank, self, rank))
            for rank in range(self.size)
        ]
        group = Ranks(ranks, timeout_s=DIST_TIMEOUT_S)
        for rank, process in enumerate(ranks):
            process.rank = rank
            process.group = group

        def have_left():
            return all(process.is_over for process in ranks)

        hub.wait("launcher", lambda: any(r.is_dead or r.error for r in ranks) or have_left())
        if not have_left():
            wait_s = schedule.chance.choice((0.05, 2.0, 4000.0))
            hub.wait("launcher", have_left, timeout_s=wait_s)
        for process in ranks:
            process.kill()
            schedule.judge_error(process, self)
        self.is_ending = True
        if uploads is not None:
            hub.wait("launcher", lambda: uploads.is_over, timeout_s=4000.0)
            schedule.judge_error(uploads, self)
            uploads.kill()

    def _follow(self):
        schedule = self.schedule
        ending = SimpleNamespace(
            is_set=lambda: self.is_ending,
            wait=lambda seconds: schedule.hub.wait(
                "ending", lambda: self.is_ending, timeout_s=seconds
            ),
        )
        mirror_process.follow(schedule.config, schedule.mirror, ending)


def run_rank(job, rank):
    """Do what a rank of a job does around its steps, as `trainer.train` does."""
    schedule = job.schedule
    config = schedule.config
    world = SimulatedWorld(
        torch.device("cpu"),
        None,
        rank=rank,
        size=job.size,
        num_shards=job.size,
    )
    selection = start.choose(config, world)
    begun = start.decide_start(config, FINGERPRINTS, world, selection=selection, total_steps=TOTAL)
    if world.is_main:
        if not begun.is_complete:
            schedule.owner = job
        schedule.judge(begun.checkpoint)
    if begun.is_complete:
        job.is_complete = True
        return
    with ExitStack() as ending:
        if begun.lock is not None:
            ending.callback(begun.lock.release)
        nothing = None
        saver = SmallSaver(
            schedule.run_dir,
            model=nothing,
            world=world,
            config=config.checkpoint,
            source=nothing,
            keep=schedule.keep,
            fingerprints=FINGERPRINTS,
            lock=begun.lock,
        )
        checkpoints = manager.CheckpointManager(
            saver, state=PARTS, tell=lambda step, *_: None, save_every_s=schedule.save_every_s
        )
        ending.callback(checkpoints.close)
        is_finished = train(job, world, checkpoints, begun)
        if world.is_main and is_finished:
            schedule.hub.pause("finished")
            path = schedule.run_dir / layout.step_dir_name(TOTAL)
            finished.write(path, finished.Finished(ended_early=False, message="done"))


def train(job, world, checkpoints, begun):
    """Return False for a run that was stopped early."""
    schedule = job.schedule
    chance = schedule.chance
    step = begun.position.step
    if begun.checkpoint is not None:
        checkpoints.load(begun.checkpoint)
        checkpoints.settle(step, History())
    while step < TOTAL:
        step += STRIDE
        own = (
            step - chance.randint(0, STRIDE) if chance.random() < 0.08 else None,
            checkpoints.is_save_due(),
            job.is_stopping,
        )
        # the main rank's values on every rank
        onset, is_due, is_stopping = start.on_main(lambda: own, schedule.run_dir, world)  # noqa: B023
        if onset is not None:
            batches = SimpleNamespace(step=step, last_step=TOTAL, follows=lambda earlier: True)
            found = checkpoints.decide_rollback(
                batches, onset=onset, history=History(), reason="a spike"
            )
            if found is not None:
                step = found[0].step
                checkpoints.load(found[0])
                continue
        is_ending = is_stopping or step == TOTAL
        if is_ending or is_due or step % schedule.save_freq == 0:
            checkpoints.save(
                Position(step, 0, step),
                loss=1.0,
                grad_norm=1.0,
                history=History(best_step=schedule.best_step),
                is_required=is_ending,
            )
        if is_stopping:
            return step == TOTAL
    return True


class Schedule:
    """Everything that one seed draws. `run` raises `Fault`."""

    def __init__(self, seed, work, *, is_traced=False):
        self.seed = seed
        self.chance = random.Random(seed)
        self.run_dir = work / "run"
        self.met = Counter()
        self.hub = Hub(self.chance, self._on_tick)
        self.hub.on_death = self._unlock
        self.hub.is_traced = is_traced
        has_mirror = self.chance.random() < 0.5
        self.config = TrainerConfig(
            project_name="toy",
            experiment_name="toy",
            default_local_dir=str(self.run_dir),
            checkpoint=CheckpointConfig(
                mirror=URL if has_mirror else None, async_save=self.chance.random() < 0.5
            ),
        )
        self.keep = self.chance.choice((1, 2, None))
        self.save_freq = STRIDE * self.chance.randint(1, 2)
        self.save_every_s = self.chance.choice((1.0, 1e9))
        self.best_step = self.chance.choice((None, STRIDE, 2 * STRIDE))
        self.storage = MirrorStorage(self)
        self.mirror = Storage(URL, self.storage)
        self.events = self._drawn_events()
        self.jobs = []
        self.disk = None
        self._locks = {}
        # the promise: from here a run continues or from later, and from nothing undone
        self.promised = None
        self.undone = set()
        self.up = None
        self.up_undone = set()
        self.owner = None
        self.is_refused = False
        self.is_power_lost_at_end = False
        self.saved = {}

    def _drawn_events(self):
        count = self.chance.choice((1, 1, 2, 2, 3, 4))
        kinds = self.chance.choices(list(EVENTS), weights=list(EVENTS.values()), k=count)
        return sorted((self.chance.randint(1, 450), kind) for kind in kinds)

    def run(self):
        self.run_dir.mkdir(parents=True)
        self.follow_disk()
        with patched(self), closing(self.hub), closing_locks():
            while not self.is_refused and not any(job.is_complete for job in self.jobs):
                if len(self.jobs) > MAX_JOBS:
                    raise Fault(f"not complete after {MAX_JOBS} starts")
                self.begin_job()
                self._run_until(lambda: all(job.is_over for job in self.jobs))
            if not self.is_refused:
                self._judge_end()

    def begin_job(self):
        self.jobs.append(Job(self, len(self.jobs)))

    def _run_until(self, is_over):
        while not is_over():
            if not self.hub.step():
                waiting = [
                    f"{p.name}: {p.threads[-1].place}"
                    for j in self.jobs
                    for p in j.processes
                    if not p.is_over
                ]
                raise Fault(f"all wait for each other: {waiting}")
            if self.hub.ticks > MAX_TICKS:
                raise Fault("does not end")

    # What goes wrong.

    def _on_tick(self, thread):
        if self.events and self.hub.ticks >= self.events[0][0]:
            kind = self.events[0][1]
            if self._happens(kind, thread):
                self.met[kind] += 1
                self.events.pop(0)
                if self.hub.is_traced:
                    print(f"{self.hub.ticks:5} *** {kind}")

    def _happens(self, kind, thread):
        """Return False if this event is impossible now."""
        alive = [job for job in self.jobs if not job.is_over]
        job = self.chance.choice(alive)
        ranks = [p for p in job.processes if "rank" in p.name and not p.is_over]
        if kind == "rank killed" and ranks:
            self.chance.choice(ranks).kill()
        elif kind == "all killed":
            job.kill()
        elif kind == "power lost" and self.disk is not None:
            self._lose_power()
        elif kind == "machine lost" and self.config.checkpoint.mirror is not None:
            self._lose_machine()
        elif kind == "operation refused" and thread.place.startswith("file "):
            number = self.chance.choice((errno.ENOSPC, errno.EIO, errno.EROFS))
            thread.failure = OSError(number, os.strerror(number))
        elif kind == "held up" and ranks:
            until = self.hub.ticks + self.chance.randint(20, 400)
            self.chance.choice(ranks).suspended_until = lambda: self.hub.ticks >= until
        elif kind == "time passes":
            self.hub.now += self.chance.choice((5.0, 100.0, 2000.0))
        elif kind == "lock lost" and self.owner is job and ranks and not job.window:
            self._steal(job, ranks[0])
        elif kind == "started twice" and ranks:
            self.begin_job()
        elif kind == "told to stop" and ranks:
            job.is_stopping = True
        else:
            return kind == "machine lost" and self.config.checkpoint.mirror is None
        return True

    def _lose_power(self):
        self.is_power_lost_at_end = any(job.is_complete for job in self.jobs)
        for job in self.jobs:
            job.kill()
        [left] = self.disk.sample(1, self.chance)
        known = dict(left)
        for name in fsio.list_dir(self.run_dir):
            is_unknown = name not in dict(self.disk.now(self.run_dir))
            if not is_unknown or self.chance.random() < 0.5:
                remove(self.run_dir / name)
        for name, tree in known.items():
            remove(self.run_dir / name)
            build(self.run_dir / name, tree)
        self.follow_disk()

    def _lose_machine(self):
        for job in self.jobs:
            job.kill()
            job.is_complete = False
        remove(self.run_dir)
        self.run_dir.mkdir()
        self.disk = None
        self.promised, self.undone = self.up, set(self.up_undone)

    def _steal(self, job, main_rank):
        """Let the lock server forget its holder, and let another run take over."""
        self._unlock(main_rank)
        self.begin_job()
        thief = self.jobs[-1]
        main_rank.suspended_until = lambda: self.owner is thief or thief.is_over

    def _unlock(self, process):
        """Simulate what the kernel does when a process ends."""
        for descriptor, inode in self._locks.pop(process, []):
            with suppress(OSError):
                if os.fstat(descriptor).st_ino == inode:
                    fcntl.flock(descriptor, fcntl.LOCK_UN)

    def note_lock(self, descriptor):
        if (thread := self.hub.current) is not None:
            held = self._locks.setdefault(thread.process, [])
            held.append((descriptor, os.fstat(descriptor).st_ino))

    # What is on the disk.

    def follow_disk(self):
        """Treat the content of the disk as durable, and follow every operation from here on."""
        self.disk = Disk(read_tree(self.run_dir), self.run_dir)

    def observe(self, operation):
        thread = self.hub.current
        if thread is None:
            return
        place = "phase" if operation.kind == "phase" else f"file {operation.kind}"
        self.hub.pause(f"{place} {operation.path.name}")
        if "prepare" in thread.process.name:
            self.disk = None  # it takes files from elsewhere
        elif self.disk is not None and operation.path.is_relative_to(self.run_dir):
            with suppress(KeyError, ValueError):  # of a file that is not followed
                self.disk.apply(operation)

    # What is promised.

    @contextmanager
    def in_window(self):
        """Mark the time after the main rank has checked that it holds the lock."""
        job = self._current_job()
        if job is None:
            yield None
            return
        job.window += 1
        yield job
        job.window -= 1

    def _current_job(self):
        thread = self.hub.current
        if thread is None:
            return None
        return next(job for job in self.jobs if thread.process in job.processes)

    def commit(self, staging, step, *, nonce):
        with self.in_window() as job:
            if job is None:
                return real_commit(staging, step, nonce=nonce)
            if "rank" in self.hub.current.process.name:
                self.saved[nonce] = self._judge_save(staging, step, job)
            final = real_commit(staging, step, nonce=nonce)
        self.promised = step
        return final

    def _judge_save(self, staging, step, job):
        if job is not self.owner:
            raise Fault(f"job {job.number} commits, the directory is another's")
        contents = files_of(staging)
        size = parse_manifest(contents[MANIFEST]).world_size
        for rank in range(size):
            expected = f"{staging.name} {step} {rank}".encode()
            for name in (layout.model_file(size, rank), layout.optim_file(size, rank)):
                if contents.get(name) != expected:
                    raise Fault(f"{name} of step {step} is {contents.get(name)!r}")
        return contents

    def decide(self, run_dir, target, **settings):
        with self.in_window():
            self.promised = target.step
            self.up = None if self.up is None else min(self.up, target.step)
            rollbacks = real_decide(run_dir, target, **settings)
            self.undone |= set(rollbacks.entries[-1].discarded)
        return rollbacks

    def sync(self, uploader):
        real_sync(uploader)
        pointer = layout.read_pointer(self.run_dir).step
        if not uploader.is_behind and pointer is not None:
            is_here = (self.run_dir / layout.step_dir_name(pointer)).is_dir()
            self.up = pointer if is_here else self.up
            self.up_undone = set(self.undone)

    def judge(self, found):
        if found is None:
            if self.promised is not None:
                raise Fault(f"starts anew, step {self.promised} was saved")
            return
        if found.manifest.nonce in self.undone:
            raise Fault(f"continues from step {found.step}, which was undone")
        if self.promised is not None and found.step < self.promised:
            raise Fault(f"continues from step {found.step}, step {self.promised} was saved")
        self.judge_whole(found)

    def judge_error(self, process, job):
        """Raise `Fault` unless a run ends well, or with an error that a user can expect."""
        error = process.error
        if error is None or isinstance(error, EXPECTED):
            return
        is_used = isinstance(error, ConfigError) and "in use by another run" in str(error)
        if is_used and len(self.jobs) > 1:
            return
        if isinstance(error, NoUsableCheckpointError) and self.promised is None:
            self.is_refused = True  # a person decides
            return
        text = "".join(traceback.format_exception(error))
        raise Fault(f"{process.name} ends with {error!r}\n{text}")

    def _judge_end(self):
        chosen = start.candidates_of(self.config).chosen
        if chosen is None or chosen.step != TOTAL:
            raise Fault(f"complete, and continues from {chosen}")
        self.judge(chosen)
        for info in layout.committed(self.run_dir):
            self.judge_whole(info)
        # A killed upload leaves links, and a power loss brings back unsynced removals of a probe and
        # of a deleted checkpoint, also after the end. The next start removes them.
        allowed = [".reading_"]
        if self.is_power_lost_at_end:
            allowed += [".staging_probe.", layout.TRASH_PREFIX]
        left = [n for n in layout.leftovers(self.run_dir) if not n.startswith(tuple(allowed))]
        if left and not self.met["lock lost"]:
            raise Fault(f"complete, and leaves {left}")
        if self.up == TOTAL:
            self._judge_mirror()

    def judge_whole(self, info):
        saved = self.saved[info.manifest.nonce]
        now = files_of(info.path)
        different = {name for name in saved.keys() | now.keys() if saved.get(name) != now.get(name)}
        if different - {layout.PUBLISHED, finished.FILE_NAME}:
            raise Fault(f"{info.path.name} is not as saved: {sorted(different)}")

    def _judge_mirror(self):
        """Let a machine with an empty disk restore the last checkpoint."""
        other = self.run_dir.with_name("machine")
        config = replace(self.config, default_local_dir=str(other))
        with self.storage.undisturbed():
            restore.prepare(config, self.mirror)
        found = layout.committed(other)
        if [info.step for info in found] != [TOTAL]:
            raise Fault(f"the last step is in the mirror, {found} is taken")
        self.judge_whole(found[0])


real_commit = layout.commit
real_decide = rollback.decide
real_sync = upload.Uploader.sync


@contextmanager
def patched(schedule):
    """Run the modules of the trainer on the hub, its clock and its ranks."""
    hub = schedule.hub
    chance = schedule.chance
    dist = Distributed(hub, chance)

    def pausing(place, real):
        def call(*args, **kwargs):
            hub.pause(place)
            return real(*args, **kwargs)

        return call

    in_window = schedule.in_window()  # as a decorator: entered anew at each call

    def try_lock(descriptor):
        hub.pause("lock")
        taken = real_try_lock(descriptor)
        if taken:
            schedule.note_lock(descriptor)
        return taken

    def begun(work, *, name=None):
        thread = hub.current
        return hub.spawn(thread.process, work)

    def wait(threads, timeout_s):
        hub.wait("wait", lambda: all(t.done() for t in threads), timeout_s=timeout_s)

    serial = nullcontext(SimpleNamespace(map=lambda work, items: iter([*map(work, items)])))
    real_try_lock = lock.try_lock
    RunLock = lock.RunLock
    replaced = [
        (fsio, "observer", schedule.observe),
        (time, "monotonic", lambda: hub.now),
        (time, "sleep", hub.sleep),
        (secrets, "token_hex", lambda size: f"{chance.getrandbits(8 * size):0{2 * size}x}"),
        (os, "link", pausing("link", os.link)),
        (layout, "commit", schedule.commit),
        (layout, "clean_leftovers", in_window(layout.clean_leftovers)),
        *((module, "try_lock", try_lock) for module in (layout, reading, upload, lock)),
        (RunLock, "_look", pausing("look at lock", RunLock._look)),
        (RunLock, "_write_record", pausing("write lock", RunLock._write_record)),
        (retention, "settle", in_window(retention.settle)),
        (rollback, "decide", schedule.decide),
        (upload.Uploader, "sync", lambda uploader: schedule.sync(uploader)),
        (upload, "ThreadPoolExecutor", lambda num_threads: serial),
        (restore, "ThreadPoolExecutor", lambda num_threads: serial),
        (mirror_process, "_answered", lambda work, storage, *, limit_s: work()),
        (manager, "begun", begun),
        (manager, "wait", wait),
        (manager, "load_state", lambda *args, **kwargs: None),
        *((module, "dist", dist) for module in (distributed, start, save, manager)),
    ]
    with ExitStack() as stack:
        for place, name, value in replaced:
            stack.enter_context(mock.patch.object(place, name, value))
        yield


@contextmanager
def closing_locks():
    """Close files that killed processes left open, as the kernel does."""
    try:
        yield
    finally:
        for held in list(lock._open_locks):
            held._close()


def run_seeds(seeds, *, is_traced=False):
    """Run these seeds in memory. Return the events, the number of operations, and the faults."""
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    met = Counter()
    faults = []
    num_operations = 0
    gc.disable()
    gc.freeze()
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="schedules-", dir=memory) as directory:
        for seed in seeds:
            work = Path(directory, str(seed))
            schedule = Schedule(seed, work, is_traced=is_traced)
            try:
                schedule.run()
            except (Fault, Exception) as error:
                faults.append(f"seed {seed}: {''.join(traceback.format_exception(error))}")
            met += schedule.met
            met.update(starts=len(schedule.jobs), saves=len(schedule.saved))
            num_operations += schedule.hub.ticks
            if seed % COLLECT_EVERY == 0:
                gc.collect()
            shutil.rmtree(work)
    gc.unfreeze()
    gc.enable()
    return met, num_operations, faults


def run_all(root, arguments):
    end = arguments.seed + arguments.schedules
    chunks = [range(at, min(at + 500, end)) for at in range(arguments.seed, end, 500)]
    met = Counter()
    num_operations = 0
    faults = []
    context = multiprocessing.get_context("spawn")
    with context.Pool(arguments.processes, maxtasksperchild=20) as pool:
        for chunk, found in zip(chunks, pool.imap(run_seeds, chunks), strict=True):
            met += found[0]
            num_operations += found[1]
            faults += found[2]
            if chunk.stop % 10_000 < 500 or found[2]:
                print(f"up to seed {chunk.stop - 1}: {len(faults)} faults {found[2]}", flush=True)
    return {
        "seeds": [arguments.seed, end - 1],
        "operations between which a process may be interrupted": num_operations,
        "happened": dict(sorted(met.items())),
        "faults": faults,
    }


def main(argv):
    parser = parser_of(__doc__, schedules=1_000_000, seed=1, processes=2)
    parser.add_argument("--replay", type=int, metavar="SEED")
    if (seed := parser.parse_args(argv).replay) is not None:
        print(run_seeds(range(seed, seed + 1), is_traced=True))
        return 0
    return run_campaign("schedules", parser, argv, run_all)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
