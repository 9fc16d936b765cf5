"""The command from the user's perspective: it trains, reports what it did, and ends with the
documented exit code.
"""

import json
import os
import random
import shutil
import signal
import time

import pytest
import torch
import whole_runs
from processes import free_port, wait_until
from runs import SMALL, processes_of, run, started, wait_for_step
from small_files import write_lines
from sweeps import short_or_full
from transformers import AutoModelForCausalLM, AutoTokenizer
from whole_equality import compare_runs
from whole_runs import curve, saved_steps, train

from trainer.tools.plan.disk import export_bytes, shard_bytes
from trainer.tools.plan.memory import plan_memory
from trainer.tracking.row_losses import read_row_losses
from trainer.train.start.compose import load_config


@pytest.fixture(scope="module")
def straight(cache, tmp_path_factory):
    """An uninterrupted run on two ranks: (its run directory, what it printed)."""
    cwd = tmp_path_factory.mktemp("straight")
    done = run(cwd, 2, cache, *SMALL)
    assert done.returncode == 0, done.stdout
    return run_dir_of(cwd), done.stdout


@pytest.mark.covers("S0.2 S0.29 S0.30 S2.3:C S3.4 S3.5 S3.6 S3.7 S3.8 S3.12 S3.15 S3.55:C S3.57:C")
def test_first_run_says_what_it_does(straight):
    run_dir, output = straight
    for text in ("2 ranks on CPU", "<|im_end|>]]", "step 12/12", "val/loss", "saved"):
        assert text in output
    for text in ("Traceback", "Warning", "torchrun"):
        assert text not in output
    losses = curve(run_dir)
    assert losses[12] < losses[1] - 1
    for key in ("train/loss", "train/lr(1e-3)", "train/time(s)", "train/grad_norm"):
        assert list(curve(run_dir, key)) == list(range(1, 13)), key
    assert sorted(curve(run_dir, "val/loss")) == [6, 12]
    text = (run_dir / "metrics.jsonl").read_text()
    assert text.count('"kind":"train"') == 12, "a rank other than 0 writes too"
    assert saved_steps(run_dir) == [3, 6, 9, 12]


def test_a_checkpoint_takes_the_disk_that_was_planned(straight):
    config = load_config([*SMALL, "trainer.device=cpu"])
    plan = plan_memory(config, 2)
    planned_bytes = shard_bytes(plan) + export_bytes(config, plan)
    files = [
        path.stat().st_size
        for path in (straight[0] / "global_step_12").rglob("*")
        if path.is_file()
    ]
    few = 300_000  # bytes of names and the like that are not planned, whatever the model
    assert planned_bytes == pytest.approx(sum(files), abs=few)


def run_dir_of(cwd):
    return cwd / "checkpoints" / "e2e" / "quickstart"


def kill_after(step, cwd, *overrides, delay_s=0.0):
    """Start the command. Kill all its processes `delay_s` after it logged this step and has a
    checkpoint.
    """
    with started(cwd, 2, *overrides) as process:
        wait_for_step(run_dir_of(cwd), step, process)
        assert wait_until((run_dir_of(cwd) / "latest_checkpointed_iteration.txt").exists)
        time.sleep(delay_s)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert wait_until(lambda: processes_of(cwd) == []), "a rank outlived its job"


def losses_of_rows(run_dir):
    losses, _ = read_row_losses(run_dir / "row_losses.jsonl")
    return {step: (found.ids, found.loss_sums.tolist()) for step, found in losses.items()}


def every_value(run_dir, key):
    """Return (step, value) of all attempts, including rows that no longer count."""
    lines = (run_dir / "metrics.jsonl").read_text().split("\n")[:-1]
    return {(row["step"], row[key]) for row in map(json.loads, lines) if key in row}


@pytest.fixture(scope="module")
def killed(cache, tmp_path_factory):
    """Where a run was started that was killed after step 4."""
    cwd = tmp_path_factory.mktemp("killed")
    kill_after(4, cwd, cache, *SMALL)
    return cwd


@pytest.mark.covers("S3.27 S3.28 S3.29")
def test_kill_9_then_the_same_command(straight, killed, cache, tmp_path):
    """After kills and restarts, every attempt equals the uninterrupted run bit for bit.

    With `pytest --full`, the run is killed twice more at random moments. The kills of test_kills.py
    do not involve the launcher.
    """
    seed = 0
    chance = random.Random(seed)
    run_dir = run_dir_of(tmp_path)
    shutil.copytree(killed, tmp_path, dirs_exist_ok=True)
    for step in sorted(chance.sample(range(5, 12), short_or_full(0, full=2))):
        delay_s = chance.uniform(0.0, 0.5)
        print(f"seed {seed}: kill {delay_s:.2f} s after step {step}")
        kill_after(step, tmp_path, cache, *SMALL, delay_s=delay_s)
    train(run_dir, 2, cache, *SMALL)
    found = compare_runs(straight[0], run_dir, steps=12)
    assert found.num_equal > 10 and not found.differences, found.differences
    assert losses_of_rows(run_dir) == losses_of_rows(straight[0])
    for key in ("train/loss", "train/grad_norm", "val/loss"):
        assert every_value(run_dir, key) == every_value(straight[0], key), key


@pytest.mark.covers("S3.29 S3.30 S3.31")
def test_continue_on_other_ranks(straight, killed, cache, tmp_path):
    run_dir = run_dir_of(tmp_path)
    shutil.copytree(killed, tmp_path, dirs_exist_ok=True)
    assert "continuing at step" in train(run_dir, 4, cache, *SMALL)
    expected = curve(straight[0])
    for step, loss in curve(run_dir).items():
        assert loss == pytest.approx(expected[step], rel=1e-6)
    for key in ("train/total_token_count", "train/total_valid_token_count"):
        assert curve(run_dir, key) == curve(straight[0], key)


@pytest.mark.covers("S3.16 S3.26")
def test_signal_saves_and_leaves_with_75(straight, cache, tmp_path):
    """Stop one run with a signal after TMPDIR was emptied, then with SIGTERM to a single rank, then
    let it finish.
    """
    (temporary := tmp_path / "tmp").mkdir()
    words = (cache, *SMALL, "trainer.save_freq=-1")
    run_dir = run_dir_of(tmp_path)
    saved = 0
    for number in short_or_full((signal.SIGINT,), full=(signal.SIGINT, signal.SIGUSR1)):
        with started(tmp_path, 2, *words, TMPDIR=str(temporary)) as process:
            wait_for_step(run_dir, saved + 1, process)
            for left in temporary.iterdir():
                shutil.rmtree(left, ignore_errors=True)
            before = max(curve(run_dir))
            process.send_signal(number)
            at = max(curve(run_dir))
            output, _ = process.communicate(timeout=60)
        assert process.returncode == 75, output
        assert "resume with the same command" in output and "Traceback" not in output
        assert processes_of(tmp_path) == []
        saved = int((run_dir / "latest_checkpointed_iteration.txt").read_text())
        assert before <= saved <= at + 2
    place = f"trainer.default_local_dir={run_dir}"
    with whole_runs.started(2, *words, place, log=tmp_path / "log") as attempt:
        assert wait_until(lambda: max(curve(run_dir)) > saved)
        attempt.send(signal.SIGTERM, 1)
        assert attempt.wait(60.0) == 75, attempt.output
    train(run_dir, 2, *words)
    assert curve(run_dir) == curve(straight[0])


def test_two_machines_are_one_run(straight, cache, tmp_path):
    """Two agents with one rank each on this host compute the same numbers as two ranks of one
    agent.
    """
    nodes = {"NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with started(tmp_path, 1, cache, *SMALL, **nodes, NODE_RANK="1") as second:
        first = run(tmp_path, 1, cache, *SMALL, **nodes, NODE_RANK="0")
        assert first.returncode == 0, first.stdout
        assert second.wait(timeout=30) == 0
    ours = curve(run_dir_of(tmp_path))
    assert ours == curve(straight[0])


def test_cannot_write_is_73(cache, tmp_path):
    (tmp_path / "file").write_text("")
    failed = run(tmp_path, 2, cache, *SMALL, f"trainer.default_local_dir={tmp_path}/file/run")
    assert failed.returncode == 73, failed.stdout
    assert "cannot write" in failed.stdout and "Traceback" not in failed.stdout


@pytest.mark.covers("S0.5 S3.11 S3.13 S3.23")
def test_export_gives_the_loss_that_the_trainer_reported(cache, tmp_path):
    """Check weights, tokenizer, template and mask of the export against `val/loss`, with
    transformers only.
    """
    turns = ("user", "Add 1 to x."), ("assistant", "x + 1"), ("user", "Why?"), ("assistant", "So!")
    chat = [{"role": role, "content": text} for role, text in turns]
    messages = [chat[:2], chat]
    write_lines(tmp_path / "val.jsonl", ({"messages": chat} for chat in messages))
    run_dir = tmp_path / "run"
    changes = (
        "trainer.total_training_steps=4",
        "trainer.checkpoint.export_dtype=float32",
        "trainer.save_freq=-1",
    )
    train(run_dir, 2, cache, *SMALL, *changes, f"data.val_files={tmp_path}/val.jsonl")
    export = run_dir / "global_step_4" / "huggingface"
    model = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(export)
    total = 0.0
    count = 0
    for chat in messages:
        encoded = tokenizer.apply_chat_template(
            chat, return_dict=True, return_assistant_tokens_mask=True
        )
        ids = torch.tensor(encoded["input_ids"])
        is_supervised = torch.tensor(encoded["assistant_masks"]).bool()[1:]
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0, :-1][is_supervised]
        losses = torch.nn.functional.cross_entropy(logits, ids[1:][is_supervised], reduction="none")
        total += losses.sum().item()
        count += len(losses)
    assert curve(run_dir, "val/loss")[4] == pytest.approx(total / count, rel=1e-6)
