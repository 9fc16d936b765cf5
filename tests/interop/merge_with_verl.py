"""Merge one of our checkpoints with verl's own merger: VERL_PYTHON merge_with_verl.py <global_step_N> <target>.

With a third argument, a directory with an exported model, verl's merger compares instead of writing.
"""

import sys
from pathlib import Path

import verl_parts


def main(checkpoint: Path, target: Path, reference: Path | None) -> None:
    verl_parts.prepare()
    config = verl_parts.load("verl.model_merger.base_model_merger").ModelMergerConfig(
        operation="merge" if reference is None else "test",
        backend="fsdp",
        local_dir=str(checkpoint),
        target_dir=str(target),
        test_hf_dir=None if reference is None else str(reference),
        hf_model_config_path=str(checkpoint / "huggingface"),
    )
    verl_parts.load("verl.model_merger.fsdp_model_merger").FSDPModelMerger(config).merge_and_save()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]) if len(sys.argv) > 3 else None)
