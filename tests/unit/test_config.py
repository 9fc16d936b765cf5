"""From a command line to a checked `Config`: errors are reported before anything slow starts."""

from operator import attrgetter

import pytest

from trainer.__main__ import main
from trainer.config import (
    Config,
    ConfigError,
    GuardRule,
    OptimGroup,
    RowKeys,
    Source,
    keys_of,
    parse_recorded,
    sources_of,
)
from trainer.train.start.compose import as_word, load_config


def error_of(*overrides):
    with pytest.raises(ConfigError) as caught:
        load_config(list(overrides))
    return str(caught.value)


def test_all_wrong_overrides_are_named_at_once():
    wrong = ("data.train_batchsize=8", "optim.lr=high", "zzz=1", "data.max_len=4")
    for word, line in zip(wrong, error_of("optim.eps=1e-7", *wrong).splitlines(), strict=True):
        assert f"'{word.partition('=')[0]}'" in line


@pytest.mark.parametrize("key", keys_of(Config))
def test_a_value_of_a_wrong_shape_is_refused_by_name(key):
    if key != "data.apply_chat_template_kwargs":  # the template's variables are the user's
        assert key in error_of(f"{key}={{a: 1}}")


LONG_SOURCES = (
    "[{name:code,files:[/d/code/*.jsonl,more.parquet],repeat:2.5,max_samples:100},"
    "{files:/d/math.jsonl,prompt_key:q,response_key:a,chat_template:math.jinja,tools_key:t}]"
)
OVERRIDES = [
    ("data.train_files=[a.jsonl,b.parquet]", "data.train_files", ["a.jsonl", "b.parquet"]),
    ("data.train_files='a=b(1)/[0-9].jsonl'", "data.train_files", "a=b(1)/[0-9].jsonl"),
    ("data.train_batch_size=16.0", "data.train_batch_size", 16),
    ("+data.apply_chat_template_kwargs.a=1", "data.apply_chat_template_kwargs", {"a": 1}),
    ("model.fsdp_config.fsdp_size=2", "model.fsdp_config.fsdp_size", 2),
    ("++optim.lr='1e-5'", "optim.lr", 1e-5),
    ("optim.clip_grad=2", "optim.clip_grad", 2.0),
    ("trainer.logger=wandb", "trainer.logger", ["wandb"]),
    ("trainer.experiment_name=7", "trainer.experiment_name", "7"),
    ("trainer.experiment_name=x", "trainer.default_local_dir", "checkpoints/sft/x"),
    (
        "trainer.guard.rules=[{metric: g, above: 50, for: 3, do: rollback}, {metric: a, below: 1}]",
        "trainer.guard.rules",
        [
            GuardRule("g", above=50.0, below=None, num_steps=3, action="rollback"),
            GuardRule("a", above=None, below=1.0, num_steps=1, action="warn"),
        ],
    ),
    ("optim.groups={match: a, lr_scale: 2}", "optim.groups", [OptimGroup("a", lr_scale=2.0)]),
]


@pytest.mark.parametrize(("override", "key", "value"), OVERRIDES)
def test_an_override_sets_its_key(override, key, value):
    found = attrgetter(key)(load_config([override]))
    assert found == value and type(found) is type(value)


MISTAKES = {
    "data.train_batchsize=8": "'data.train_batchsize': did you mean 'data.train_batch_size'?",
    "train_batch_size=8": "did you mean 'data.train_batch_size'?",
    "model.lr=1e-5": "did you mean 'optim.lr'?",
    "+trainer.total_epoch=3": "did you mean 'trainer.total_epochs'?",
    "model.fsdp_config.param_type=float32": "did you mean 'model.fsdp_config.param_dtype'?",
    "data.train_batch_size=eight": "'data.train_batch_size'",
    "data.train_batch_size=8.5": "'data.train_batch_size'",
    "data.train_batch_size=0": "'data.train_batch_size' must be at least 1",
    "data.max_length=nan": "'data.max_length'",
    "optim.betas=[0.9]": "'optim.betas' must be two numbers in [0, 1)",
    "optim.clip_grad=0": "'optim.clip_grad' must be in (0, inf)",
    "optim.lr=1e-4,1e-3": "'optim.lr=1e-4,1e-3' has several values",
    "data.truncation=middle": "must be one of error, left, right, drop, split; got 'middle'",
    "optim.lr_scheduler=cosin": "did you mean 'cosine'?",
    "trainer.logger=[console,wandbb]": "did you mean 'wandb'?",
    "data.max_token_len_per_gpu=100": "data.max_length=2048",
    "data.prompt_key=question": "'data.prompt_key' and 'data.response_key' work only together",
    "trainer.checkpoint.save_contents=[model,hf_model]": "a run cannot resume without them",
    "data.apply_chat_template_kwargs={tools: [], a: 1}": "which the trainer sets; got {'tools': []",
    "data.val_ratio=1": "'data.val_ratio' must be in [0, 1), got 1",
    "data.num_workers=1000000": "must be in [0, 64]",
    "trainer.project_name=../x": "must not point outside checkpoints/",
    "trainer.max_time=soon": "'trainer.max_time' must be a duration",
    "model.lora_rank=4": "needs pretrained weights",
    "~optim.eps": "'~optim.eps' is not of the form key=value",
    "--no-such-flag": "is not of the form key=value",
    "data.train_files=[a,b": "[a,b",
    "data.train_files=null": "'data.train_files'",
    "data.train_files=[{files:[]}]": "'data.train_files[0].files' is empty",
    "data.train_files=[{files:a},{files:b,repeats:2}]": "did you mean 'data.train_files[1].repeat'?",
    "data.train_files=[{files:a.jsonl,repeat:0}]": "'data.train_files[0].repeat' must be in (0, 1000]",
    "data.train_files=[{files:a.jsonl,max_samples:0}]": "'data.train_files[0].max_samples' must be",
    "data.train_files=[{files:a.jsonl,prompt_key:q}]": "'data.train_files[0].response_key' work only together",
    "data.train_files=[{files:a,prompt_key:q,response_key:a,text_key:t}]": "text_key' does not work with",
    "data.train_files=[{files:x/a.jsonl},{files:y/a.jsonl}]": "several sources named 'a'",
    "data.train_files=[{files:a.jsonl,name:'a b'}]": "'data.train_files[0].name' must consist of",
    "data.val_files=[{files:a.jsonl,repeat:2}]": "'data.val_files[0].repeat' must be 1, got 2",
    "trainer.guard.rules=[{metric: a, over: 1}]": "'trainer.guard.rules[0].over'",
    "trainer.guard.rules=[{metric: a, above: 1, do: halt}]": "'trainer.guard.rules[0].do'",
}


@pytest.mark.parametrize("override", MISTAKES)
def test_a_mistake_is_named_with_its_key(override):
    assert MISTAKES[override] in error_of(override)


def test_a_tilde_is_the_home_directory_in_every_path(monkeypatch):
    monkeypatch.setenv("HOME", "/h")
    words = ["data.cache_dir=~/a", "data.train_files=~/b", "model.new_tokens=['~']"]
    found = load_config(words).resolved
    assert found["data"]["cache_dir"] + found["data"]["train_files"] == "/h/a/h/b"
    assert found["model"]["new_tokens"] == ["~"], "a token is no path"


def source(name, files, **columns):
    return Source(name, files, 1.0, -1, None, RowKeys(**columns))


COLUMNS = ("data.prompt_key=q", "data.response_key=a", "data.messages_key=chat")
SOURCES = [
    (
        ["data.train_files=[quickstart,{files:b.jsonl.gz}]"],
        [source("quickstart", "quickstart"), source("b", "b.jsonl.gz")],
    ),
    (
        [f"data.train_files={LONG_SOURCES}", "data.train_max_samples=7"],
        [
            Source("code", ["/d/code/*.jsonl", "more.parquet"], 2.5, 100, None, RowKeys()),
            Source(
                "math", "/d/math.jsonl", 1.0, 7, "math.jinja", RowKeys("messages", "t", "q", "a")
            ),
        ],
    ),
    (  # what a source leaves open is as in `data`; one that names columns has no other format
        [*COLUMNS, "data.train_files=[{files:a},{files:b,messages_key:m},{files:c,text_key:t}]"],
        [
            source("a", "a", prompt_key="q", response_key="a", messages_key="chat"),
            source("b", "b", messages_key="m"),
            source("c", "c", messages_key="chat", text_key="t"),
        ],
    ),
]


@pytest.mark.parametrize(("words", "sources"), SOURCES)
def test_sources_are_named_and_completed(words, sources):
    assert sources_of(load_config(words).data, "train_files") == sources
    assert sources_of(load_config(words).data, "val_files") == []


def test_a_recorded_configuration_is_read_without_removed_keys():
    tree = load_config(["trainer.seed=3"]).resolved
    older = {**tree, "model": {**tree["model"], "router_loss": "auto"}}
    assert parse_recorded(older) == load_config(["trainer.seed=3"])


@pytest.mark.parametrize("text", ["it's", "x\\'", "[1,2]", "null", "a,b={c}", 'q"', ""])
def test_any_text_can_be_written_as_an_override(text):
    word = f"data.apply_chat_template_kwargs={{a:[{as_word(text)}]}}"
    assert load_config([word]).data.apply_chat_template_kwargs == {"a": [text]}


def test_cfg_prints_the_configuration(capsys):
    assert main(["--cfg", "job", "trainer.seed=11", "experiment=gsm8k"]) == 0
    printed = capsys.readouterr().out
    for text in ("seed: 11", "prompt_key: question", "checkpoints/gsm8k/"):
        assert text in printed
