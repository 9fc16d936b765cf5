"""Whole runs with a mirror: a lost machine, S3, a killed launcher, a killed upload."""

import functools
import os
import shutil
import signal
import subprocess
import sys
import threading

import psutil
import pytest
import whole_runs
from checkpoint_fakes import is_whole, save
from exports import tensors_in
from moto.server import ThreadedMotoServer
from processes import wait_until
from toy import differing

from trainer.launch import mirroring
from trainer.launch.mirroring import mirrored
from trainer.launch.ranks import NodeLayout
from trainer.runtime.processes import is_alive
from trainer.runtime.signals import heeded_signals
from trainer.tools.verify.equality import compare_runs
from trainer.train.start.compose import load_config


def train(*words, log, before=None):
    """Train on two ranks as the launcher does."""
    with mirrored(load_config(list(words)), NodeLayout()) as refusal:
        if refusal is not None:
            return refusal, ""
        return whole_runs.run(2, *words, log=log, before=before)


def test_a_machine_that_is_lost_is_continued_on_another_bit_by_bit(tmp_path):
    tiny = whole_runs.tiny_model(tmp_path / "tiny")
    words = (*tiny, "trainer.total_training_steps=6", "trainer.save_freq=2", "trainer.test_freq=3")
    straight = tmp_path / "straight"
    lost = tmp_path / "lost"
    whole_runs.train(straight, 2, *words)
    own = (
        *words,
        f"trainer.default_local_dir={lost}",
        f"trainer.checkpoint.mirror=file://{tmp_path}/mirror",
    )
    stop = functools.partial(whole_runs.stop_in_step, 4)
    assert train(*own, log=tmp_path / "log", before=stop)[0] == 75
    shutil.rmtree(lost)
    code, output = train(*own, log=tmp_path / "log")
    assert code == 0 and "global_step_4, continuing at step 5 of 6" in output
    same = compare_runs(straight, lost, steps=6)
    assert same.differences == [] and same.num_equal > 24
    exports = [path / "global_step_6" / "huggingface" for path in (straight, lost)]
    assert differing(*map(tensors_in, exports)) == []
    assert (tmp_path / "mirror" / "global_step_6" / "manifest.json").exists()


@pytest.fixture
def bucket(monkeypatch):
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    import boto3

    boto3.client("s3").create_bucket(Bucket="runs")
    yield "s3://runs/toy"
    server.stop()


def test_s3_holds_a_run_and_gives_it_back(bucket, tmp_path, capfd):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    config = load_config(config_words(run_dir, bucket))
    save(run_dir, 2)
    with mirrored(config, NodeLayout()) as refusal:
        assert refusal is None
        save(run_dir, 4)
    shutil.rmtree(run_dir)
    with mirrored(config, NodeLayout()) as refusal:
        assert refusal is None and is_whole(run_dir / "global_step_4")
        save(run_dir, 6, 8)
    assert "restored global_step_4" in capfd.readouterr().out
    import boto3

    listed = boto3.client("s3").list_objects_v2(Bucket="runs")["Contents"]
    names = {entry["Key"].split("/")[1] for entry in listed}
    assert {name for name in names if "step" in name} == {"global_step_4", "global_step_8"}


def config_words(run_dir, url):
    return [f"trainer.default_local_dir={run_dir}", f"trainer.checkpoint.mirror={url}"]


LAUNCH = """
import sys, time
from trainer.launch.mirroring import mirrored
from trainer.launch.ranks import NodeLayout
from trainer.train.start.compose import load_config
with mirrored(load_config(sys.argv[1:]), NodeLayout()) as refusal:
    print(refusal, flush=True)
    time.sleep(60)
"""


def test_a_launcher_that_is_killed_leaves_no_process(tmp_path):
    words = config_words(tmp_path / "run", f"file://{tmp_path}/mirror")
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCH, *words], stdout=subprocess.PIPE, text=True
    )
    assert launcher.stdout.readline() == "None\n"
    (child,) = psutil.Process(launcher.pid).children()
    os.kill(launcher.pid, signal.SIGKILL)
    launcher.wait()
    assert wait_until(lambda: not is_alive(child.pid))
    launcher.stdout.close()


@pytest.mark.parametrize("way", ["a signal", "the limit", "all is up", "it fails"])
def test_the_end_of_a_run_waits_for_an_upload_and_no_longer_than_it_should(
    way, tmp_path, monkeypatch, capfd
):
    """A script replaces the upload: it would take a minute, or ends at once."""
    end = {"all is up": "", "it fails": "exit 1"}.get(way, "exec sleep 60")
    (stands_for := tmp_path / "upload").write_text(
        f"#!/bin/bash\n[ $4 = prepare ] && exit\ncat > /dev/null\n{end}\n"
    )
    stands_for.chmod(0o755)
    monkeypatch.setattr(mirroring.sys, "executable", str(stands_for))
    monkeypatch.setattr(mirroring, "REPEAT_S", 0.0)
    monkeypatch.setattr(mirroring, "SAVE_TIMEOUT_S", 1.0 if way == "the limit" else 60.0)
    config = load_config(config_words(tmp_path / "run", f"file://{tmp_path}/mirror"))
    processes = set(psutil.Process().children())
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, heeded_signals())
    try:
        with mirrored(config, NodeLayout()) as refusal:
            assert refusal is None
            if way == "a signal":
                # only this thread blocks it
                signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        assert signal.sigtimedwait(heeded_signals(), 0) is None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    said = capfd.readouterr()
    assert ("lacks the latest checkpoints" in said.err) is (way != "all is up")
    assert "continue the run" not in said.err  # a finished run would only say that it is complete
    assert set(psutil.Process().children()) <= processes


def test_an_upload_process_that_is_killed_is_started_again_and_said(tmp_path, monkeypatch, capfd):
    """A run continued for days without its mirror, and reported it only at its end."""
    monkeypatch.setattr(mirroring, "RESTART_AFTER_S", 0.0)
    run_dir = tmp_path / "run"
    before = set(psutil.Process().children())
    run_dir.mkdir()
    with mirrored(
        load_config(config_words(run_dir, f"file://{tmp_path}/mirror")), NodeLayout()
    ) as refusal:
        assert refusal is None
        (first,) = set(psutil.Process().children()) - before
        first.kill()
        save(run_dir, 2)
        assert wait_until((tmp_path / "mirror" / "global_step_2" / "manifest.json").exists)
    said = capfd.readouterr().err
    assert (
        f"uploads to file://{tmp_path}/mirror was killed by SIGKILL" in said and "lacks" not in said
    )
    assert set(psutil.Process().children()) <= before
