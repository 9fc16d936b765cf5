"""Ready files for clusters: the SLURM job runs under a fake scheduler, the others say what
readers and ranks need.
"""

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainer import errors

ROOT = Path(__file__).parents[2]
SBATCH = ROOT / "examples/slurm.sbatch"
JOBSET = ROOT / "examples/kubernetes.yaml"
FAKE_SRUN = """#!/usr/bin/env bash
echo "$@" >>{calls}
case {behaviour} in
    wait) trap 'exit 75' USR1 TERM; touch {ready}; while :; do sleep 0.01; done ;;
    *) exit {behaviour} ;;
esac
"""


@pytest.fixture
def job(tmp_path: Path) -> Any:
    """Starts the batch script as SLURM does, where `srun` does what it is told."""

    def start(behaviour: str, **env: str) -> "subprocess.Popen[str]":
        (tmp_path / "bin").mkdir()
        programs = {
            "srun": FAKE_SRUN.format(
                calls=tmp_path / "srun", ready=tmp_path / "ready", behaviour=behaviour
            ),
            "scontrol": f'#!/bin/sh\necho "$@" >>{tmp_path / "scontrol"}\n',
        }
        for name, text in programs.items():
            (tmp_path / "bin" / name).write_text(text)
            (tmp_path / "bin" / name).chmod(0o755)
        path = f"{tmp_path}/bin:{os.environ['PATH']}"
        slurm = {"SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "64", "PATH": path}
        command = ["bash", str(SBATCH), "optim.lr=1"]
        return subprocess.Popen(command, env={**os.environ, **slurm, **env}, text=True)

    return start


@pytest.mark.parametrize(
    ("code", "env", "is_requeued"),
    [
        ("75", {}, True),
        ("75", {"SLURM_RESTART_COUNT": "50"}, False),
        ("0", {}, False),
        ("2", {}, False),
    ],
)
def test_the_slurm_job_is_requeued_on_75_and_not_for_ever(code, env, is_requeued, job, tmp_path):
    assert job(code, **env).wait(30) == int(code)
    assert (tmp_path / "srun").read_text() == "--cpus-per-task=64 bash run_sft.sh optim.lr=1\n"
    assert (tmp_path / "scontrol").exists() is is_requeued
    if is_requeued:
        assert (tmp_path / "scontrol").read_text() == "requeue 7\n"


@pytest.mark.parametrize(
    ("number", "is_requeued"), [(signal.SIGUSR1, True), (signal.SIGTERM, False)]
)
def test_a_signal_to_the_slurm_job_reaches_the_ranks_and_a_cancelled_job_is_not_requeued(
    number, is_requeued, job, tmp_path
):
    process = job("wait")
    while not (tmp_path / "ready").exists():
        assert process.poll() is None
    process.send_signal(number)
    assert process.wait(30) == 75
    assert (tmp_path / "scontrol").exists() is is_requeued


def test_the_job_set_ends_on_codes_that_the_same_command_cannot_mend_and_restarts_on_all_others():
    jobset = yaml.safe_load(JOBSET.read_text())
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob" and set(rule) == {"action", "onExitCodes"}
    codes = {value for name, value in vars(errors).items() if name.startswith("EXIT_")}
    assert rule["onExitCodes"]["values"] == sorted(
        codes - {errors.EXIT_DONE, errors.EXIT_RESUMABLE}
    )
