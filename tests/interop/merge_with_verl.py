"""Merge our checkpoints with verl's own merger: VERL_PYTHON merge_with_verl.py JOBS.

JOBS is JSON: a list of [global_step_N, target].
"""

import json
import sys
from importlib import import_module
from pathlib import Path

import verl_parts


def merge(checkpoint, target):
    config = import_module("verl.model_merger.base_model_merger").ModelMergerConfig(
        operation="merge",
        backend="fsdp",
        local_dir=str(checkpoint),
        target_dir=target,
        hf_model_config_path=str(checkpoint / "huggingface"),
    )
    import_module("verl.model_merger.fsdp_model_merger").FSDPModelMerger(config).merge_and_save()


if __name__ == "__main__":
    verl_parts.prepare()
    for checkpoint, target in json.loads(sys.argv[1]):
        merge(Path(checkpoint), target)
