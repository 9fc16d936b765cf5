"""A checkpoint written by verl's own code continues here, and our imitation of its files has not drifted from it.

Needs VERL_PYTHON, an interpreter that has verl 0.9.1 and torchdata.
"""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from interop.verl_files import EXPECTED, expected_tensors, load_checkpoint, run_in_verl, shape_of, write_run
from interop.verl_run import Settings
from ranks import run_ranks
from toy import write_model_config

from trainer.checkpoint import layout, verl
from trainer.progress import Position

pytestmark = [
    pytest.mark.verl,
    pytest.mark.skipif("VERL_PYTHON" not in os.environ, reason="VERL_PYTHON names no interpreter with verl"),
]


def save_with_verl(run_dir: Path, config_dir: Path, world_size: int, settings: Settings) -> None:
    run_dir.mkdir()
    job = {
        "world_size": world_size,
        "run_dir": str(run_dir),
        "config_dir": str(config_dir),
        "expected": str(run_dir / EXPECTED),
        "settings": asdict(settings),
    }
    run_in_verl("save_with_verl.py", json.dumps(job))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return write_model_config(tmp_path_factory.mktemp("model"), vocab_size=163, intermediate_size=97)


@pytest.fixture(scope="module")
def run_dir(source: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("verl") / "run"
    save_with_verl(path, Path(source.path), 2, Settings((5, 7), num_workers=1))
    return path


@pytest.mark.parametrize("world_size", [1, 3])
def test_verls_own_files_come_back_bit_equal(source: Any, run_dir: Path, world_size: int) -> None:
    whole, steps, position = run_ranks(load_checkpoint, world_size, run_dir / "global_step_7", source)[0]
    expected = expected_tensors(run_dir)
    assert set(whole) == set(expected)
    assert [name for name in expected if not torch.equal(whole[name], expected[name])] == []
    assert set(steps.values()) == {7.0}
    assert position == Position(7, 1, 8)


def test_the_end_of_an_epoch_is_the_start_of_the_next(run_dir: Path) -> None:
    checkpoint = layout.inspect(run_dir / "global_step_5").verl
    assert verl.read_position(checkpoint, num_samples=22, train_batch_size=4) == Position(5, 1, 0)
    assert verl.schedule_note(checkpoint) == ""


def test_replicas_of_verl_are_read_once(source: Any, tmp_path: Path) -> None:
    save_with_verl(tmp_path / "run", Path(source.path), 4, Settings((3,), fsdp_size=2))
    path = tmp_path / "run" / "global_step_3"
    assert verl.count_shards(layout.inspect(path).verl) == 2
    whole, _, position = run_ranks(load_checkpoint, 2, path, source)[0]
    expected = expected_tensors(tmp_path / "run")
    assert all(torch.equal(whole[name], value) for name, value in expected.items())
    assert position == Position(3, 0, 12)


def test_our_imitation_has_the_form_of_verls_files(source: Any, tmp_path: Path) -> None:
    settings = Settings((3,))
    save_with_verl(tmp_path / "theirs", Path(source.path), 2, settings)
    run_ranks(write_run, 2, tmp_path / "ours", Path(source.path), settings)
    theirs, ours = (layout.inspect(tmp_path / name / "global_step_3").verl for name in ("theirs", "ours"))
    assert theirs.torch_files == ours.torch_files
    config = "fsdp_config.json"
    assert (theirs.path / config).read_text() == (ours.path / config).read_text()
    for name in theirs.torch_files:
        assert shape_of(verl._read(theirs.path / name)) == shape_of(verl._read(ours.path / name)), name
        unsafe = [sorted(torch.serialization.get_unsafe_globals_in_checkpoint(c.path / name)) for c in (theirs, ours)]
        assert unsafe[0] == unsafe[1], name
