"""A configuration of another trainer becomes a recipe that trains with the same batch, rate, length and template."""

import os
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from unit.foreign_files import AXOLOTL, FACTORY, TRL, VERL, ForeignExample, yaml_lines

from trainer.cli.__main__ import main
from trainer.config import Config, ConfigError, SourceConfig, find_foreign, parse_config
from trainer.import_config.rules import ForeignSetting, became
from trainer.import_config.translation import Translation
from trainer.run.compose import PARTS, load_config

MODEL = {"model_name_or_path": "model", "dataset_name": "org/data"}


def imported(tmp_path: Path, name: str, text: str, *words: str) -> Config:
    """Through the command and the recipe that it writes; what is still to be given is given."""
    (tmp_path / name).write_text(text)
    recipe = tmp_path / "mine.yaml"
    assert main(["import", str(tmp_path / name), *words, "-o", str(recipe)]) == 0
    tree: Any = OmegaConf.to_container(OmegaConf.load(recipe), resolve=True)
    tree["data"]["train_files"] = tree["data"]["train_files"] or "given.jsonl"
    return parse_config(tree, PARTS)


def value_of(config: Config, dotted: str) -> Any:
    return attrgetter(dotted)(config)


@pytest.mark.parametrize("example", [*VERL, *TRL, *AXOLOTL, *FACTORY], ids=lambda example: example.name)
def test_an_example_of_another_trainer_trains_as_there(
    tmp_path: Path, example: ForeignExample, capsys: pytest.CaptureFixture[str]
) -> None:
    config = imported(tmp_path, example.name, example.text, *example.words)
    assert {key: value_of(config, key) for key in example.expected} == example.expected
    told = [line for line in capsys.readouterr().out.splitlines() if "  no equal" in line or "  unknown" in line]
    assert {line.split()[1].partition("=")[0] for line in told} == example.named


def test_every_line_of_a_file_is_answered_with_its_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = yaml_lines(**MODEL, warmup_steps=7, lr_scheduler_type="polynomial", logging_steps=5, no_such_key=1)
    config = imported(tmp_path, "trl.yaml", text, "1")
    assert config.optim.lr_warmup_steps == 7
    lines = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()[1:7]]
    assert [line[:2] for line in lines] == [
        ["1", "model_name_or_path=model"],
        ["2", "dataset_name=org/data"],
        ["3", "warmup_steps=7"],
        ["4", "lr_scheduler_type=polynomial"],
        ["5", "logging_steps=5"],
        ["6", "no_such_key=1"],
    ]
    said = ["->", "->", "->", "no equal: schedules are linear", "changes nothing: every step is logged", "unknown"]
    assert all(line[2].startswith(start) for line, start in zip(lines, said, strict=True))


def test_what_has_no_equal_stands_in_the_recipe(tmp_path: Path) -> None:
    imported(tmp_path, "trl.yaml", yaml_lines(**MODEL, neftune_noise_alpha=5, odd="|\n  a\n  b"), "1")
    recipe = (tmp_path / "mine.yaml").read_text()
    assert "# unknown: odd=a b\n" in recipe
    assert "# no equal: neftune_noise_alpha=5: there is no noise on embeddings" in recipe
    assert "# differs: assistant_only_loss=False: of rows of messages every token is trained there" in recipe


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"num_train_epochs": 1.5}, {"trainer.total_epochs": 2}),
        ({"max_steps": 30, "num_train_epochs": 9}, {"trainer.total_training_steps": 30, "trainer.total_epochs": 2}),
        ({"max_grad_norm": 0}, {"optim.clip_grad": 1e9}),
        ({"lr_scheduler_type": "constant", "warmup_ratio": 0.1}, {"optim.lr_warmup_steps_ratio": 0.0}),
        ({"lr_scheduler_type": "constant_with_warmup", "warmup_ratio": 0.1}, {"optim.lr_warmup_steps_ratio": 0.1}),
        ({"adam_beta2": 0.95}, {"optim.betas": [0.9, 0.95]}),
        ({"bf16": False}, {"model.fsdp_config.param_dtype": "float32"}),
        ({"eval_strategy": "steps"}, {"data.val_files": "hf://org/data:test", "trainer.test_freq": 10}),
        ({"dataset_config": "main"}, {"data.train_files": "hf://org/data:main/train"}),
        ({"loss_type": "dft"}, {"model.loss": "dft"}),
        ({"save_strategy": "no"}, {"trainer.save_freq": -1}),
        ({"report_to": "[wandb, trackio, comet_ml]"}, {"trainer.logger": ["console", "wandb", "trackio"]}),
    ],
    ids=lambda value: "" if isinstance(value, dict) and "." in next(iter(value)) else None,
)
def test_a_setting_means_here_what_it_means_there(
    tmp_path: Path, settings: dict[str, Any], expected: dict[str, Any]
) -> None:
    config = imported(tmp_path, "trl.yaml", yaml_lines(**MODEL | settings), "1")
    assert {key: value_of(config, key) for key in expected} == expected


@pytest.mark.parametrize(("neat", "said"), [(False, "no equal: documents packed side by side see"), (True, "changes")])
def test_packed_documents_that_see_each_other_are_told(
    tmp_path: Path, neat: bool, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = yaml_lines(model_name_or_path="m", stage="sft", packing=True, neat_packing=neat)
    imported(tmp_path, "factory.yaml", text, "1", "--mean-tokens", "256")
    (line,) = [line for line in capsys.readouterr().out.splitlines() if " packing=True" in line]
    assert f"packing=True  {said}" in line


def test_names_of_llama_factory_are_found_in_its_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    listed = '{"a": {"file_name": "a.json"}, "b": {"hf_hub_url": "org/b", "formatting": "sharegpt", '
    (tmp_path / "data" / "dataset_info.json").write_text(listed + '"columns": {"messages": "turns"}}}')
    monkeypatch.chdir(tmp_path)
    text = yaml_lines(model_name_or_path="m", template="llama3", dataset="a,b", mask_history=True)
    config = imported(tmp_path, "factory.yaml", text, "1")
    assert config.data.train_files == [
        SourceConfig(files="data/a.json"),
        SourceConfig(name="b", files="hf://org/b:train", messages_key="turns"),
    ]
    assert config.data.train_on == "last"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("trl.yaml", yaml_lines(**MODEL), "does not say on how many ranks it was started"),
        ("what.yaml", "a: 1\n", "does not show whose it is: name it, --from verl"),
        ("factory.yaml", yaml_lines(model_name_or_path="m", stage="dpo", num_processes=1), "it trains 'dpo'"),
        ("list.yaml", "- a\n", "holds no keys"),
        ("broken.yaml", "a: [\n", "is no YAML"),
        ("run.sh", "echo hello\n", "launches no trainer"),
        ("run.sh", "axolotl train mine.yaml --debug\n", "import that file"),
        ("absent.yaml", None, "cannot read"),
    ],
)
def test_what_cannot_be_imported_is_refused(
    tmp_path: Path, name: str, text: str | None, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    assert main(["import", str(tmp_path / name)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        (
            "factory.yaml",
            yaml_lines(model_name_or_path="m", template="llama3"),
            {"data.max_length": 2048, "optim.lr": 5e-5, "optim.lr_scheduler": "linear", "data.train_batch_size": 8}
            | {"model.lora_rank": 8, "model.lora_alpha": 16, "model.fsdp_config.param_dtype": "float32"},
        ),
        (
            "axolotl.yaml",
            yaml_lines(base_model="m", learning_rate=1e-4),
            {"data.max_length": 512, "optim.lr_scheduler": "cosine", "optim.lr_warmup_steps_ratio": 0.03}
            | {"data.train_batch_size": 1, "trainer.total_epochs": 1, "data.truncation": "drop", "data.val_ratio": 0.0},
        ),
        (
            "engine.sh",
            "python -m verl.trainer.sft_trainer data.max_length=32768 model.path=m ulysses_sequence_parallel_size=2\n",
            {"optim.lr": 1e-3, "optim.lr_scheduler": "constant", "optim.betas": [0.9, 0.999]}
            | {"optim.lr_warmup_steps_ratio": 0.0, "data.max_token_len_per_gpu": 16384, "trainer.total_epochs": 4},
        ),
    ],
)
def test_a_silent_file_trains_with_the_defaults_of_its_trainer(
    tmp_path: Path, name: str, text: str, expected: dict[str, Any]
) -> None:
    config = imported(tmp_path, name, text, "1")
    assert {key: value_of(config, key) for key in expected} == expected


def test_a_variable_that_a_script_sets_twice_is_not_guessed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = "if $BIG; then\nLR=1e-5\nelse\nLR=2e-5\nfi\npython -m verl.trainer.sft_trainer model.path=m data.x=1 "
    imported(tmp_path, "theirs.sh", f"{script} data.max_length=${{LENGTH:-64}} optim.lr=$LR\n")
    told = capsys.readouterr().out
    assert "optim.lr=$LR  unknown: its value is set outside of the file, or twice" in told
    assert "data.max_length=64  -> data.max_length=64" in told


def test_what_a_file_says_wins_over_defaults() -> None:
    rows = [(ForeignSetting("a", 1, line=1), became(optim__lr=1e-3)), (ForeignSetting("b", 2), became(optim__lr=1e-5))]
    assert Translation("TRL", 1, rows).words["optim.lr"] == 1e-3


def test_a_recipe_is_an_experiment(tmp_path: Path) -> None:
    """Composed as `train` does: the variables of the environment are those of its start."""
    imported(tmp_path, VERL[0].name, VERL[0].text)
    config = load_config([f"experiment={tmp_path / 'mine.yaml'}", "optim.lr=1e-6"])
    assert (config.data.train_batch_size, config.optim.lr) == (256, 1e-6)
    assert config.data.train_files == f"{os.environ['HOME']}/data/gsm8k/train.parquet"


def test_a_recipe_without_model_does_not_train_the_quickstart(tmp_path: Path) -> None:
    (tmp_path / "theirs.sh").write_text("python -m verl.trainer.sft_trainer data.train_files=a.jsonl model.path=$M\n")
    assert main(["import", str(tmp_path / "theirs.sh"), "-o", str(tmp_path / "mine.yaml")]) == 0
    with pytest.raises(ConfigError, match=r"'model\.partial_pretrain' must be str, got None"):
        load_config([f"experiment={tmp_path / 'mine.yaml'}"])


def test_a_key_of_several_trainers_is_answered_for_the_one_that_is_asked() -> None:
    here = [find_foreign("lora_target_modules", origins) for origins in (("TRL",), ())]
    assert [row and row.origin for row in here] == ["others", "others"]
    assert find_foreign("no_such_key", ("TRL",)) is None
