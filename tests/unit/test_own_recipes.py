"""Users' recipes: files from anywhere, and the default recipe if none is named."""

import time
from pathlib import Path

import pytest

from trainer.config import ConfigError, sources_of
from trainer.train.start.compose import load_config, with_recipe


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write(path, text="optim:\n  lr: 0.5\n"):
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text)
    return path


def test_a_file_stands_between_the_defaults_and_the_words():
    path = write(
        "some where/own recipe.yaml", "optim:\n  lr: 0.5\n  clip_grad: 2\ntrainer: {seed: 5}\n"
    )
    config = load_config([f"experiment={path}", "optim.clip_grad=3"])
    assert (config.optim.lr, config.optim.clip_grad, config.trainer.seed) == (0.5, 3, 5)
    assert config.data == load_config([]).data


def test_a_name_like_1_0_stays_as_it_is_written():
    """It was read as the number 10."""
    trainer = "trainer: {experiment_name: 1_0, project_name: 010}"
    data = "data: {train_files: [{files: a, name: 2_0}], max_length: 1_024}"
    recipe = write("own.yaml", f"{trainer}\n{data}")
    words = [
        "trainer.experiment_name=1_0",
        "trainer.project_name=010",
        "data.train_files=[{files:a,name: 2_0}]",
    ]
    for given in ([f"experiment={recipe}"], [*words, "data.max_length=1_024"]):
        config = load_config(given)
        [source] = sources_of(config.data, "train_files")
        names = config.trainer.experiment_name, config.trainer.project_name, source.name
        assert (*names, config.data.max_length) == ("1_0", "010", "2_0", 1024)


def test_conf_of_the_working_directory_goes_before_ours():
    assert load_config(["experiment=gsm8k"]).optim.lr != 0.5
    write("conf/experiment/gsm8k.yaml")
    write("conf/experiment/mine.yaml")
    for name in ("gsm8k", "mine"):
        assert load_config([f"experiment={name}"]).optim.lr == 0.5
    with pytest.raises(ConfigError, match=r"(?s)no recipe 'nope' .*gsm8k, lora_qwen7b, mine, "):
        load_config(["experiment=nope"])


def test_without_a_word_the_environment_names_it_or_a_local_file_is_it(capsys, monkeypatch):
    assert with_recipe(["a=1"]) == ["a=1"] and capsys.readouterr().err == ""
    write("sft.local.yaml")
    words = with_recipe(["trainer.seed=4"])
    assert capsys.readouterr().err == "note: recipe sft.local.yaml\n"
    assert (load_config(words).optim.lr, load_config(words).trainer.seed) == (0.5, 4)
    monkeypatch.setenv("SFT_EXPERIMENT", "gsm8k")
    assert with_recipe([]) == ["experiment=gsm8k"]
    assert capsys.readouterr().err == "note: recipe gsm8k (SFT_EXPERIMENT)\n"
    assert with_recipe(["experiment=null"]) == ["experiment=null"]


def test_a_second_one_is_refused():
    with pytest.raises(ConfigError, match=r"2 recipes .*\(experiment=gsm8k, experiment=mixture\)"):
        load_config(["experiment=gsm8k", "optim.lr=0.1", "experiment=mixture"])


LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10)
)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("# optim: {lr: 1}\n", " contains no keys"),
        ("optim: {lr: [", ", line 1: expected the node content"),
        ("optim:\n  lrr: 1\n", ": unknown .* 'optim.lrr': did you mean 'optim.lr'"),
        (LAUGHS, r": line 2: '\*a0' is a YAML alias"),
        ("trainer: " + "[" * 5000 + "]" * 5000, ": line 1: more than 64 levels of nesting"),
        ("x" * (2**16 + 1), ".*at most 65536 are read"),
    ],
    ids=range(6),
)
def test_a_broken_one_is_refused_with_its_place_before_it_exhausts_the_machine(text, reason):
    path = write("own.yaml", text)
    started = time.process_time()
    with pytest.raises(ConfigError, match=f"recipe {path}{reason}"):
        load_config([f"experiment={path}"])
    assert time.process_time() - started < 2


@pytest.mark.parametrize(
    "value",
    [
        "${oc.env:SECRET}", "run-${ oc.env:SECRET,none}", "${oc.${optim.name}:SECRET}", "${${optim.name}:SECRET}",
        "${oc.decode:${oc.env:SECRET}}",
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    "place", ["trainer: {{experiment_name: '{}'}}", "data: {{train_files: ['{}']}}"]
)
def test_one_that_reads_the_environment_is_refused_and_a_command_line_is_not(
    value, place, monkeypatch
):
    monkeypatch.setenv("SECRET", "hunter2")
    path = write("own.yaml", place.format(value))
    with pytest.raises(ConfigError, match=r"recipe own\.yaml: ") as raised:
        load_config([f"experiment={path}"])
    assert "hunter2" not in str(raised.value)
    config = load_config(["trainer.experiment_name=${oc.env:SECRET}"])
    assert config.trainer.experiment_name == "hunter2"
