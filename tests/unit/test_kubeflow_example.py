"""The Kubeflow Trainer example: pods find each other, and exit codes restart or end the job."""

import os
import subprocess
from pathlib import Path

import yaml

from trainer import errors
from trainer.launch.ranks import parse_arguments
from trainer.train.start.compose import load_config

EXAMPLE = Path(__file__).parents[2] / "examples/kubeflow.yaml"


def test_each_pod_starts_with_its_place_and_only_resumable_ends_restart_the_job(tmp_path):
    runtime, job = yaml.safe_load_all(EXAMPLE.read_text(encoding="utf-8"))
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    (group,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    pods = group["template"]["spec"]
    (rule,) = pods["podFailurePolicy"]["rules"]
    codes = {value for name, value in vars(errors).items() if name.startswith("EXIT_")}
    final_codes = codes - {errors.EXIT_DONE, errors.EXIT_RESUMABLE}
    assert rule["onExitCodes"]["values"] == sorted(final_codes)
    assert pods["template"]["spec"]["restartPolicy"] == "Never", "a pod failure policy needs it"

    (container,) = pods["template"]["spec"]["containers"]
    script = tmp_path / "run_sft.sh"
    script.write_text('echo "$NNODES $NODE_RANK $MASTER_ADDR"; printf "%s\\n" "$@"\n')
    shell, flag, text, *rest = container["command"]
    command = [shell, flag, text.replace("/opt/sft/run_sft.sh", str(script)), *rest]
    place = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "node-0-0.sft"}
    done = subprocess.run(
        [*command, *job["spec"]["trainer"]["args"]],
        env={**os.environ, **place},
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    found, *arguments = done.stdout.splitlines()
    assert found == "2 1 node-0-0.sft"
    num_ranks, overrides = parse_arguments(arguments)
    assert num_ranks == runtime["spec"]["mlPolicy"]["torch"]["numProcPerNode"]
    config = load_config(overrides)
    assert config.trainer.default_local_dir.startswith("/shared/")
