"""Proving a recipe: what is asked for, how runs are killed and resumed, what is said, and what is left behind.

A script stands for the launcher: it logs steps, moves the pointer, and at the end takes a finished checkpoint.
"""

import dataclasses
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from finished_runs import STEPS, write_run

from trainer.checkpoint import layout
from trainer.cli import verify_resume
from trainer.cli.verify_resume import parse_trial
from trainer.config import ConfigError
from trainer.resume_proof import killed_runs
from trainer.resume_proof.bit_equality import Comparison
from trainer.resume_proof.killed_runs import Kill, KilledRun, RunFailedError
from trainer.resume_proof.proof import Trial, launcher_words, moments, report
from trainer.run.compose import load_config

ROOT = Path(__file__).parents[2]
TRIAL = Trial(num_ranks=2, steps=12, kills=3, seed=1, overrides=(), run_dir=Path("run"), is_on_gpu=False)
EQUAL = "verdict: interrupted equals uninterrupted, bit for bit"
FAKE = """
import json, os, shutil, signal, subprocess, sys, tempfile, time
tempfile.mkdtemp()  # a killed launcher leaves its own behind
words = dict(word.split("=", 1) for word in sys.argv[2:])
run_dir, fault = words["trainer.default_local_dir"].strip("'"), os.environ.get("FAKE_FAULT", "")
steps, name = int(words["trainer.total_training_steps"]), os.path.basename(run_dir)
os.makedirs(run_dir, exist_ok=True)
metrics, pointer = os.path.join(run_dir, "metrics.jsonl"), os.path.join(run_dir, "latest_checkpointed_iteration.txt")
attempts = [json.loads(line)["attempt"] for line in open(metrics)] if os.path.exists(metrics) else [0]
attempt = max(attempts) + 1
done = int(open(pointer).read()) if os.path.exists(pointer) and fault != "forget" else 0
print(f"{name} attempt {attempt} after {done}", flush=True)
# stands for the agent: in a session of its own, and slow to see that its parent is gone
wait = f"import os, time\\nwhile os.getppid() == {os.getpid()}: time.sleep(2)"
agent = subprocess.Popen([sys.executable, "-c", wait], start_new_session=True)
with open(os.environ["FAKE_PIDS"], "a") as file:
    file.write(f"{os.getpid()} {agent.pid} ")
for step in range(done + 1, steps + 1):
    time.sleep(0.02)
    if fault == f"exit {name} {attempt}":
        print("the reason")
        agent.kill()
        sys.exit(65)
    if fault == f"{name} {step}" and (name != "resumed" or attempt > 1):
        step_loss = 0.5 + 1e-9
    else:
        step_loss = 0.5
    row = {"step": step, "attempt": attempt, "kind": "train", "train/loss": step_loss, "train/grad_norm": 1.0}
    row |= {"train/lr(1e-3)": 0.1, "train/total_token_count": 9, "train/time(s)": 0.02}
    os.write(os.open(metrics, os.O_WRONLY | os.O_APPEND | os.O_CREAT), (json.dumps(row) + "\\n").encode())
    if step == 2:
        open(pointer, "w").write("2")
    if step == steps - 1 and (fault == "hold" or (name == "resumed" and attempt <= int(os.environ["FAKE_KILLS"]))):
        time.sleep(60)
    if step == 3 and fault.startswith("SIG"):
        os.kill(os.getppid(), getattr(signal, fault))
        time.sleep(60)
shutil.copytree(os.environ["FAKE_CHECKPOINT"], os.path.join(run_dir, f"global_step_{steps}"))
open(pointer, "w").write(str(steps))
agent.kill()
agent.wait()
"""

Call = Callable[..., tuple[int, str, str]]
Patch = pytest.MonkeyPatch


@pytest.fixture
def call(tmp_path: Path, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Runs the command on the fake launcher, two kills unless said otherwise: exit code, stdout, stderr."""
    (tmp_path / "fake.py").write_text(FAKE)
    finished = write_run(tmp_path / "finished") / layout.step_dir_name(STEPS)
    monkeypatch.setattr(killed_runs, "LAUNCHER", (str(tmp_path / "fake.py"),))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setenv("FAKE_CHECKPOINT", str(finished))
    monkeypatch.setenv("FAKE_PIDS", str(tmp_path / "pids"))

    def run(fault: str = "", *, kills: int = 2) -> tuple[int, str, str]:
        monkeypatch.setenv("FAKE_FAULT", fault)
        monkeypatch.setenv("FAKE_KILLS", str(kills))
        words = [f"--steps={STEPS}", f"--kills={kills}", f"trainer.default_local_dir={tmp_path}/runs/mine"]
        return (verify_resume.main(["2", *words]), *capsys.readouterr())

    return run


def alive(tmp_path: Path) -> list[int]:
    """Which of the processes that the fakes wrote down are still there."""
    pids = [int(word) for word in (tmp_path / "pids").read_text().split()]
    assert pids
    found = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    return [process.pid for process in found if process.status() != psutil.STATUS_ZOMBIE]


def left_in(tmp_path: Path) -> list[Path]:
    """Work directories and temporary files."""
    return [*(tmp_path / "runs").iterdir(), *(tmp_path / "tmp").iterdir()]


def test_an_equal_run_is_proven_and_nothing_is_left(call: Call, tmp_path: Path) -> None:
    code, out, err = call()
    assert (code, err) == (0, ""), out
    lines = re.sub(r"after step [2-5]\b", "after step S", out).splitlines()
    told = [line.split(" in ")[0] for line in lines if line.startswith(("straight:", "control:", "resumed:"))]
    assert told == [
        *("straight: started", "straight: done", "control: started", "control: done", "resumed: started"),
        *("resumed: killed after step S", "resumed: resumed from step 2") * 2,
        "resumed: done",
    ]
    digests = [line.split()[-1] for line in lines if line.startswith("final parameters")]
    assert len(digests) == 3 and len(set(digests)) == 1
    assert lines[-4].startswith("compared resumed with straight: 6 steps, 14 tensors")
    assert lines[-4].endswith("largest difference 0")
    assert lines[-3:] == [
        "  kill 1 after step S, with step 2 saved: resumed from step 2",
        "  kill 2 after step S, with step 2 saved: resumed from step 2",
        EQUAL,
    ]
    assert alive(tmp_path) == [] and left_in(tmp_path) == []


def test_a_run_that_resumes_wrongly_is_found_and_kept(call: Call, tmp_path: Path) -> None:
    code, out, _ = call("resumed 4", kills=1)
    assert code == 1 and EQUAL not in out
    first = "step 4, train/loss: straight 0.5, resumed 0.500000001"
    assert f"verdict: interrupted differs from uninterrupted, first at {first}\n" in out
    (work,) = left_in(tmp_path)
    assert out.splitlines()[-1] == f"kept for a closer look: {work}"
    log = "resumed attempt 1 after 0\nresumed attempt 2 after 2\n"
    assert (work / "resumed" / "metrics.jsonl").exists() and (work / "resumed.log").read_text() == log


def test_a_run_that_begins_anew_has_lost_its_checkpoint(call: Call) -> None:
    code, out, _ = call("forget", kills=1)
    assert code == 1 and "largest difference 0" in out
    loss = "kill 1 after step [2-5], with step 2 saved: resumed from step 0"
    assert re.search(f"\nverdict: interrupted differs from uninterrupted, first at {loss}\n", out)


def test_a_control_that_differs_is_not_blamed_on_resume(call: Call, tmp_path: Path) -> None:
    code, out, _ = call("control 3")
    first = "step 3, train/loss: straight 0.5, control 0.500000001"
    assert code == 1 and out.splitlines()[-2].startswith("verdict: not judged, because training itself is not determ")
    assert out.splitlines()[-2].endswith(f"first at {first}")
    assert "resumed: " not in out and left_in(tmp_path)


@pytest.mark.parametrize(("run", "is_kept"), [("straight 1", False), ("control 1", True), ("resumed 2", True)])
def test_a_failing_run_gives_its_code_and_the_end_of_its_log(
    call: Call, tmp_path: Path, run: str, is_kept: bool
) -> None:
    code, out, err = call(f"exit {run}", kills=1)
    name = run.split()[0]
    assert code == 65 and "verdict" not in out and f"{name}: done" not in out
    assert err.startswith(f"ERROR: the run '{name}' ended with exit code 65; the end of its log:\n  ")
    assert err.endswith("\n  the reason\n")
    assert bool(left_in(tmp_path)) == is_kept and alive(tmp_path) == []


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_an_interrupted_command_leaves_nothing(call: Call, tmp_path: Path, name: str) -> None:
    number = signal.Signals[name]
    inherited = signal.signal(number, signal.SIG_DFL)  # nohup and background jobs of a shell ignore some of them
    try:
        code, _, err = call(name)
        assert (code, err) == (130, "interrupted: no verdict\n")
        assert alive(tmp_path) == [] and left_in(tmp_path) == []
        assert signal.getsignal(number) == signal.SIG_DFL
    finally:
        signal.signal(number, inherited)


def test_kill_9_of_the_command_ends_its_run(tmp_path: Path) -> None:
    (tmp_path / "fake.py").write_text(FAKE)
    code = f"""
from trainer.cli import verify_resume
from trainer.resume_proof import killed_runs
killed_runs.LAUNCHER = ({str(tmp_path / "fake.py")!r},)
verify_resume.main(["--steps=6", "trainer.default_local_dir={tmp_path}/runs/mine"])
"""
    fake = {"FAKE_PIDS": str(tmp_path / "pids"), "FAKE_FAULT": "hold", "FAKE_KILLS": "0", "FAKE_CHECKPOINT": ""}
    env = {**os.environ, **fake, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.DEVNULL) as command:
        deadline = time.monotonic() + 120
        while not list(tmp_path.glob("runs/*/straight/metrics.jsonl")) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(alive(tmp_path)) == 2
        command.kill()
    deadline = time.monotonic() + 30
    while alive(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert alive(tmp_path) == []


def test_a_run_that_is_over_before_the_first_kill_proves_nothing(call: Call, tmp_path: Path) -> None:
    assert call(kills=0)[0] == 2  # for the fake's environment
    words = launcher_words(dataclasses.replace(TRIAL, steps=STEPS), tmp_path / "resumed")
    late = killed_runs.Moment(step=99, delay_s=0.0)
    with pytest.raises(RunFailedError, match="complete before the first kill") as caught:
        KilledRun("resumed", tmp_path, words, tmp_path).train_with_kills([late])
    assert caught.value.code == 1


def test_moments_are_drawn_by_seed_and_spread_over_the_run() -> None:
    assert moments(TRIAL, step_s=2.0) == moments(TRIAL, step_s=2.0)
    assert moments(TRIAL, step_s=2.0) != moments(dataclasses.replace(TRIAL, seed=2), step_s=2.0)
    for steps, kills, seed in ((4, 1, 0), (4, 9, 1), (5, 2, 2), (12, 3, 3), (12, 7, 4), (100, 10, 5)):
        trial = dataclasses.replace(TRIAL, steps=steps, kills=kills, seed=seed)
        drawn = moments(trial, step_s=0.5)
        struck = [moment.step for moment in drawn]
        assert len(struck) == kills and struck == sorted(struck), trial
        assert trial.save_freq < min(struck) and max(struck) <= steps - 2, trial
        assert all(0 <= moment.delay_s < 0.5 for moment in drawn), trial
    tenths = [moment.step // 10 for moment in moments(dataclasses.replace(TRIAL, steps=122, kills=9), step_s=0.0)]
    assert tenths == [3, 4, 5, 6, 7, 8, 9, 10, 11]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--steps", "3"], "argument --steps: must be a whole number of at least 4, got '3'\nusage: bash run_sft.sh"),
        (["--kills=0"], "argument --kills: must be a whole number of at least 1, got '0'"),
        (["--seed=-1"], "argument --seed: must be a whole number of at least 0, got '-1'"),
        (["--step", "8", "--fast"], "unrecognized arguments: --fast"),
        (["2", "trainer.total_training_steps=9"], "give --steps K instead"),
        (["++trainer.total_training_steps=9"], "give --steps K instead"),
        (["trainer.resume_mode=disable"], "trainer.resume_mode=disable cannot be verified: add"),
        (["data.train_batchsize=8"], "unknown configuration key 'data.train_batchsize': did you mean"),
        (["eight"], "'eight' is neither a number of ranks nor of the form key=value\nusage: bash run_sft.sh che"),
        (
            ["0"],
            "the number of ranks must be at least 1, got 0\nusage: bash run_sft.sh checkpoint verify-resume [N]",
        ),
        (["2", "3"], "'3' is not of the form key=value\nusage: bash run_sft.sh checkpoint verify-resume [N]"),
    ],
)
def test_mistakes_are_2_before_anything_starts(
    words: list[str], message: str, tmp_path: Path, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert verify_resume.main(words) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("ERROR: ") and message in err and "run_sft.sh [N]" not in err
    assert not list(tmp_path.iterdir())


def test_several_machines_are_refused(monkeypatch: Patch) -> None:
    for name, value in {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "a"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="on one machine: set NNODES=1"):
        parse_trial([])


def test_options_and_words_mix(tmp_path: Path) -> None:
    argv = [
        "--kills",
        "1",
        "3",
        "trainer.device=cpu",
        "--steps=7",
        f"trainer.default_local_dir={tmp_path}/a",
        "--seed=5",
    ]
    trial = parse_trial(argv)
    overrides = ("trainer.device=cpu", f"trainer.default_local_dir={tmp_path}/a")
    assert trial == Trial(3, 7, 1, 5, overrides, tmp_path / "a", is_on_gpu=False) and trial.save_freq == 1
    assert parse_trial(["trainer.device=cpu"]).num_ranks == 2


def test_a_directory_that_cannot_be_written_is_73(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert verify_resume.main([f"trainer.default_local_dir={tmp_path}/file/run"]) == 73
    assert "cannot write beside trainer.default_local_dir=" in capsys.readouterr().err


def test_the_launcher_gets_the_recipe_and_what_this_command_changes() -> None:
    overrides = ("trainer.save_freq=100", "trainer.max_time=3h", "trainer.logger=[wandb]", "optim.lr=1e-3")
    trial = dataclasses.replace(TRIAL, overrides=overrides)
    run_dir = Path("/a b/it's, {x} [1]=$y/straight")
    num_ranks, *words = launcher_words(trial, run_dir)
    config = load_config(words)
    assert num_ranks == "2" and config.optim.lr == 1e-3 and config.trainer.default_local_dir == str(run_dir)
    assert (config.trainer.total_training_steps, config.trainer.save_freq) == (12, 3)
    assert (config.trainer.max_time, config.trainer.logger) == (None, ["console"])


def test_on_a_gpu_the_recipe_is_made_deterministic_unless_it_says_otherwise() -> None:
    for is_on_gpu, own, expected in (
        (False, (), False),
        (True, (), True),
        (True, ("trainer.deterministic=false",), False),
    ):
        trial = dataclasses.replace(TRIAL, overrides=own, is_on_gpu=is_on_gpu)
        _, *words = launcher_words(trial, Path("run"))
        assert load_config(words).trainer.deterministic is expected


def test_the_verdict_names_the_causes_of_the_device() -> None:
    control = Comparison("straight", "control", 12, 4, 1, 0.5, tuple(f"step {step}: x" for step in range(3, 11)))
    for is_on_gpu, word in ((True, "trainer.deterministic=false"), (False, "On CPU")):
        code, lines = report(control, [], is_on_gpu=is_on_gpu)
        assert code == 1 and word in lines[-2] and lines[-1].endswith("two straight runs differ, first at step 3: x")
        assert lines[1:-2] == [*(f"  step {step}: x" for step in range(3, 8)), "  and 3 more differences"]


def test_a_checkpoint_not_yet_pointed_to_may_be_resumed_from() -> None:
    assert not Kill(at_step=6, saved_step=3, resumed_from=6).has_lost_checkpoint
    assert not Kill(at_step=6, saved_step=3, resumed_from=3).has_lost_checkpoint
    assert Kill(at_step=6, saved_step=3, resumed_from=2).has_lost_checkpoint
