"""Which checkpoints lie beside a log, and whether they are whole as far as names and sizes tell."""

import re
from pathlib import Path

from trainer.checkpoint.manifest import MANIFEST
from trainer.report.readers.parsing import as_step
from trainer.report.run_log import CheckpointState
from trainer.runtime.files import tree_bytes
from trainer.runtime.json_lines import read_object

_STEP_DIR = re.compile(r"(?:global_step_|checkpoint-)(\d{1,15})")


def find_checkpoints(run_dir: Path) -> tuple[CheckpointState, ...]:
    """Every `global_step_N` and `checkpoint-N`, by rising step."""
    found = []
    for path in run_dir.iterdir() if run_dir.is_dir() else ():
        match = _STEP_DIR.fullmatch(path.name)
        if match and path.is_dir():
            is_own = path.name.startswith("global_step_")
            faults = tuple(_own_faults(path) if is_own else _transformers_faults(path))
            found.append(CheckpointState(int(match[1]), path, tree_bytes(path), faults))
    # A `trainer_state.json` copied with its directory to be read is neither a checkpoint nor a
    # damaged one.
    if all(
        [entry.name for entry in state.path.glob("*")] == ["trainer_state.json"] for state in found
    ):
        return ()
    return tuple(sorted(found, key=lambda state: state.step))


def _own_faults(path: Path) -> list[str]:
    files = read_object(path / MANIFEST).get("files")
    if isinstance(files, list):
        return [fault for item in files if (fault := _listed_fault(path, item))]
    if (path / MANIFEST).exists():
        return [f"{MANIFEST} cannot be read"]
    world_size = as_step(read_object(path / "fsdp_config.json").get("world_size"))
    if not world_size:
        return [f"neither {MANIFEST} nor fsdp_config.json: its save did not finish"]
    names_there = {entry.name for entry in path.iterdir()}
    if world_size > len(names_there):
        return [f"files of its {world_size} ranks are missing"]
    names = [
        f"{part}_world_size_{world_size}_rank_{{}}.pt" for part in ("model", "optim", "extra_state")
    ]
    wanted = [name.format(rank) for name in names for rank in range(world_size)]
    return [f"{name} is missing" for name in wanted if name not in names_there]


def _listed_fault(path: Path, item: object) -> str | None:
    name, expected = (
        (item.get("path"), item.get("size_bytes")) if isinstance(item, dict) else (None, None)
    )
    if (
        not isinstance(name, str)
        or not name.isprintable()
        or ".." in Path(name).parts
        or Path(name).is_absolute()
    ):
        return f"{MANIFEST} lists a file that is none"
    try:
        size_bytes = (path / name).stat().st_size
    except OSError:
        return f"{name} is missing"
    return (
        None
        if size_bytes == expected
        else f"{name} has {size_bytes} bytes, {expected} were written"
    )


def _transformers_faults(path: Path) -> list[str]:
    names = {entry.name for entry in path.iterdir()}
    faults = [] if "trainer_state.json" in names else ["trainer_state.json is missing"]
    for index in sorted(name for name in names if name.endswith(".index.json")):
        shards = read_object(path / index).get("weight_map")
        wanted = {str(shard) for shard in shards.values()} if isinstance(shards, dict) else set()
        faults += [f"{shard} is missing" for shard in sorted(wanted - names)]
    weights = [
        name
        for name in names
        if name.endswith((".safetensors", ".bin")) and name != "training_args.bin"
    ]
    sharded = [
        name for name in names if name.startswith(("global_step", "pytorch_model_fsdp", "iter_"))
    ]
    if not weights and not sharded:
        faults.append("no weights")
    return faults + [
        f"{name} is empty" for name in sorted(weights) if (path / name).stat().st_size == 0
    ]
