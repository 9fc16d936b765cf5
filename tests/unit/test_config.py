"""The command line to a checked `Config`: mistakes are named with a fix, before anything slow
starts.
"""

import os
import resource
import subprocess
import sys
import time
from operator import attrgetter
from pathlib import Path

import pytest

from trainer.__main__ import main
from trainer.config import ConfigError, GuardRule, known_keys, parse_recorded
from trainer.train.start.compose import as_word, load_config


def error_of(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(list(overrides))
    return str(caught.value)


def test_all_unknown_keys_are_named_at_once():
    lines = error_of(
        "data.train_batchsize=8", "optim.lr=1e-5", "zzz=1", "data.max_len=4"
    ).splitlines()
    assert [line.split("'")[1] for line in lines] == ["data.train_batchsize", "zzz", "data.max_len"]


@pytest.mark.parametrize("key", known_keys())
def test_every_key_refuses_a_group_of_keys(key):
    """A value of the wrong shape is refused by name, whatever the key's type; only the
    template's variables are one.
    """
    if key != "data.apply_chat_template_kwargs":
        assert key in error_of(f"{key}={{a: 1}}")


def test_guard_rules_are_read_with_their_defaults():
    words = [
        "trainer.guard.rules=[{metric: train/grad_norm, above: 50, for: 3, do: rollback}, {metric: "
        "a, below: 1}]"
    ]
    assert load_config(words).trainer.guard.rules == [
        GuardRule("train/grad_norm", above=50.0, below=None, num_steps=3, action="rollback"),
        GuardRule("a", above=None, below=1.0, num_steps=1, action="warn"),
    ]


@pytest.mark.parametrize(
    ("entry", "named"),
    [
        ("{metric: a, over: 1}", "trainer.guard.rules[0].over"),
        ("{above: 1}", "trainer.guard.rules[0].metric"),
        ("{metric: a, above: x}", "trainer.guard.rules[0].above"),
        ("{metric: a, above: 1, for: 0}", "trainer.guard.rules[0].for"),
        ("{metric: a, above: 1, do: halt}", "trainer.guard.rules[0].do"),
        ("nonsense", "trainer.guard.rules"),
    ],
)
def test_a_guard_rule_that_cannot_be_read_is_named(entry, named):
    assert f"'{named}'" in error_of(f"trainer.guard.rules=[{entry}]")


def test_cfg_prints_what_would_run(capsys):
    assert main(["--cfg", "job", "trainer.seed=11", "experiment=gsm8k"]) == 0
    printed = capsys.readouterr().out
    assert (
        "seed: 11" in printed
        and "prompt_key: question" in printed
        and "checkpoints/gsm8k/" in printed
    )


def test_help_prints_every_key(capsys):
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert "usage:" in printed and "bash run_sft.sh report" in printed
    assert [key for key in known_keys() if f"{key.rpartition('.')[2]}:" not in printed] == []


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("data.train_files=[a.jsonl,b.parquet]", "data.train_files", ["a.jsonl", "b.parquet"]),
        ("data.train_files=/a b/*.json", "data.train_files", "/a b/*.json"),
        ("data.train_files='a=b(1)/[0-9].jsonl'", "data.train_files", "a=b(1)/[0-9].jsonl"),
        ("data.train_batch_size=16.0", "data.train_batch_size", 16),
        ("data.apply_chat_template_kwargs={a: 1}", "data.apply_chat_template_kwargs", {"a": 1}),
        ("+data.apply_chat_template_kwargs.a=1", "data.apply_chat_template_kwargs", {"a": 1}),
        ("model.fsdp_config.fsdp_size=2", "model.fsdp_config.fsdp_size", 2),
        ("optim.betas=[0.8,0.9]", "optim.betas", [0.8, 0.9]),
        ("++optim.lr='1e-5'", "optim.lr", 1e-5),
        ("optim.lr=1E-5", "optim.lr", 1e-5),
        ("trainer.logger=wandb", "trainer.logger", ["wandb"]),
        ("trainer.experiment_name=7", "trainer.experiment_name", "7"),
        ("trainer.experiment_name=x", "trainer.default_local_dir", "checkpoints/sft/x"),
    ],
)
def test_an_override_sets_its_key(override, key, value):
    found = attrgetter(key)(load_config([override]))
    assert found == value and type(found) is type(value)


MISTAKES = {
    "data.train_batchsize=8": "'data.train_batchsize': did you mean 'data.train_batch_size'?",
    "data.max_len=8": "did you mean 'data.max_length'?",
    "train_batch_size=8": "did you mean 'data.train_batch_size'?",
    "model.lr=1e-5": "did you mean 'optim.lr'?",
    "+trainer.total_epoch=3": "did you mean 'trainer.total_epochs'?",
    "model.fsdp_config.param_type=float32": "did you mean 'model.fsdp_config.param_dtype'?",
    "zzz.qqqq=1": "'zzz.qqqq': no key has a similar name; `train --help` lists all",
    "gpus=1": "'gpus': no key has a similar name",
    "data.train_batch_size=eight": "'data.train_batch_size' must be a whole number, got 'eight'",
    "data.train_batch_size=8.5": "must be a whole number, got 8.5",
    "data.train_batch_size=true": "must be a whole number, got True",
    "data.train_batch_size=null": "must be a whole number, got None",
    "data.max_length=nan": "must be a whole number, got nan",
    "data.max_length=inf": "must be a whole number, got inf",
    "model.compile=1": "'model.compile' must be true or false, got 1",
    "optim.betas=null": "'optim.betas' must be a list",
    "optim.betas=[0.9,many]": "'optim.betas' must be a number, got 'many'",
    "trainer.logger=true": "'trainer.logger' must be a list, got True",
    "trainer.project_name=true": "'trainer.project_name' must be text, got True",
    "data.apply_chat_template_kwargs=3": "'data.apply_chat_template_kwargs' must be a group of keys",
    "model.fsdp_config=3": "'model.fsdp_config' must be a group of keys, got 3",
    "data.truncation=middle": "must be one of error, left, right, drop, split; got 'middle'",
    "optim.lr_scheduler=cosin": "did you mean 'cosine'?",
    "trainer.logger=[console,wandbb]": "did you mean 'wandb'?",
    "model.enable_gradient_checkpointing=some": "must be one of true, false, selective, offload",
    "model.compile=true model.enable_gradient_checkpointing=selective trainer.device=cpu": (
        "together on a GPU alone"
    ),
    "data.max_token_len_per_gpu=100": "(100) is below 'data.max_length' (2048)",
    "data.prompt_key=question": "'data.prompt_key' and 'data.response_key' go together",
    "trainer.resume_mode=resume_path": "'trainer.resume_from_path' and 'trainer.resume_mode",
    "trainer.checkpoint.save_contents=[model,hf_model]": "without them a run cannot resume",
    "trainer.checkpoint.load_contents=[optimizer]": "load_contents' must contain 'model'",
    "trainer.checkpoint.load_contents=[model]": "only with resume_mode=resume_path",
    "data.val_ratio=1": "'data.val_ratio' must be in [0, 1), got 1",
    "data.train_batch_size=0": "'data.train_batch_size' must be at least 1, got 0",
    "data.micro_batch_size_per_gpu=0": "must be null or at least 1",
    "data.train_max_samples=0": "must be -1 (all) or at least 1",
    "data.num_workers=-1": "'data.num_workers' must not be negative",
    "data.num_workers=1000000": "must be at most 64",
    "data.train_files=[]": "'data.train_files' is empty",
    "optim.betas=[0.9]": "'optim.betas' must be two numbers in [0, 1)",
    "optim.clip_grad=0": "'optim.clip_grad' must be positive",
    "trainer.project_name=../x": "must not lead out of checkpoints/",
    "trainer.max_time=soon": "must be a time such as 3h30m",
    "trainer.hang_timeout_s=3000": "must be below 'trainer.dist_timeout_s' (1800)",
    "model.lora_rank=4": "needs pretrained weights",
    "optim.lr=1e-4,1e-3": "'optim.lr=1e-4,1e-3' has several values, and one run takes one",
    "data.max_length": "'data.max_length' is not of the form key=value",
    "~optim.eps": "'~optim.eps' is not of the form key=value",
    "--no-such-flag": "unknown flag '--no-such-flag'",
    "data.train_files=[a,b": "[a,b",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_named_with_its_key(words):
    assert MISTAKES[words] in error_of(*words.split())


def test_a_recorded_configuration_is_read_without_keys_that_are_gone():
    tree = load_config(["trainer.seed=3"]).resolved
    older = {**tree, "model": {**tree["model"], "router_loss": "auto"}}
    assert parse_recorded(older) == load_config(["trainer.seed=3"])


@pytest.mark.parametrize(
    "text", ["a b", "it's", "\\", "x\\'", "[1,2]", "null", "1", "a,b={c}", 'q"', ""]
)
def test_any_text_can_be_written_as_an_override(text):
    word = f"data.apply_chat_template_kwargs={as_word({'a': [text]})}"
    assert load_config([word]).data.apply_chat_template_kwargs == {"a": [text]}


@pytest.mark.parametrize("command", [[sys.executable, "-m", "trainer"], ["bash", "run_sft.sh"]])
def test_a_mistake_ends_within_two_seconds(repository, command):
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PYTHONPATH": str(repository), "PYTHONSAFEPATH": "1", "PATH": path}
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        [*command, "data.max_len=8"], env=env, cwd=repository, capture_output=True, text=True
    )
    wall_s, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert done.returncode == 2 and done.stdout == "" and "Traceback" not in done.stderr
    assert min(wall_s, cpu_s) < 2, "a busy machine may stretch the wall time, not the work"
