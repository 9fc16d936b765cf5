"""The command line to a checked `Config`: mistakes are named with a fix, before anything slow
starts.
"""

import math
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainer.__main__ import main
from trainer.config import ConfigError, GuardRule, known_keys, parse_config
from trainer.run.compose import as_words, load_config


def error_of(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(list(overrides))
    return str(caught.value)


def test_defaults_are_valid_and_typed() -> None:
    config = load_config([])
    assert config.data.train_files == "quickstart"
    assert isinstance(config.optim.eps, float) and config.optim.eps == 1e-8
    assert config.optim.lr is None and config.trainer.total_training_steps is None
    assert config.trainer.default_local_dir == "checkpoints/sft/quickstart"
    assert set(config.resolved) == {"data", "model", "optim", "trainer"}


def test_overrides_reach_every_section() -> None:
    config = load_config(
        [
            "data.train_files=[a.jsonl,b.parquet]",
            "model.fsdp_config.fsdp_size=2",
            "optim.betas=[0.8,0.9]",
            "trainer.experiment_name=other",
            "++trainer.seed=7",
        ]
    )
    assert config.data.train_files == ["a.jsonl", "b.parquet"]
    assert config.model.fsdp_config.fsdp_size == 2
    assert config.optim.betas == [0.8, 0.9]
    assert config.trainer.default_local_dir == "checkpoints/sft/other"
    assert config.trainer.seed == 7


@pytest.mark.parametrize(
    "override",
    [
        "data.apply_chat_template_kwargs={enable_thinking: false}",
        "data.apply_chat_template_kwargs.enable_thinking=false",
        "+data.apply_chat_template_kwargs.enable_thinking=false",
    ],
)
def test_variables_of_the_template_are_free(override: str) -> None:
    assert load_config([override]).data.apply_chat_template_kwargs == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("data.train_batchsize=8", "data.train_batch_size"),
        ("data.max_len=8", "data.max_length"),
        ("train_batch_size=8", "data.train_batch_size"),
        ("model.lr=1e-5", "optim.lr"),
        ("data.batchsize=8", "data.train_batch_size"),
        ("model.fsdp_config.param_type=float32", "model.fsdp_config.param_dtype"),
        ("trainer.checkpoint.save_content=[model]", "trainer.checkpoint.save_contents"),
        ("+trainer.total_epoch=3", "trainer.total_epochs"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest(override: str, nearest: str) -> None:
    key = override.lstrip("+").partition("=")[0]
    assert error_of(override) == f"unknown configuration key '{key}': did you mean '{nearest}'?"


@pytest.mark.parametrize(
    "key", ["zzz.qqqq", "trainer.log_freq", "model.attn", "optim.momentum", "gpus"]
)
def test_a_key_that_nothing_is_near_to_gets_no_suggestion(key: str) -> None:
    message = error_of(f"{key}=1")
    assert f"'{key}'" in message and "did you mean" not in message and "--help" in message


def test_all_unknown_keys_are_named_at_once() -> None:
    lines = error_of(
        "data.train_batchsize=8", "optim.lr=1e-5", "zzz=1", "data.max_len=4"
    ).splitlines()
    assert [line.split("'")[1] for line in lines] == ["data.train_batchsize", "zzz", "data.max_len"]


@pytest.mark.parametrize("key", known_keys())
def test_every_key_refuses_a_group_of_keys(key: str) -> None:
    """A value of the wrong shape is refused by name, whatever the key's type; only the
    template's variables are one.
    """
    if key != "data.apply_chat_template_kwargs":
        assert key in error_of(f"{key}={{a: 1}}")


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("data.train_batch_size=eight", ["'data.train_batch_size' must be int", "'eight'"]),
        ("data.train_batch_size=8.5", ["'data.train_batch_size' must be int", "8.5"]),
        ("data.train_batch_size=true", ["'data.train_batch_size' must be int", "True"]),
        ("data.train_batch_size=null", ["'data.train_batch_size' must be int", "None"]),
        ("data.max_length=nan", ["'data.max_length' must be int", "nan"]),
        ("data.max_length=inf", ["'data.max_length' must be int", "inf"]),
        ("model.compile=1", ["'model.compile' must be bool", "1"]),
        ("model.compile=yes_please", ["'model.compile' must be bool"]),
        ("optim.betas=null", ["'optim.betas' must be list[float]"]),
        ("optim.betas=many", ["'optim.betas' must be float", "'many'"]),
        ("optim.betas=[0.9,many]", ["'optim.betas' must be float", "'many'"]),
        ("optim.clip_grad=none", ["'optim.clip_grad' must be float"]),
        ("trainer.logger=null", ["'trainer.logger' must be list[str]", "None"]),
        ("trainer.logger=true", ["'trainer.logger' must be list[str]", "True"]),
        ("trainer.project_name=true", ["'trainer.project_name' must be str", "True"]),
        ("data.apply_chat_template_kwargs=3", ["'data.apply_chat_template_kwargs' must be dict"]),
        ("model.fsdp_config=3", ["model.fsdp_config"]),
    ],
)
def test_a_wrong_type_is_named_with_key_and_value(override: str, parts: list[str]) -> None:
    message = error_of(override)
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (
            ["data.truncation=middle"],
            ["'data.truncation' must be one of error, left, right, drop", "'middle'"],
        ),
        (["optim.lr_scheduler=cosin"], ["optim.lr_scheduler", "did you mean 'cosine'"]),
        (["trainer.logger=[console,wandbb]"], ["trainer.logger", "did you mean 'wandb'"]),
        (["trainer.device=gpu"], ["trainer.device", "auto, cuda, cpu"]),
        (["data.on_bad_row=ignore"], ["data.on_bad_row", "error, skip"]),
        (["model.attention=flash"], ["model.attention", "packed"]),
        (
            ["model.enable_gradient_checkpointing=some"],
            ["'model.enable_gradient_checkpointing'", "selective", "'some'"],
        ),
        (
            [
                "model.enable_gradient_checkpointing=selective",
                "model.compile=true",
                "trainer.device=cpu",
            ],
            ["together on a GPU alone", "false or true"],
        ),
        (
            ["model.fsdp_config.reshard_after_forward=zero3"],
            ["reshard_after_forward", "true, false, auto"],
        ),
        (["model.fsdp_config.param_dtype=float16"], ["model.fsdp_config.param_dtype"]),
        (["trainer.resume_mode=resume"], ["trainer.resume_mode", "resume_path"]),
        (
            ["data.max_token_len_per_gpu=100"],
            ["data.max_token_len_per_gpu' (100)", "data.max_length' (2048)", "raise"],
        ),
        (["data.prompt_key=question"], ["'data.prompt_key' and 'data.response_key' go together"]),
        (["data.response_key=answer"], ["'data.prompt_key' and 'data.response_key' go together"]),
        (["trainer.resume_mode=resume_path"], ["trainer.resume_from_path", "set both or neither"]),
        (["trainer.resume_from_path=/x"], ["trainer.resume_from_path", "set both or neither"]),
        (["trainer.checkpoint.save_contents=[model,hf_model]"], ["save_contents", "cannot resume"]),
        (["trainer.checkpoint.load_contents=[optimizer]"], ["load_contents' must contain 'model'"]),
        (
            ["trainer.checkpoint.load_contents=[model,hf_model]"],
            ["load_contents", "model, optimizer, extra"],
        ),
        (["data.val_ratio=1"], ["'data.val_ratio' must be in [0, 1)", "1"]),
        (["data.val_ratio=-0.1"], ["data.val_ratio"]),
        (["data.train_batch_size=0"], ["'data.train_batch_size' must be at least 1", "0"]),
        (["data.micro_batch_size_per_gpu=0"], ["null or at least 1"]),
        (["data.train_max_samples=0"], ["-1 (all)"]),
        (["data.num_workers=-1"], ["data.num_workers"]),
        (["data.num_workers=1000000"], ["data.num_workers", "at most 64", "a process"]),
        (
            ["trainer.dist_timeout_s=99999999999999"],
            ["trainer.dist_timeout_s", "at most 31536000", "a year"],
        ),
        (["data.train_files=[]"], ["'data.train_files' is empty"]),
        (["optim.lr=3"], ["'optim.lr' must be in (0, 1)", "3"]),
        (["optim.lr=0"], ["optim.lr"]),
        (["optim.betas=[0.9]"], ["optim.betas"]),
        (["optim.betas=0.9"], ["'optim.betas' must be two numbers"]),
        (["trainer.logger=comet"], ["'trainer.logger' must be one of", "'comet'"]),
        (["optim.betas=[0.9,1.0]"], ["optim.betas"]),
        (["optim.clip_grad=0"], ["optim.clip_grad"]),
        (["optim.min_lr_ratio=1.5"], ["optim.min_lr_ratio"]),
        (["trainer.save_freq=0"], ["'trainer.save_freq' must be -1", "0"]),
        (["trainer.max_ckpt_to_keep=0"], ["trainer.max_ckpt_to_keep"]),
        (["trainer.total_training_steps=0"], ["trainer.total_training_steps"]),
        (["model.fsdp_config.fsdp_size=0"], ["model.fsdp_config.fsdp_size"]),
    ],
)
def test_values_and_combinations_are_checked(overrides: list[str], parts: list[str]) -> None:
    message = error_of(*overrides)
    assert all(part in message for part in parts), message


def test_token_limit_equal_to_the_longest_sample_is_allowed() -> None:
    assert (
        load_config(
            ["data.max_length=64", "data.max_token_len_per_gpu=64"]
        ).data.max_token_len_per_gpu
        == 64
    )
    assert load_config(["data.max_token_len_per_gpu=null"]).data.max_token_len_per_gpu is None


@pytest.mark.parametrize("text", ["1e-5", "'1e-5'", "0.00001", "1E-5"])
def test_learning_rate_as_number_and_as_text(text: str) -> None:
    lr = load_config([f"optim.lr={text}"]).optim.lr
    assert isinstance(lr, float) and math.isclose(lr, 1e-5)


def test_whole_floats_count_as_integers() -> None:
    batch_size = load_config(["data.train_batch_size=16.0"]).data.train_batch_size
    assert batch_size == 16 and isinstance(batch_size, int)


@pytest.mark.parametrize(
    "value",
    ["data/*.jsonl", "/a b/c.json", "s3://x/y.parquet", "'a=b(1)/[0-9].jsonl'", "'~/x.jsonl'"],
)
def test_paths_and_globs_pass_unchanged(value: str) -> None:
    assert load_config([f"data.train_files={value}"]).data.train_files == value.strip("'")


def test_one_value_is_a_list_of_one() -> None:
    words = ["trainer.logger=wandb", "trainer.resume_allow=seed"]
    trainer = load_config(words).trainer
    assert (trainer.logger, trainer.resume_allow) == (["wandb"], ["seed"])


def test_guard_rules_are_read_with_their_defaults() -> None:
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
def test_a_guard_rule_that_cannot_be_read_is_named(entry: str, named: str) -> None:
    assert f"'{named}'" in error_of(f"trainer.guard.rules=[{entry}]")


@pytest.mark.parametrize(
    "word", ["optim.lr=1e-4,1e-3", "++optim.lr=1e-4,1e-3", "optim.lr=choice(1e-4,1e-3)"]
)
def test_several_values_are_several_runs(word: str) -> None:
    message = error_of(word)
    assert message.startswith(f"'{word.lstrip('+')}' has several values, and one run takes one")
    assert "multirun" not in message


@pytest.mark.parametrize("prefix", ["", "+", "++"])
def test_a_plus_in_front_of_a_key_changes_nothing(prefix: str) -> None:
    assert load_config([f"{prefix}optim.lr=1e-5"]).optim.lr == 1e-5


def test_a_number_as_a_name_becomes_text() -> None:
    assert load_config(["trainer.experiment_name=7"]).trainer.experiment_name == "7"


def test_an_unknown_recipe_is_answered_with_the_known_ones() -> None:
    message = error_of("experiment=phase1")
    assert (
        "no recipe 'phase1'" in message
        and "gsm8k" in message
        and "phase1_sft_qwen7b_coder" in message
    )


@pytest.mark.parametrize(
    ("word", "part"),
    [
        ("data.max_length", "'data.max_length' is not of the form key=value"),
        ("8", "'8' is not of the form key=value"),
        ("--no-such-flag", "unknown flag '--no-such-flag'"),
        ("data.train_files=[a,b", "[a,b"),
    ],
)
def test_words_that_are_no_override(word: str, part: str) -> None:
    assert part in error_of(word)


def test_a_key_cannot_be_removed() -> None:
    message = "'~optim.eps' would remove a key, and each needs a value: leave the word out for the default"
    assert error_of("~optim.eps") == message


def test_a_tree_without_hydra_is_checked_the_same_way() -> None:
    tree = load_config([]).resolved
    assert parse_config(tree) == load_config([])
    with pytest.raises(ConfigError, match="'optim' must be a group of keys, got 3"):
        parse_config({**tree, "optim": 3})
    with pytest.raises(
        ConfigError,
        match=r"unknown configuration key 'data\.max_lenght': did you mean 'data\.max_length'",
    ):
        parse_config({**tree, "data": {**tree["data"], "max_lenght": 3}})


def test_cfg_prints_what_would_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--cfg", "job", "trainer.seed=11", "experiment=gsm8k"]) == 0
    printed = capsys.readouterr().out
    assert (
        "seed: 11" in printed
        and "prompt_key: question" in printed
        and "checkpoints/gsm8k/" in printed
    )


def test_help_prints_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert "usage:" in printed and "bash run_sft.sh report" in printed
    assert [key for key in known_keys() if f"{key.rpartition('.')[2]}:" not in printed] == []


@pytest.mark.parametrize(
    ("command", "word", "code", "message"),
    [
        (
            [sys.executable, "-m", "trainer"],
            "data.train_batchsize=8",
            2,
            "did you mean 'data.train_batch_size'?",
        ),
        (
            ["bash", "run_sft.sh"],
            "data.train_batchsize=8",
            2,
            "did you mean 'data.train_batch_size'?",
        ),
        (["bash", "run_sft.sh"], "data.train_files=nope.jsonl", 65, "no such file: 'nope.jsonl'"),
        (["bash", "run_sft.sh"], "model.partial_pretrain=/nope", 2, "there is no such directory"),
    ],
)
def test_a_mistake_ends_within_two_seconds(
    repository: Path, command: list[str], word: str, code: int, message: str
) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PYTHONPATH": str(repository), "PYTHONSAFEPATH": "1", "PATH": path}
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        [*command, word], env=env, cwd=repository, capture_output=True, text=True, timeout=60
    )
    wall_s, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert done.returncode == code, done.stderr
    assert message in done.stderr and "Traceback" not in done.stderr and done.stdout == ""
    assert min(wall_s, cpu_s) < 2, "a busy machine may stretch the wall time, not the work"


def test_checking_the_configuration_does_not_import_torch(repository: Path) -> None:
    program = (
        "import sys, trainer.__main__ as m; m.load_config([]); sys.exit('torch' in sys.modules)"
    )
    env = {**os.environ, "PYTHONPATH": str(repository)}
    assert subprocess.run([sys.executable, "-c", program], env=env, timeout=60).returncode == 0


def test_a_resolved_configuration_is_written_as_words_that_give_it_again() -> None:
    texts = ["a b", "it's", "\\", "x\\'", "[1,2]", "null", "1", "a,b={c}", 'q"', ""]
    tree = load_config(
        ["data.apply_chat_template_kwargs={a: 1, b: {c: null}}", "model.new_tokens=[x]"]
    ).resolved
    tree["model"]["new_tokens"] = texts[:-1]
    tree["data"]["apply_chat_template_kwargs"]["texts"] = texts
    tree["data"]["train_files"] = [
        {"files": "it's.jsonl", "name": "a", "repeat": 2.5},
        {"files": ["b.jsonl", "c d.jsonl"]},
    ]
    assert load_config(list(as_words(tree))).resolved == tree
