"""The mirror: the checkpoints that it holds, the checkpoint that a new machine restores, and the
starts that it refuses.
"""

import json
import socket
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from checkpoint_fakes import is_whole, save
from fsspec.registry import known_implementations
from mirror_faults import (
    URL,
    FaultyStorage,
    mirrored,
    restored,
    steps_in,
    trainer_of,
    uploader,
)
from mirror_faults import in_order as in_order  # fixtures
from mirror_faults import run_dir as run_dir
from processes import wait_until
from small_files import write_json

from trainer.checkpoint import layout, retention
from trainer.checkpoint.choice import NoUsableCheckpointError
from trainer.checkpoint.storage import Storage, require_usable
from trainer.cli import checkpoint, mirror
from trainer.config import ConfigError, TrainerConfig
from trainer.errors import ResumableError
from trainer.launch import mirroring
from trainer.launch.ranks import NodeLayout
from trainer.runtime.json_lines import read_object
from trainer.tools.mirror import STATE, restore
from trainer.tools.mirror import __main__ as process
from trainer.tools.mirror.upload import LOCK, Uploader
from trainer.tracking.events_file import read_events
from trainer.train.start.compose import load_config

START = '{"ts":1,"attempt":3,"step":0,"kind":"start","level":"info","message":""}\n'


def test_the_newest_and_the_best_stay_and_what_is_older_goes(run_dir, tmp_path):
    storage = mirrored(run_dir, 2, 4, 6, 8)
    assert steps_in(storage) == [2, 6, 8] == read_object(run_dir / STATE)["steps"]
    new = tmp_path / "new"
    assert restored(new, storage) == new / "global_step_8" and is_whole(new / "global_step_8")
    for name in ("metrics.jsonl", "run.json"):
        assert (new / name).read_bytes() == (run_dir / name).read_bytes()
    assert layout.read_pointer(new).step == 8


def test_a_damaged_checkpoint_is_not_uploaded_and_holds_up_no_newer_one(run_dir):
    storage = FaultyStorage()
    own = uploader(run_dir, storage)
    save(run_dir, 2)
    damaged = run_dir / "global_step_2" / "data.pt"
    damaged.write_bytes(b"dAta 2")
    for saved, held in (([], []), ([4], [4]), ([6], [4, 6])):
        save(run_dir, *saved)
        with pytest.raises(OSError, match=r"data\.pt changed after it was written"):
            own.sync()
        assert steps_in(storage) == held == read_object(run_dir / STATE)["steps"]
        assert "data.pt" in read_object(run_dir / STATE)["failed"]


def test_a_directory_of_damaged_checkpoints_takes_the_mirrors(run_dir):
    storage = mirrored(run_dir, 2)
    layout.quarantine(run_dir / "global_step_2", "damaged")
    assert is_whole(restored(run_dir, storage))
    storage.store.clear()
    layout.quarantine(run_dir / "global_step_2", "damaged again")
    with pytest.raises(NoUsableCheckpointError, match="set aside"):
        restored(run_dir, storage)


def test_rotation_spares_what_goes_up(run_dir):
    storage = FaultyStorage()
    own = uploader(run_dir, storage)
    put = storage.put_file

    def rotate_meanwhile(lpath, rpath, **kwargs):
        if not (run_dir / "global_step_4").exists():
            save(run_dir, 4)
        retention.rotate(run_dir, keep=1)
        put(lpath, rpath)

    storage.put_file = rotate_meanwhile
    save(run_dir, 2)
    own.sync()
    assert steps_in(storage) == [2]
    retention.rotate(run_dir, keep=1)
    assert not (run_dir / "global_step_2").exists()
    own.sync()
    assert steps_in(storage) == [2, 4]


def test_the_mirror_of_another_run_is_refused_at_the_start_and_by_an_upload(run_dir, tmp_path):
    """A storage that was unreachable at the start is contacted again before the first upload."""
    storage = mirrored(run_dir, 2)
    restored(run_dir, storage)
    storage._put(f"{URL}/run.json", b'{"project_name": "toy", "experiment_name": "other"}')
    for path in (run_dir, tmp_path / "new"):
        with pytest.raises(ConfigError, match="'other'"):
            restored(path, storage)
    save(run_dir, 4)
    before = dict(storage.store)
    with pytest.raises(ConfigError, match="'other'"):
        uploader(run_dir, storage).sync()
    assert storage.store == before


def test_a_run_that_was_mirrored_elsewhere_does_not_overwrite_a_mirror_of_its_name(
    run_dir, tmp_path
):
    """A directory without an id is not refused, because a power cut may have lost the id."""
    storage = FaultyStorage()
    other = tmp_path / "other"
    restored(run_dir, storage)
    save(run_dir, 2, 4)
    uploader(run_dir, storage).sync()
    other.mkdir()
    save(other, 6, nonce="other")
    uploader(other, FaultyStorage()).sync()
    before = dict(storage.store)
    for act in (lambda: restored(other, storage), uploader(other, storage).sync):
        with pytest.raises(ConfigError, match="belongs to a different run with the same name"):
            act()
    assert storage.store == before
    for path in (run_dir, tmp_path / "new"):
        assert is_whole(restored(path, storage))
    # the new machine saves and keeps nothing that the mirror holds
    save(tmp_path / "new", 8, 10)
    retention.rotate(tmp_path / "new", keep=1)
    uploader(tmp_path / "new", storage).sync()
    assert steps_in(storage) == [2, 4, 10]


def test_a_start_from_a_mirror_says_whose_run_it_continues(run_dir, tmp_path, caplog):
    """A second run with the same names in an empty directory silently continued the first."""
    storage = mirrored(run_dir, 2, 4)
    restored(tmp_path / "new", storage)
    [warning] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    run_id = read_object(run_dir / STATE)["id"]
    manifest = layout.inspect(run_dir / "global_step_4").manifest
    place = f"{socket.gethostname()}:{run_dir}"
    for fact in (run_id, "step 4", manifest.created_utc, place, "trainer.experiment_name"):
        assert fact in warning


def test_a_mirror_that_another_machine_took_over_is_left_to_it(run_dir, tmp_path):
    """Both machines trained the run, and each replaced the checkpoints of the other."""
    storage = FaultyStorage()
    first = uploader(run_dir, storage)
    save(run_dir, 2)
    first.sync()
    new = tmp_path / "new"
    restored(new, storage)
    save(new, 4)
    second = uploader(new, storage)
    second.sync()
    save(run_dir, 6)
    before = dict(storage.store)
    with pytest.raises(ConfigError, match=f"another process of the same run .*:{new}, since"):
        first.sync()
    assert storage.store == before and first.is_behind
    save(new, 8)
    second.sync()
    assert steps_in(storage) == [2, 4, 8]


def test_a_run_directory_that_lost_its_id_gets_it_back(run_dir):
    storage = mirrored(run_dir, 2, 4)
    (run_dir / STATE).unlink()
    restored(run_dir, storage)
    save(run_dir, 6)
    uploader(run_dir, storage).sync()
    claim = json.loads(storage.cat_file(f"{URL}/run.json"))
    assert claim["id"] == read_object(run_dir / STATE)["id"]
    assert steps_in(storage) == [2, 4, 6]


def test_a_mirror_that_vanishes_during_a_run_is_claimed_again(run_dir, tmp_path):
    """Another run could take it over, because it no longer had a run.json."""
    storage = FaultyStorage()
    own = uploader(run_dir, storage)
    for step in (2, 4):
        storage.store.clear()
        save(run_dir, step)
        own.sync()
    assert f"{URL.removeprefix('memory:/')}/run.json" in storage.store
    del storage.store[f"{URL.removeprefix('memory:/')}/run.json"]
    stranger = tmp_path / "stranger"
    stranger.mkdir()
    save(stranger, 6, nonce="other")
    new = tmp_path / "new"
    for act in (lambda: restored(new, storage), uploader(stranger, storage).sync):
        with pytest.raises(ConfigError, match=r"no run\.json that names the run.*\nFix.*write \{"):
            act()
    restored(run_dir, storage)
    assert is_whole(restored(new, storage))


@pytest.mark.parametrize("way", ["{0}", "{0}/../run", "{0}/../link"])
def test_a_run_directory_that_is_its_own_mirror_is_refused(way, run_dir, tmp_path):
    """The rotation of the mirror deleted the run's checkpoints."""
    (tmp_path / "link").symlink_to(run_dir)
    save(run_dir, 2, 4, 6, 8)
    before = set(run_dir.rglob("*"))
    storage = Storage(f"file://{way.format(run_dir)}")
    for act in (
        lambda own: restore.prepare(own, storage),
        lambda own: Uploader(own, storage).sync(),
    ):
        with pytest.raises(ConfigError, match="is the run directory"):
            act(trainer_of(run_dir))
    assert set(run_dir.rglob("*")) - before == {run_dir / STATE, run_dir / LOCK}
    restore.prepare(trainer_of(run_dir), Storage(f"file://{tmp_path}/other"))


def test_disable_refuses_a_mirror_with_checkpoints(run_dir, tmp_path):
    with pytest.raises(ConfigError, match="holds checkpoints up to step 2, which are never"):
        restored(tmp_path / "new", mirrored(run_dir, 2), resume_mode="disable")


@pytest.mark.parametrize("kind", ["refused", "silent"])
def test_an_unreachable_storage_holds_up_only_a_run_without_a_checkpoint(
    kind, run_dir, tmp_path, monkeypatch, caplog
):
    save(run_dir, 2)
    storages = [FaultyStorage({1: kind}), FaultyStorage({1: kind})]
    monkeypatch.setattr(TrainerConfig, "dist_timeout_s", 0.2)
    starts = [trainer_of(path) for path in (run_dir, tmp_path / "new")]
    process.prepare_in_time(starts[0], Storage(URL, storages[0]))
    process.prepare_in_time(starts[0], Storage("ftp://127.0.0.1:9/run"))
    assert caplog.text.count("training continues") == 2
    with pytest.raises(ResumableError):
        process.prepare_in_time(starts[1], Storage(URL, storages[1]))
    for storage in storages:
        storage.answers.set()


def test_a_start_without_credentials_is_not_tried_again(tmp_path, monkeypatch):
    """With exit code 75, a scheduler would start it again and again."""

    class NoCredentialsError(Exception):
        """As botocore raises it."""

    monkeypatch.setattr(FaultyStorage, "cat_file", Mock(side_effect=NoCredentialsError))
    with pytest.raises(ConfigError, match="grant access"):
        restored(tmp_path, FaultyStorage())


@contextmanager
def following(run_dir, storage):
    """Upload as during a run, until the end of the block."""
    ending = threading.Event()
    arguments = (trainer_of(run_dir), Storage(URL, storage), ending)
    thread = threading.Thread(target=process.follow, args=arguments)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join()


def test_the_process_beside_a_run_uploads_until_its_end_and_retries_what_failed(
    run_dir, monkeypatch
):
    monkeypatch.setattr(process, "RETRY_AFTER_S", 0.0)
    storage = FaultyStorage({4: "refused"})
    events = run_dir / "events.jsonl"
    events.write_text(START)
    save(run_dir, 2)
    with following(run_dir, storage):
        assert wait_until(lambda: read_events(events)[-1]["kind"] == "mirror")
        assert steps_in(storage) == [2]
    told = [(event["kind"], event["step"]) for event in read_events(events)]
    assert told == [("start", 0), ("mirror_failed", 0), ("mirror", 2)]


def test_a_run_directory_that_does_not_exist_yet_is_no_failure(tmp_path, caplog):
    """Every first start warned, and then uploaded nothing for a minute."""
    storage = FaultyStorage()
    new = tmp_path / "new"
    with following(new, storage):
        time.sleep(0.1)
        new.mkdir()
        save(new, 2)
        assert wait_until(lambda: steps_in(storage) == [2])
    assert "cannot update the mirror" not in caplog.text


@pytest.mark.parametrize("kind", ["silent", "absent"])
def test_a_storage_that_stays_away_does_not_hold_up_the_end(kind, run_dir, monkeypatch):
    """The launcher starts a new process in place of a silent one, because nothing else ends a
    library call.
    """
    monkeypatch.setattr(process, "SAVE_TIMEOUT_S", 0.3)
    monkeypatch.setattr(process, "LAST_RETRY_AFTER_S", (0.0, 0.0))
    faults = {6: "silent"} if kind == "silent" else dict.fromkeys(range(99), "refused")
    storage = FaultyStorage(faults)
    ending = threading.Event()
    save(run_dir, 2)
    if kind == "absent":
        ending.set()
    assert process.follow(trainer_of(run_dir), Storage(URL, storage), ending) == 1
    assert steps_in(storage) == []
    storage.answers.set()


def test_commands_know_the_mirror(run_dir, tmp_path, capsys):
    url = f"file://{tmp_path}/mirror"
    names = ["trainer.project_name=toy", "trainer.experiment_name=toy"]
    config = load_config([f"trainer.checkpoint.mirror={url}", *names])
    save(run_dir, 2, 4)
    write_json(run_dir / "run.json", {"config": config.resolved})
    assert mirror.main([str(run_dir)]) == 0
    assert capsys.readouterr().out == f"mirror {url}  steps: 2, 4\n"
    assert is_whole(tmp_path / "mirror" / "global_step_4")
    assert checkpoint.main(["prune", str(run_dir), "--keep", "1", "--yes"]) == 0
    assert is_whole(tmp_path / "mirror" / "global_step_2")


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("bucket/path", "is not a URL"),
        ("nosuch://a/b", "nosuch"),
        ("hf://org/repo", "hf://buckets"),
        ("x3://b", "pip install"),
        ("file://mnt/run", "depends on the current directory"),
    ],
)
def test_a_url_that_cannot_work_is_refused_before_anything_is_connected(url, reason, monkeypatch):
    package = {"class": "nopackage.X", "err": "Install nopackage"}
    monkeypatch.setitem(known_implementations, "x3", package)
    with pytest.raises(ConfigError, match=reason):
        require_usable(url)


@pytest.mark.parametrize("arrives", [True, False])
def test_other_machines_wait_for_what_arrives_and_no_longer(arrives, run_dir, monkeypatch, capsys):
    """Waits nine times as long as without data; the clock is simulated."""
    words = ["hang_timeout_s=350", f"checkpoint.mirror={URL}", f"default_local_dir={run_dir}"]
    staging = run_dir / f"{layout.STAGING_PREFIX}global_step_4.1"
    now = [0.0]
    tries = iter(range(100))
    staging.mkdir()

    def sleep(seconds):
        now[0] += 600.0
        with (staging / "shard").open("ab") as file:
            file.write(b"more" if arrives else b"")

    monkeypatch.setattr(mirroring, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    monkeypatch.setattr(mirroring, "_listens", lambda layout: next(tries) == 15)
    config = load_config([f"trainer.{word}" for word in words])
    with mirroring.mirrored(config, NodeLayout(2, 1, "head", 29500)) as refusal:
        assert refusal == (None if arrives else 75)
    assert now[0] == (9000.0 if arrives else 1200.0)
    assert ("nothing arrived from memory://bucket/run" in capsys.readouterr().err) is not arrives
