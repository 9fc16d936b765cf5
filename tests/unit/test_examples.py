"""Ready files for clusters: the SLURM job runs under a fake scheduler, the others say what
readers and ranks need.
"""

import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainer import errors
from trainer.launch.ranks import NodeLayout, node_layout, parse_arguments
from trainer.train.start.compose import load_config

ROOT = Path(__file__).parents[2]
SBATCH, JOBSET = ROOT / "examples/slurm.sbatch", ROOT / "examples/kubernetes.yaml"
SKYPILOT = ROOT / "examples/skypilot.yaml"
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
        ("75", {"SLURM_RESTART_COUNT": "49"}, True),
        ("75", {"SLURM_RESTART_COUNT": "50"}, False),
        ("0", {}, False),
        ("1", {}, False),
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


def pod_template() -> tuple[dict, dict, dict]:
    """(the job set, its job's spec, the pod's spec)"""
    jobset = yaml.safe_load(JOBSET.read_text())
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (group,) = jobset["spec"]["replicatedJobs"]
    assert group["replicas"] == 1
    return jobset, group["template"]["spec"], group["template"]["spec"]["template"]["spec"]


def test_the_job_set_ends_on_codes_that_the_same_command_cannot_mend_and_restarts_on_all_others():
    jobset, job, pod = pod_template()
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob" and set(rule) == {"action", "onExitCodes"}
    assert rule["onExitCodes"]["operator"] == "In" and pod["restartPolicy"] == "Never", (
        "a policy needs Never"
    )
    assert rule["onExitCodes"]["containerName"] in {
        container["name"] for container in pod["containers"]
    }
    codes = {value for name, value in vars(errors).items() if name.startswith("EXIT_")}
    assert rule["onExitCodes"]["values"] == sorted(
        codes - {errors.EXIT_DONE, errors.EXIT_RESUMABLE}
    )
    policy = jobset["spec"]["failurePolicy"]
    assert policy["maxRestarts"] > 0 and job["backoffLimit"] == 0, "all pods start again, or none"
    (ending,) = policy["rules"]
    assert (ending["action"], ending["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    assert re.fullmatch(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", ending["name"])


def test_the_pods_of_the_job_set_find_each_other_and_what_they_share():
    jobset, job, pod = pod_template()
    (container,) = pod["containers"]
    env = {entry["name"]: entry.get("value", "1") for entry in container["env"]}
    (field,) = [
        entry["valueFrom"]["fieldRef"]["fieldPath"]
        for entry in container["env"]
        if "valueFrom" in entry
    ]
    assert field == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    assert job["completionMode"] == "Indexed" and job["completions"] == job["parallelism"]
    name, group = jobset["metadata"]["name"], jobset["spec"]["replicatedJobs"][0]["name"]
    assert node_layout(env) == NodeLayout(
        job["completions"], 1, f"{name}-{group}-0-0.{name}", 29500
    )
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert mounts.keys() == volumes.keys()
    (memory,) = [name for name, path in mounts.items() if path == "/dev/shm"]
    assert volumes[memory]["emptyDir"]["medium"] == "Memory"
    config = load_config(parse_arguments(container["args"]).overrides)
    assert all(
        path.startswith("/shared/")
        for path in (config.trainer.default_local_dir, config.data.cache_dir)
    )


def test_the_skypilot_job_starts_each_machine_with_its_place_and_recovers_on_75(
    tmp_path,
):
    task = yaml.safe_load(SKYPILOT.read_text())
    assert task["resources"]["job_recovery"] == {"recover_on_exit_codes": [errors.EXIT_RESUMABLE]}
    (bucket,) = task["file_mounts"]
    script = tmp_path / "run_sft.sh"
    script.write_text('echo "$NNODES $NODE_RANK $MASTER_ADDR"; printf "%s\\n" "$@"\n')
    sky = {
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NODE_RANK": "1",
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
        "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    }
    env = {**os.environ, **task["envs"], **sky}
    command = ["bash", "-c", task["run"]]
    done = subprocess.run(
        command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=30
    )
    place, *words = done.stdout.splitlines()
    assert place == "2 1 10.0.0.1"
    arguments = parse_arguments(words)
    assert arguments.num_ranks == 8
    mirror = load_config(arguments.overrides).trainer.checkpoint.mirror
    assert mirror is not None and mirror.startswith(f"{bucket}/")
