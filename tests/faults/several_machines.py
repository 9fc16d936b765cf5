"""Runs on several machines (namespaces of this one) that are cut off, killed, late or alone.

`python tests/faults/several_machines.py` writes benchmarks/results/several_machines.json. Every
start is the real command under the real launcher on a small model. Each case strikes a run. Every
machine must leave within the run's limits with exit code 0 or 75 (a killed machine says nothing).
The same command on healthy machines must then end with 0 and the losses of an undisturbed run: in
every bit on as many ranks, within 1e-6 on another number.
"""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

sys.path.extend([str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)])

from campaign import parser_of, run_campaign
from hosts import Host, network, why_not
from repository import REPOSITORY
from whole_equality import compare_runs
from whole_runs import curve, tiny_model

from trainer.config import TrainerConfig

TOTAL_STEPS = 40
STRIKE_AT = 12
HANG_TIMEOUT_S = 15
DIST_TIMEOUT_S = TrainerConfig(hang_timeout_s=HANG_TIMEOUT_S).dist_timeout_s
LIMIT_S = 110.0
"""Time for a start to end: the import of torch, `DIST_TIMEOUT_S`, and half a minute in which the
launcher ends a run.
"""
WORDS = (
    f"trainer.hang_timeout_s={HANG_TIMEOUT_S}",
    f"trainer.total_training_steps={TOTAL_STEPS}",
    "trainer.save_freq=5",
    "trainer.test_freq=20",
)
TORCHRUN = ("torchrun", "--standalone", "--max-restarts=2")
KILLED = "killed"


@dataclass
class Cluster:
    """A run on some machines, with one launcher process on each."""

    hosts: list[Host]
    run_dir: Path
    num_ranks: int
    words: tuple[str, ...]
    has_torchrun: bool = False
    launchers: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)
    killed: set[str] = field(default_factory=set)

    def start(self, host):
        """Start the launcher on one machine. All machines know the name of the first one."""
        env = {
            **os.environ,
            "NNODES": str(len(self.hosts)),
            "NODE_RANK": str(self.hosts.index(host)),
            "MASTER_ADDR": self.hosts[0].name,
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        command = ["bash", str(REPOSITORY / "run_sft.sh"), str(self.num_ranks)]
        if self.has_torchrun:
            # else restarted ranks find the addresses of those before them in the agent's store
            env |= {"PYTHONPATH": str(REPOSITORY), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
            command = [*TORCHRUN, f"--nproc-per-node={self.num_ranks}", "-m", "trainer"]
        command += [*self.words, f"trainer.default_local_dir={self.run_dir}"]
        with self.log(host).open("ab") as log:
            launcher = host.start(command, cwd=self.run_dir.parent, env=env, log=log)
        self.launchers[host.name] = launcher

    def log(self, host):
        return self.run_dir.with_suffix(f".{host.name}.log")

    def wait_for_step(self, step):
        deadline = time.monotonic() + LIMIT_S
        while max(curve(self.run_dir), default=0) < step:
            logs = [self.log(host).read_text(errors="replace") for host in self.hosts]
            assert time.monotonic() < deadline, "\n".join([f"no step {step}:", *logs])
            time.sleep(0.01)

    def kill(self, host):
        self.killed.add(host.name)
        host.kill()

    def codes(self):
        """Return the exit code of each machine's launcher, or the end of its log if it hangs."""
        deadline = time.monotonic() + LIMIT_S
        codes = {}
        for host in self.hosts:
            if (launcher := self.launchers.get(host.name)) is None:
                continue
            try:
                codes[host.name] = launcher.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                codes[host.name] = f"hangs: {self.log(host).read_text()[-3000:]}"
        return codes | dict.fromkeys(self.killed, KILLED)


def cut_off(cluster):
    cluster.hosts[-1].cut_off()


def cut_off_for_a_moment(cluster):
    """The cut is shorter than the limit, so connections survive."""
    cluster.hosts[-1].cut_off()
    time.sleep(3.0)
    cluster.hosts[-1].plug_in()


def kill_last(cluster):
    cluster.kill(cluster.hosts[-1])


def kill_first(cluster):
    """The machine where the ranks meet and which decides for all."""
    cluster.kill(cluster.hosts[0])


def stop_one(cluster):
    """Send a scheduler's signal to the launcher of one machine. All ranks save and exit."""
    _signal_oldest(cluster.hosts[-1], signal.SIGTERM, f"trainer.launch {cluster.num_ranks} ")


def kill_rank(cluster):
    """Kill a rank that torchrun started."""
    _signal_oldest(cluster.hosts[-1], signal.SIGKILL, "python[^ ]* -u -m trainer ")


def _signal_oldest(host, number, pattern):
    """Signal the oldest process with this command line, not the loader workers that it forks."""
    subprocess.run(host.entering("pkill", f"-{number.value}", "-o", "-f", pattern), check=True)


@dataclass(frozen=True)
class Case:
    """`strike` a run on some machines, then continue on `then`: machines, ranks on each.

    The last `num_late` machines never come; below 0, the first. `has_torchrun`: started as users of
    torchrun do.
    """

    name: str
    strike: Callable[[Cluster], None] | None = None
    num_hosts: int = 2
    num_ranks: int = 2
    num_late: int = 0
    then: tuple[int, int] = (2, 2)
    has_torchrun: bool = False


CASES = (
    Case("undisturbed"),
    Case("cut off", cut_off),
    Case("cut off for 3 s", cut_off_for_a_moment),
    Case("last machine killed, comes back", kill_last),
    Case("first machine killed, comes back", kill_first),
    Case("a machine killed, on with the other", kill_last, then=(1, 4)),
    Case("a machine killed, on with three", kill_last, then=(3, 1)),
    Case("one machine is told to stop", stop_one),
    Case("a rank killed under torchrun --max-restarts", kill_rank, 1, 4, 0, (1, 4), True),
    Case("a machine never comes", num_late=1),
    Case("the first machine never comes", num_late=-1),
)


class Campaign:
    """Runs cases one after another. The first, undisturbed run is the reference for the others."""

    def __init__(self, root):
        self.root = root
        self.words = (*tiny_model(root), *WORDS)
        self.straight = None
        self._num_runs = 0

    def run(self, case):
        """Return codes and seconds of the struck start, codes of the next start, and the faults."""
        run_dir = self.root / f"run{self._num_runs}"
        self._num_runs += 1
        codes, struck_s = self._start(run_dir, case)
        result = {"codes": codes, "seconds": round(struck_s, 1)}
        faults = [f"{name}: {code}" for name, code in codes.items() if code not in (0, 75, KILLED)]
        if set(codes.values()) != {0}:
            num_hosts, num_ranks = case.then
            then, _ = self._start(run_dir, Case("then", None, num_hosts, num_ranks))
            result |= {"then": then, "machines": num_hosts}
            faults += [f"then {name}: {code}" for name, code in then.items() if code != 0]
        if case.strike is None and case.num_late == 0:
            self.straight = run_dir
        if not faults and self.straight is not None:
            is_same_size = math.prod(case.then) == case.num_hosts * case.num_ranks
            faults += _differences(self.straight, run_dir, is_same_size=is_same_size)
        return {**result, "faults": faults}

    def _start(self, run_dir, case):
        """Return the codes, and the seconds from the strike (or from the start, without one) to the
        end.
        """
        with network(case.num_hosts, hosts_dir=self.root) as hosts:
            cluster = Cluster(hosts, run_dir, case.num_ranks, self.words, case.has_torchrun)
            for host in hosts[max(0, -case.num_late) : case.num_hosts - max(0, case.num_late)]:
                cluster.start(host)
            if case.strike is not None:
                cluster.wait_for_step(STRIKE_AT)
                case.strike(cluster)
            begun = time.monotonic()
            return cluster.codes(), time.monotonic() - begun


def _differences(straight, run_dir, *, is_same_size):
    for hang in run_dir.glob("hang_*"):
        shutil.rmtree(hang)  # stacks of the struck start
    if is_same_size:
        return list(compare_runs(straight, run_dir, steps=TOTAL_STEPS).differences)
    losses = curve(run_dir)
    return [
        f"step {step}: loss {losses.get(step)}, undisturbed {loss}"
        for step, loss in curve(straight).items()
        if abs(losses.get(step, math.inf) - loss) > 1e-6
    ]


def work(root, arguments):
    results = {}
    campaign = Campaign(root)
    for case in CASES:
        results[case.name] = campaign.run(case)
        print(case.name, json.dumps(results[case.name]), flush=True)
    limits = {"dist_timeout_s": DIST_TIMEOUT_S, "hang_timeout_s": HANG_TIMEOUT_S}
    faults = [fault for result in results.values() for fault in result["faults"]]
    return {"limits": limits, "cases": results, "faults": faults}


if __name__ == "__main__":
    if reason := why_not():
        sys.exit(f"ERROR: {reason}")
    sys.exit(run_campaign("several_machines", parser_of(__doc__), sys.argv[1:], work))
