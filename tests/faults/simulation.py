"""Processes as greenlets of one thread, on a virtual clock: a seed decides who runs next.

A process gives way before each operation on a file, a storage, a lock or another rank. The hub then
picks the next process, lets time pass, fails the operation or kills the process. A killed process
never runs again: no `finally` of its code has an effect until the schedule is over.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet

TICK_S = 0.01
STAY = 0.6
"""The probability that the process that ran last continues."""


class DistError(RuntimeError):
    """A rank is gone, or did not arrive in time."""


@dataclass(eq=False)
class Process:
    """One operating system process. Its threads die with it, and when its main thread ends."""

    name: str
    hub: "Hub"
    rank: int = 0
    group: Any = None
    threads: list["Thread"] = field(default_factory=list)
    is_dead: bool = False
    suspended_until: Callable[[], bool] | None = None

    @property
    def is_over(self):
        return self.is_dead or self.threads[0].is_over

    @property
    def error(self):
        return self.threads[0].error

    def kill(self):
        if not self.is_over:
            self.is_dead = True
            self.hub.on_death(self)


class Thread:
    """`result` and `done` behave like those of a future."""

    def __init__(self, process, work):
        self.process = process
        self._work = work
        # a thread that ends goes on in its parent: the hub, not the thread that started it
        self.greenlet = greenlet(self._run, parent=process.hub.main)
        self.is_over = False
        self.value = None
        self.error = None
        self.ready = None
        self.deadline = None
        self.failure = None
        self.place = "begins"
        process.threads.append(self)

    def _run(self):
        try:
            self.value = self._work()
        except Exception as error:
            self.error = error
        self.is_over = True

    @property
    def can_run(self):
        process = self.process
        if self.is_over or process.is_dead or process.threads[0].is_over:
            return False
        if process.suspended_until is not None:
            if not process.suspended_until():
                return False
            process.suspended_until = None
        hub = process.hub
        is_late = self.deadline is not None and self.deadline <= hub.now
        return self.ready is None or is_late or self.ready()

    def done(self):
        return self.is_over

    def result(self):
        self.process.hub.wait("result", lambda: self.is_over)
        if self.error is not None:
            raise self.error
        return self.value


class Hub:
    """Runs all processes of a schedule."""

    def __init__(self, chance, on_tick):
        """`on_tick` is called before a thread continues. It may kill the thread, or set a
        `failure`.
        """
        self.chance = chance
        self.now = 0.0
        self.ticks = 0
        self.on_tick = on_tick
        self.on_death = lambda process: None
        self.is_traced = False
        self.main = getcurrent()
        self._threads = []
        self._last = None
        self._graveyard = []
        self._is_closing = False

    @property
    def current(self):
        """The running thread; None in the hub itself."""
        return None if getcurrent() is self.main else self._last

    def spawn(self, process, work):
        thread = Thread(process, work)
        self._threads.append(thread)
        return thread

    def pause(self, place):
        self.wait(place, None)

    def wait(self, place, ready, *, timeout_s=None):
        """Yield until `ready`. Return False if that does not happen within `timeout_s`."""
        if self._is_closing:
            raise GreenletExit
        thread = self.current
        if thread is None:
            return True
        thread.place = place
        thread.ready = ready
        thread.deadline = None if timeout_s is None else self.now + timeout_s
        self.main.switch()
        thread.deadline = None
        if (failure := thread.failure) is not None:
            thread.failure = None
            raise failure
        return ready is None or ready()

    def sleep(self, seconds):
        self.wait("sleep", lambda: False, timeout_s=seconds)

    def die(self):
        """Kill the running process immediately."""
        thread = self.current
        thread.process.kill()
        self.main.switch()

    def step(self):
        """Let one thread run to its next operation. Return False if no thread can ever continue."""
        self._bury()
        able = [thread for thread in self._threads if thread.can_run]
        if not able:
            for thread in self._threads:
                thread.process.suspended_until = None
            deadlines = [t.deadline for t in self._threads if t.deadline is not None]
            self.now = max([self.now, *sorted(deadlines)[:1]])
            able = [thread for thread in self._threads if thread.can_run]
        if not able:
            return False
        stays = self._last in able and self.chance.random() < STAY
        thread = self._last if stays else self.chance.choice(able)
        self.ticks += 1
        self.now += TICK_S
        self.on_tick(thread)
        if not thread.process.is_dead:
            self._last = thread
            if self.is_traced:
                print(f"{self.ticks:5} {thread.process.name:14} {thread.place}")
            thread.greenlet.switch()
        return True

    def close(self):
        """End all threads after the schedule. Otherwise their frames would stay in memory."""
        self._is_closing = True
        for thread in (*self._threads, *self._graveyard):
            if not thread.greenlet.dead:
                thread.greenlet.throw(GreenletExit)

    def _bury(self):
        """Dead threads are kept, so that none of their `finally` blocks runs before the end."""
        ended = [t for t in self._threads if t.is_over or t.process.is_over]
        for thread in ended:
            self._threads.remove(thread)
            self._graveyard.append(thread)


class Ranks:
    """A process group: messages between the ranks of one job."""

    def __init__(self, processes, *, timeout_s):
        self.processes = processes
        self.timeout_s = timeout_s
        self.messages = {}
        self.arrived = {}
        self.calls = [0] * len(processes)
        self.left = set()

    def is_gone(self, rank):
        return rank in self.left or self.processes[rank].is_over


class Distributed:
    """The functions of `torch.distributed` that saves and starts use, between simulated ranks."""

    DistError = DistError

    def __init__(self, hub, chance):
        self._hub = hub
        self._chance = chance
        self._new = {}
        self._made = {}

    @property
    def _process(self):
        thread = self._hub.current
        return thread.process

    def new_group(self, *, backend, timeout):
        """The n-th calls of all ranks create the same group. Collective."""
        process = self._process
        self._gather(process.group, None)
        self._made[process] = number = self._made.get(process, 0) + 1
        key = id(process.group), number
        if key not in self._new:
            members = process.group.processes
            self._new[key] = Ranks(members, timeout_s=timeout.total_seconds())
        return self._new[key]

    def get_world_size(self):
        return len(self._process.group.processes)

    def destroy_process_group(self, group):
        group.left.add(self._process.rank)

    def all_gather_object(self, found, value, group=None):
        found[:] = self._gather(group or self._process.group, value)

    def broadcast_object_list(self, values, src):
        values[:] = self._gather(self._process.group, list(values))[src]

    def all_reduce(self, tensor):
        tensor.copy_(sum(self._gather(self._process.group, tensor.clone())))

    def _gather(self, group, value):
        """Each rank leaves as it likes; one that fails or dies meanwhile leaves the others alone."""
        rank = self._process.rank
        number = group.calls[rank]
        group.calls[rank] += 1
        slot = group.arrived.setdefault(number, {})
        slot[rank] = value
        everyone = range(len(group.processes))

        def is_settled():
            return len(slot) == len(group.processes) or any(
                r not in slot and group.is_gone(r) for r in everyone
            )

        self._hub.wait("collective", is_settled, timeout_s=group.timeout_s)
        if len(slot) < len(group.processes):
            self._lose(group)
        return [slot[r] for r in everyone]

    def _lose(self, group):
        """Peers are gone: this rank learns it at once, or hears nothing until its timeout."""
        if self._chance.random() < 0.5:
            self._hub.wait("no answer", lambda: False, timeout_s=group.timeout_s)
        raise DistError("Connection closed by peer")

    def isend(self, tensor, destination, group):
        self._send(destination, group)
        return SimpleNamespace(wait=lambda timeout: None)

    def send(self, tensor, destination, group):
        self._hub.pause("send")
        self._send(destination, group)

    def _send(self, destination, group):
        if group.is_gone(destination):
            raise DistError("Connection closed by peer")
        key = self._process.rank, destination
        group.messages[key] = group.messages.get(key, 0) + 1

    def irecv(self, tensor, source, group):
        key = source, self._process.rank

        def wait(timeout):
            def is_settled():
                return group.messages.get(key, 0) > 0 or group.is_gone(source)

            self._hub.wait("receive", is_settled, timeout_s=timeout.total_seconds())
            if not group.messages.get(key, 0):
                raise DistError("timed out, or connection closed by peer")
            group.messages[key] -= 1

        return SimpleNamespace(wait=wait)
