"""A repository of the Hub as a mirror: what a checkpoint costs in commits, and what somebody
finds who loads it.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import checkpoint_fakes
import pytest
from checkpoint_fakes import content_of, is_whole, save
from fake_hub import FakeHub, serve
from huggingface_hub import HfFileSystem
from mirror_faults import restored, roll_back, trainer_of, uploader

from trainer.checkpoint import layout
from trainer.checkpoint.choice import NoUsableCheckpointError
from trainer.config import ConfigError
from trainer.launch.mirroring import is_up
from trainer.mirror.hub import storage_of
from trainer.mirror.restore import prepare
from trainer.mirror.storage import StorageError
from trainer.mirror.upload import Uploader
from trainer.run.compose import load_config

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # of the client


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HfFileSystem]:
    for found in serve(monkeypatch):
        found.mirror_url = "hf://org/model"
        yield found


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("{}\n")
    return tmp_path / "run"


def up(run_dir: Path, hub: HfFileSystem, *steps: int, **settings: object) -> Uploader:
    own = uploader(run_dir, hub, **settings)
    for step in steps:
        save(run_dir, step)
        own.sync()
    return own


def test_a_checkpoint_is_one_commit_and_comes_back(
    hub: HfFileSystem, run_dir: Path, tmp_path: Path
) -> None:
    prepare(trainer_of(run_dir), storage_of(hub.mirror_url, hub))
    up(run_dir, hub, 2, 4, 6)
    assert [title.partition(" (")[0] for title in FakeHub.commits[1:]] == [
        "step 2",
        "step 4",
        "step 6",
        "step 2 goes",
    ]
    taken = restored(tmp_path / "new", hub)
    assert taken is not None and taken.name == "global_step_6" and is_whole(taken)
    assert (taken.parent / "metrics.jsonl").exists()
    roll_back(run_dir, 4, 6)
    up(run_dir, hub).sync()
    assert FakeHub.files[layout.POINTER] == b"4\n" and not [
        name for name in FakeHub.files if "step_6" in name
    ]


@pytest.mark.parametrize(("what", "status"), [("commit", 500), ("commit", 429), ("PUT", 403)])
def test_nothing_shows_of_a_commit_that_failed_and_what_was_sent_is_not_sent_again(
    hub: HfFileSystem, run_dir: Path, what: str, status: int
) -> None:
    FakeHub.refusals[what] = status
    save(run_dir, 2)
    own = uploader(run_dir, hub)
    with pytest.raises(
        StorageError, match=r"cannot (commit|write) hf://org/model/(step 2|global_step_2)"
    ):
        own.sync()
    assert FakeHub.files == {}
    own.sync()
    assert FakeHub.commits == ["step 2 (a1b2)"]
    assert {f"global_step_2/{name}" for name in content_of(2)} < FakeHub.files.keys()
    shards = [name for name in content_of(2) if name.endswith(".pt")]
    assert len(FakeHub.uploads) == len(set(FakeHub.uploads)) <= len(shards) + 2, (
        "the logs alone, which are packed anew"
    )


def test_exports_alone_are_a_model_at_the_root_and_no_run_to_continue(
    hub: HfFileSystem, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, adapter = {"mirror_contents": "hf_model"}, {"huggingface/adapter_config.json": b"{}"}
    monkeypatch.setattr(
        checkpoint_fakes,
        "content_of",
        lambda step: content_of(step) | (adapter if step == 2 else {}),
    )
    prepare(trainer_of(run_dir, **settings), storage_of(hub.mirror_url, hub))
    FakeHub.files["README.md"] = b"# mine"
    up(run_dir, hub, 2, **settings)
    model = {"run.json", "README.md", "config.json", "manifest.json"}
    assert FakeHub.files.keys() == model | {"adapter_config.json"}
    up(run_dir, hub, 4, **settings)
    assert FakeHub.files.keys() == model
    row = {"step": 2, "attempt": 1, "kind": "val", "ts": 1.0, "val/loss": 1.0}
    (run_dir / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    up(run_dir, hub, **settings).sync()  # the best is in the history already
    assert (
        FakeHub.commits[1:] == ["step 2 (a1b2)", "step 4 (a1b4)"]
        and b'"step": 4' in FakeHub.files["manifest.json"]
    )
    with pytest.raises(NoUsableCheckpointError, match="step 4: its export alone is there"):
        restored(tmp_path / "new", hub, **settings)
    roll_back(run_dir, 2, 4)
    up(run_dir, hub, **settings).sync()
    assert b'"step": 2' in FakeHub.files["manifest.json"]


def test_the_best_of_an_evaluation_is_the_model_though_a_newer_one_lay_there(
    hub: HfFileSystem, run_dir: Path
) -> None:
    config = load_config(
        [f"trainer.default_local_dir={run_dir}", f"trainer.checkpoint.mirror={hub.mirror_url}"]
    )
    own = uploader(run_dir, hub, mirror_contents="hf_model", best_metric="eval/toy")
    save(run_dir, 2, 4, 6)
    own.sync()
    assert FakeHub.commits == ["step 6 (a1b6)"]
    for step, mean, lies_there in ((4, 0.9, 4), (6, 0.8, 4), (8, None, 4), (8, 0.95, 8)):
        if mean is None:
            save(run_dir, step)
        else:
            row = {
                "kind": "summary",
                "name": "eval/toy",
                "step": step,
                "nonce": f"a1b{step}",
                "mean": mean,
            }
            with (run_dir / "evaluations.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
        assert own.is_behind
        own.sync()
        assert f'"step": {lies_there}'.encode() in FakeHub.files["manifest.json"]
        assert is_up(config) and not own.is_behind
    assert FakeHub.commits == ["step 6 (a1b6)", "step 4 (a1b4)", "step 8 (a1b8)"]


def test_a_model_that_is_there_already_is_not_overwritten(hub: HfFileSystem, run_dir: Path) -> None:
    FakeHub.files["config.json"] = b"{}"
    with pytest.raises(ConfigError, match="holds a model already"):
        prepare(trainer_of(run_dir, mirror_contents="hf_model"), storage_of(hub.mirror_url, hub))
    assert FakeHub.commits == []


def test_a_repository_that_is_not_there_or_not_to_be_written_is_refused(
    hub: HfFileSystem, run_dir: Path
) -> None:
    FakeHub.refusals["commit"] = 403
    for url in ("hf://org/model", "hf://org/other"):
        with pytest.raises(ConfigError, match="mend that, or train without"):
            prepare(trainer_of(run_dir), storage_of(url, hub))
