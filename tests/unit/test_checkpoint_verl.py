"""What verl left: complete or refused by name, damage found, no code run, and the optimizer under names."""

import json
import os
import random
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from interop.verl_files import NAMES, extra_state, moments, optimizer_state, position, write_directory

from trainer.checkpoint import choice, layout, verl
from trainer.checkpoint.shards import CorruptShardError
from trainer.config import ConfigError
from trainer.progress import Position


def edit_config(**changes: Any) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        config = {"FSDP_version": 2, "world_size": 2, **changes}
        (path / "fsdp_config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))

    return edit


def drop(name: str) -> Callable[[Path], None]:
    return lambda path: (path / name).unlink()


def link(path: Path) -> None:
    target = path / "data_1.pt"
    target.rename(path.parent / "elsewhere.pt")
    target.symlink_to(path.parent / "elsewhere.pt")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (edit_config(FSDP_version=1), "FSDP_version is 1: only FSDP2"),
        (edit_config(world_size=3), r"model_world_size_3_rank_0\.pt: No such file"),
        (edit_config(world_size=0), "names world_size 0"),
        (edit_config(world_size=True), "names world_size True"),
        (edit_config(world_size=None), "does not name FSDP_version and world_size"),
        (lambda path: (path / "fsdp_config.json").write_text("[" * 10**5), "does not name FSDP_version"),
        (drop("fsdp_config.json"), r"neither manifest\.json nor fsdp_config\.json: its save did not finish"),
        (drop("model_world_size_2_rank_1.pt"), r"model_world_size_2_rank_1\.pt: No such file"),
        (drop("optim_world_size_2_rank_0.pt"), r"optim_world_size_2_rank_0\.pt: No such file"),
        (drop("extra_state_world_size_2_rank_1.pt"), r"extra_state_world_size_2_rank_1\.pt: No such file"),
        (drop("data_0.pt"), r"data ranks \[1\], of 2 ranks: some are missing"),
        (lambda path: [drop(f"data_{rank}.pt")(path) for rank in (0, 1)], r"no data_0\.pt"),
        (lambda path: (path / "data.pt").touch(), r"both data\.pt and data_0\.pt"),
        (link, r"data_1\.pt is a symbolic link"),
        (lambda path: (path / "lora_train_meta.json").touch(), "LoRA adapters"),
        (lambda path: os.truncate(path / "data_1.pt", 0), r"data_1\.pt is empty"),
    ],
)
def test_what_cannot_be_continued_is_refused_by_name(
    tmp_path: Path, damage: Callable[[Path], Any], message: str
) -> None:
    path = write_directory(tmp_path)
    assert layout.inspect(path).verl is not None
    damage(path)
    found = layout.inspect(path)
    assert (found.status, found.verl) == ("incomplete", None) and re.search(message, found.reason), found.reason


def test_a_number_of_data_files_that_ranks_cannot_share_is_refused(tmp_path: Path) -> None:
    path = write_directory(tmp_path, world_size=4, data={f"data_{rank}.pt": {} for rank in range(3)})
    assert "data ranks [0, 1, 2], of 4 ranks: some are missing" in layout.inspect(path).reason


def test_what_verl_can_continue_is_said(tmp_path: Path) -> None:
    path = write_directory(tmp_path)
    (path / "lora_train_meta.json").touch()
    (tmp_path / layout.POINTER).write_text("3")
    with pytest.raises(ConfigError, match=r"global_step_3: it holds LoRA adapters .*continue it in verl, or merge it"):
        choice.select(tmp_path)


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("harmed",)


@pytest.mark.parametrize("name", ["model_world_size_2_rank_1.pt", "extra_state_world_size_2_rank_0.pt", "data_1.pt"])
def test_code_in_a_file_is_named_and_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    path = write_directory(tmp_path)
    torch.save({"state": Harmful()}, path / name)
    checkpoint = layout.inspect(path).verl
    assert verl.damaged_files(checkpoint) == []
    with pytest.raises(ConfigError, match=rf"loading {name} would run posix\.mkdir"):
        verl.require_safe(checkpoint)
    assert not (tmp_path / "harmed").exists()


def test_numpy_is_trusted_in_the_extra_state_alone(tmp_path: Path) -> None:
    path = write_directory(tmp_path)
    checkpoint = layout.inspect(path).verl
    verl.require_safe(checkpoint)
    assert verl.schedule_note(checkpoint) == ""
    with pytest.raises(Exception, match="numpy"):
        torch.load(path / "extra_state_world_size_2_rank_0.pt", weights_only=True)
    torch.save({"seen": np.zeros(3)}, path / "data_0.pt")
    with pytest.raises(ConfigError, match=r"loading data_0\.pt would run numpy"):
        verl.require_safe(checkpoint)


def test_the_generator_state_of_numpy_1_is_known(tmp_path: Path) -> None:
    path = write_directory(tmp_path)
    file = path / "extra_state_world_size_2_rank_0.pt"
    rewrite(file, lambda pickled: pickled.replace(b"numpy._core.multiarray", b"numpy.core.multiarray"))
    assert torch.serialization.get_unsafe_globals_in_checkpoint(file).count("numpy.core.multiarray._reconstruct") == 1
    checkpoint = layout.inspect(path).verl
    verl.require_safe(checkpoint)
    assert verl.schedule_note(checkpoint) == ""


def rewrite(file: Path, change: Callable[[bytes], bytes]) -> None:
    """Replace what the pickle inside a file of torch says."""
    with zipfile.ZipFile(file) as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in records.items():
            archive.writestr(name, change(data) if name.endswith("data.pkl") else data)


def test_another_step_of_the_schedule_is_said(tmp_path: Path) -> None:
    path = write_directory(tmp_path, step=3)
    torch.save(extra_state(2), path / "extra_state_world_size_2_rank_0.pt")
    note = verl.schedule_note(layout.inspect(path).verl)
    assert note.startswith("verl's learning rate schedule stood at step 2, the run at step 3:")
    torch.save({"lr_scheduler": None}, path / "extra_state_world_size_2_rank_0.pt")
    with pytest.raises(ConfigError, match="has no position of a learning rate schedule"):
        verl.schedule_note(layout.inspect(path).verl)


def test_every_damaged_byte_that_matters_is_found(tmp_path: Path) -> None:
    """A changed bit, a cut or zeros anywhere: the file is named, or loads as it was."""
    path = write_directory(tmp_path)
    checkpoint = layout.inspect(path).verl
    intact = verl.schedule_note(checkpoint)
    draw = random.Random(7)
    num_found = 0
    for trial in range(300):
        file = path / draw.choice(["data_0.pt", "extra_state_world_size_2_rank_0.pt"])
        data = file.read_bytes()
        at = draw.choice([draw.randrange(len(data)), draw.randrange(len(data) - 900, len(data))])
        zeroed = data[:at] + bytes(len(data[at : at + 256])) + data[at + 256 :]
        file.write_bytes(draw.choice([flip(data, at, 1 << draw.randrange(8)), zeroed, data[:at]]))
        found = verl.damaged_files(checkpoint)
        assert found == [] or (len(found) == 1 and found[0].startswith(f"{file.name} is damaged: ")), trial
        if not found:
            assert (verl.schedule_note(checkpoint), position(path)) == (intact, Position(3, 0, 12)), trial
        num_found += len(found)
        file.write_bytes(data)
    assert num_found > 250


def test_a_record_called_a_directory_is_damage(tmp_path: Path) -> None:
    """No checksum covers this bit, and torch then reads zeros."""
    path = write_directory(tmp_path)
    change_index(path / "optim_world_size_2_rank_1.pt", lambda index: flip(index, 38, 0x10))
    (problem,) = verl.damaged_files(layout.inspect(path).verl)
    assert problem.startswith("optim_world_size_2_rank_1.pt is damaged: its record ")


def test_a_record_under_the_name_of_another_is_damage(tmp_path: Path) -> None:
    """Each opens by its name, but one name stands for two."""
    path = write_directory(tmp_path)
    change_index(path / "optim_world_size_2_rank_1.pt", lambda index: index.replace(b"/data/2PK", b"/data/3PK"))
    (problem,) = verl.damaged_files(layout.inspect(path).verl)
    assert problem.startswith("optim_world_size_2_rank_1.pt is damaged: File name in directory ")


def change_index(file: Path, change: Callable[[bytes], bytes]) -> None:
    """Edit the index at the end of an archive, which names its records."""
    data = file.read_bytes()
    start = data.index(b"PK\1\2")
    changed = change(data[start:])
    assert changed != data[start:]
    file.write_bytes(data[:start] + changed)


def flip(data: bytes, offset: int, bits: int) -> bytes:
    return data[:offset] + bytes([data[offset] ^ bits]) + data[offset + 1 :]


def test_ranks_share_the_search_for_damage(tmp_path: Path) -> None:
    path = write_directory(tmp_path)
    checkpoint = layout.inspect(path).verl
    for name in checkpoint.torch_files:
        (path / name).write_bytes(b"no archive")
    shares = [verl.damaged_files(checkpoint, share=(rank, 3)) for rank in range(3)]
    assert sorted(problem.split()[0] for share in shares for problem in share) == sorted(checkpoint.torch_files)
    assert all(shares)
    with pytest.raises(CorruptShardError, match="Expected input to be a checkpoint"):
        verl.require_safe(checkpoint)


def parts(path: Path, saved: Any, names: list[str] = NAMES) -> list[dict[str, Any]]:
    torch.save(saved, path / "optim_world_size_2_rank_1.pt")
    return verl.optimizer_parts(layout.inspect(path).verl, num_shards=2, param_names=names)


def test_numbers_become_names_in_the_order_of_the_model_file(tmp_path: Path) -> None:
    saved = optimizer_state()
    saved["state"][1]["exp_avg"] += 1
    _, part = parts(write_directory(tmp_path), saved, names=NAMES[::-1])
    assert list(part["state"]) == NAMES
    assert torch.equal(part["state"]["norm.weight"]["exp_avg"], torch.full((4,), 2.0))
    assert part["param_groups"] == [{"lr": 1e-3, "betas": (0.9, 0.999), "param_names": NAMES}]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda saved: saved["param_groups"].append({"params": []}), "it has 2 parameter groups, verl makes one"),
        (lambda saved: saved["param_groups"][0]["params"].append(2), "it steps 3 parameters, the model has 2"),
        (lambda saved: saved["state"].pop(1), r"the state of 'norm\.weight' is \[\], not that of AdamW"),
        (lambda saved: saved["state"][0].update(max_exp_avg_sq=torch.ones(8, 4)), "max_exp_avg_sq'.*not that of AdamW"),
        (
            lambda saved: saved.update(state={0: moments((4,)), 1: moments((8, 4))}),
            r"parameter 0 has the shape \(4,\), 'embed\.weight' has \(8, 4\)",
        ),
        (lambda saved: saved.pop("state"), "state"),
    ],
)
def test_another_optimizer_is_refused(tmp_path: Path, change: Callable[[Any], Any], message: str) -> None:
    saved = optimizer_state()
    change(saved)
    with pytest.raises(ConfigError, match=rf"optim_world_size_2_rank_1\.pt: .*{message}"):
        parts(write_directory(tmp_path), saved)


def test_another_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"its model has no parameter bias \(1 of 3 missing\)"):
        parts(write_directory(tmp_path), optimizer_state(), names=[*NAMES, "bias"])
    path = tmp_path / "global_step_3"
    torch.save([torch.ones(3)], path / "model_world_size_2_rank_0.pt")
    with pytest.raises(ConfigError, match="holds no tensors by name"):
        verl.count_shards(layout.inspect(path).verl)


def test_a_model_that_is_not_sharded_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="its tensors are placed as on one rank, not cut along dim 0"):
        verl.count_shards(layout.inspect(write_directory(tmp_path)).verl)
