"""Where a run of verl stood in its data, from real states of torchdata's loader. Needs no verl."""

from pathlib import Path
from typing import Any

import pytest
from interop.verl_files import loader_state, position, write_directory
from interop.verl_run import Settings, build_loader

from trainer.config import ConfigError
from trainer.progress import Position


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (1, Position(1, 0, 4)),
        (4, Position(4, 0, 16)),
        (5, Position(5, 1, 0)),  # verl itself resumes here into an empty epoch
        (6, Position(6, 1, 4)),
        (10, Position(10, 2, 0)),
        (13, Position(13, 2, 12)),
    ],
)
def test_position_counts_the_samples_of_all_ranks(
    tmp_path: Path, num_workers: int, step: int, expected: Position
) -> None:
    settings = Settings((step,), num_workers=num_workers)
    data = {f"data_{rank}.pt": loader_state(settings, rank=rank) for rank in (0, 1)}
    assert position(write_directory(tmp_path, step=step, data=data)) == expected
    assert position(tmp_path / f"global_step_{step}", train_batch_size=64) == expected, "ours may be another"


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_drained_loader_is_the_start_of_the_next_epoch(tmp_path: Path, num_workers: int) -> None:
    settings = Settings((99,), num_samples=23, num_workers=num_workers)
    loader, _ = build_loader(settings, rank=0, world_size=2)
    assert len(list(loader)) == 5
    state = loader.state_dict()
    assert state["_iterator_finished"] is True
    path = write_directory(tmp_path, step=5, data={"data_0.pt": state, "data_1.pt": state})
    assert position(path, num_samples=23) == Position(5, 1, 0)


def test_a_resumed_loader_counts_on(tmp_path: Path) -> None:
    loader, _ = build_loader(Settings(()), rank=0, world_size=2)
    loader.load_state_dict(loader_state(Settings((2,))))
    next(iter(loader))
    state = loader.state_dict()
    path = write_directory(tmp_path, step=3, data={"data_0.pt": state, "data_1.pt": state})
    assert position(path) == Position(3, 0, 12)


def test_steps_since_the_last_snapshot_of_the_loader_count(tmp_path: Path) -> None:
    loader, _ = build_loader(Settings((), num_workers=1), rank=0, world_size=2)
    loader.snapshot_every_n_steps = 2
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    state = loader.state_dict()
    assert state["_steps_since_snapshot"] == 1
    path = write_directory(tmp_path, step=3, data={"data_0.pt": state, "data_1.pt": state})
    assert position(path) == Position(3, 0, 12)


@pytest.mark.parametrize("wrong_batch_size", [5, 6])
def test_the_legacy_trainer_has_one_data_file(tmp_path: Path, wrong_batch_size: int) -> None:
    path = write_directory(tmp_path, data={"data.pt": loader_state(Settings((3,)))})
    assert position(path) == Position(3, 0, 12)
    message = rf"data\.pt of 2 ranks, 2 samples a batch, .* data\.train_batch_size={wrong_batch_size}: set it to"
    with pytest.raises(ConfigError, match=message):
        position(path, train_batch_size=wrong_batch_size)


def test_ranks_of_sequence_parallelism_share_a_data_file(tmp_path: Path) -> None:
    path = write_directory(
        tmp_path, world_size=4, data={f"data_{r}.pt": loader_state(Settings((3,)), rank=r) for r in (0, 1)}
    )
    assert position(path) == Position(3, 0, 12)
    with pytest.raises(ConfigError, match="data files of other ranks are missing"):
        position(path, train_batch_size=8)


def test_data_that_do_not_fit_the_position_are_refused(tmp_path: Path) -> None:
    path = write_directory(tmp_path, step=7)
    assert position(path) == Position(7, 1, 8)
    with pytest.raises(ConfigError, match="after step 7 it had taken 2 batches of its epoch, but 26 samples make 6"):
        position(path, num_samples=26)
    with pytest.raises(ConfigError, match="but 3 samples make 0 steps an epoch"):
        position(path, num_samples=3)


def test_data_ranks_at_different_places_are_refused(tmp_path: Path) -> None:
    data = {"data_0.pt": loader_state(Settings((3,))), "data_1.pt": loader_state(Settings((2,)))}
    with pytest.raises(ConfigError, match="its data ranks stand at different places"):
        position(write_directory(tmp_path, data=data))


UNEVEN = {"_sampler_iter_yielded": 2, "_sampler_iter_state": {"samples_yielded": 7}, "_iterator_finished": False}


@pytest.mark.parametrize("state", [{}, {"_snapshot": {}}, {"_sampler_iter_state": None}, UNEVEN, [], 7])
def test_another_data_state_is_refused(tmp_path: Path, state: Any) -> None:
    with pytest.raises(ConfigError, match=r"data_0\.pt is not the position of a torchdata StatefulDataLoader"):
        position(write_directory(tmp_path, data={"data_0.pt": state, "data_1.pt": state}))
