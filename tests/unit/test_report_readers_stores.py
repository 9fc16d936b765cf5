"""TensorBoard's event files as its own library writes them: purged steps, several files,
tensors.
"""

import struct
from pathlib import Path

import numpy as np
import pytest

from trainer.report.readers import UnreadableLogError, read_run
from trainer.report.readers import tensorboard as reader
from trainer.report.readers.tensorboard import scalars_of
from trainer.report.run_log import RunLog
from trainer.tracking import Tracking


def logged(run_dir: Path, *, steps: range, exit_code: int = 0) -> None:
    """One attempt of a run through our facade."""
    tracking = Tracking(
        "project", "exp", "tensorboard", {"optim": {"lr": 1e-4}}, run_dir=run_dir, total_steps=8
    )
    for step in steps:
        share = step / 4 if step != 3 else float("nan")
        tracking.log(
            {"train/loss": step / 128, "train/lr(1e-3)": 0.125, "data/share(%)": share}, step=step
        )
        if step % 2 == 0:
            tracking.log({"val/loss": float(step)}, step=step)
    tracking.finish(exit_code)


def values(log: RunLog, key: str) -> dict[int, float]:
    series = log.series[key]
    return dict(zip(series.steps.tolist(), series.values.tolist(), strict=True))


def test_our_event_files_read_like_the_file_that_is_the_source_of_truth(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    logged(tmp_path, steps=range(1, 7), exit_code=1)
    logged(tmp_path, steps=range(5, 9))
    truth, log = read_run(tmp_path), read_run(tmp_path / "tensorboard")
    assert (truth.source, log.source) == ("fsdp-sft", "tensorboard")
    for key in ("train/loss", "train/lr", "val/loss"):
        assert values(log, key) == values(truth, key), key
    np.testing.assert_array_equal(
        log.series["data/share(%)"].values, [0.25, 0.5, np.nan, 1, 1.25, 1.5, 1.75, 2]
    )
    assert log.num_attempts == 2


def test_purged_steps_of_earlier_files_do_not_come_back(tmp_path: Path) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    for purge_step, steps, value in ((None, range(1, 11), 1.0), (7, range(7, 9), 2.0)):
        with tensorboard.SummaryWriter(
            str(tmp_path), purge_step=purge_step, filename_suffix=f".{value}"
        ) as writer:
            for step in steps:
                writer.add_scalar("Train/Loss", value, step)
    log = read_run(tmp_path)
    assert values(log, "train/loss") == dict.fromkeys(range(1, 7), 1.0) | dict.fromkeys((7, 8), 2.0)
    assert (log.num_lost_steps, log.num_disordered_rows, log.num_attempts) == (4, 0, 2)


def test_all_points_are_read_and_only_scalars(tmp_path: Path) -> None:
    """The stock reader keeps 10,000 points."""
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    with tensorboard.SummaryWriter(str(tmp_path / "tensorboard")) as writer:
        for step in range(12_000):
            writer.add_scalar("Train/Loss", step, step)
        writer.add_text("note", "hello", 1)
        writer.add_histogram("weights", np.arange(10.0), 1)
        writer.add_scalar("tensor", 0.5, 3, new_style=True)
    log = read_run(tmp_path)
    assert len(log.series["train/loss"]) == 12_000
    assert set(log.series) == {"train/loss", "tensor"}
    assert log.num_unparsed == 0


def field(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | 2, len(content)]) + content


@pytest.mark.parametrize(
    ("tensor", "scalar"),
    [
        (b"\x08\x01" + field(4, struct.pack("<f", 0.5)), 0.5),
        (b"\x08\x02" + field(4, struct.pack("<d", 0.1)), 0.1),
        (b"\x08\x09" + field(4, struct.pack("<q", -7)), -7.0),
        (b"\x08\x01" + field(5, struct.pack("<f", 0.25)), 0.25),
        (b"\x08\x02" + field(6, struct.pack("<d", 1.5)), 1.5),
        (b"\x08\x03" + field(7, b"\x05"), 5.0),
        (b"\x08\x09" + b"\x50\x06", 6.0),
        (b"\x08\x01" + field(4, struct.pack("<2f", 1, 2)), None),
        (b"\x08\x07" + field(8, b"text"), None),
    ],
)
def test_tensor_scalars_of_every_kind(tensor: bytes, scalar: float | None) -> None:
    message = pytest.importorskip("tensorboard.compat.proto.event_pb2").Event
    event = b"\x10\x03" + field(5, field(1, field(1, b"tag") + field(8, tensor)))
    assert scalars_of(message.FromString(event)) == ({} if scalar is None else {"tag": scalar})


def test_event_files_without_tensorboard_name_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard")
    logged(tmp_path, steps=range(1, 3))
    monkeypatch.setattr(reader, "find_spec", lambda name: None)
    with pytest.raises(
        UnreadableLogError, match=r"event files need tensorboard: pip install 'tensorboard>=2\.18'"
    ):
        read_run(tmp_path / "tensorboard")


def test_of_several_directories_the_newest_is_read_and_the_others_are_mentioned(
    tmp_path: Path,
) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    for name in ("Jan01", "Jan02"):
        with tensorboard.SummaryWriter(str(tmp_path / "runs" / name)) as writer:
            writer.add_scalar("train/loss", 0.5 if name == "Jan01" else 0.25, 1)
    (old,), (new,) = ((tmp_path / "runs" / name).iterdir() for name in ("Jan01", "Jan02"))
    old.rename(old.with_name("events.out.tfevents.1700000000.host.1.0"))
    new.rename(new.with_name("events.out.tfevents.1700000001.host.1.0"))
    log = read_run(tmp_path)
    assert values(log, "train/loss") == {1: 0.25}
    assert "1 other directories with event files are left out" in log.notes[-1]
