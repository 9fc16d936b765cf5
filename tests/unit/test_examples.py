"""Example files for clusters: the SLURM job runs under a fake scheduler; the others contain what
readers and ranks need.
"""

import os
import signal
import subprocess

import pytest
import yaml
from repository import REPOSITORY

from trainer import errors
from trainer.launch.ranks import parse_arguments
from trainer.train.start.compose import load_config

SBATCH = REPOSITORY / "examples/slurm.sbatch"
JOBSET = REPOSITORY / "examples/kubernetes.yaml"
KUBEFLOW = REPOSITORY / "examples/kubeflow.yaml"
FAKE_SRUN = """#!/usr/bin/env bash
echo "$@" >>{calls}
case {behaviour} in
    wait) trap 'exit 75' USR1 TERM; touch {ready}; while :; do sleep 0.01; done ;;
    *) exit {behaviour} ;;
esac
"""


def final_codes():
    """Return the exit codes that the same command cannot mend."""
    codes = {value for name, value in vars(errors).items() if name.startswith("EXIT_")}
    return sorted(codes - {errors.EXIT_DONE, errors.EXIT_RESUMABLE})


@pytest.fixture
def job(tmp_path):
    """Start the batch script like SLURM, with an `srun` that runs its arguments."""

    def start(behaviour, **env):
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
    assert rule["onExitCodes"]["values"] == final_codes()


def test_each_pod_of_kubeflow_has_its_place_and_only_resumable_ends_restart_the_job(tmp_path):
    runtime, job = yaml.safe_load_all(KUBEFLOW.read_text(encoding="utf-8"))
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    (group,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    pods = group["template"]["spec"]
    (rule,) = pods["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["values"] == final_codes()
    assert pods["template"]["spec"]["restartPolicy"] == "Never", "a pod failure policy needs it"

    (container,) = pods["template"]["spec"]["containers"]
    script = tmp_path / "run_sft.sh"
    script.write_text('echo "$NNODES $NODE_RANK $MASTER_ADDR"; printf "%s\\n" "$@"\n')
    shell, flag, text, *rest = container["command"]
    command = [shell, flag, text.replace("/opt/sft/run_sft.sh", str(script)), *rest]
    command += job["spec"]["trainer"]["args"]
    place = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "node-0-0.sft"}
    done = subprocess.check_output(command, env={**os.environ, **place}, text=True)
    found, *arguments = done.splitlines()
    assert found == "2 1 node-0-0.sft"
    num_ranks, overrides = parse_arguments(arguments)
    assert num_ranks == runtime["spec"]["mlPolicy"]["torch"]["numProcPerNode"]
    assert load_config(overrides).trainer.default_local_dir.startswith("/shared/")
