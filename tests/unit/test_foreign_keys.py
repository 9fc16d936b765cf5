"""Keys of other trainers: what changes nothing is accepted and said, the rest is answered with what it is here."""

import re

import pytest

from trainer.config import ConfigError, find_foreign, known_keys, own_words
from trainer.config.parse import foreign_keys
from trainer.launch.ranks import parse_arguments
from trainer.run.compose import load_config

VERL_SCRIPT = [
    "data.train_files=train.parquet",
    "data.val_files=test.parquet",
    "data.prompt_key=extra_info.question",
    "data.response_key=extra_info.answer",
    "+data.prompt_dict_keys=[]",
    "data.micro_batch_size_per_gpu=4",
    "data.balance_dp_token=False",
    "data.multiturn.enable=true",
    "data.multiturn.messages_key=chat",
    "data.custom_cls.path=null",
    "data.custom_cls.name=null",
    "data.use_shm=False",
    "model.partial_pretrain=Qwen/Qwen2.5-0.5B-Instruct",
    "model.strategy=fsdp2",
    "model.use_liger=False",
    "model.lora_rank=0",
    "model.lora_alpha=16",
    "model.target_modules=all-linear",
    "model.external_lib=null",
    "model.fsdp_config.model_dtype=fp32",
    "model.fsdp_config.wrap_policy.min_num_params=0",
    "model.fsdp_config.cpu_offload=False",
    "model.fsdp_config.offload_params=False",
    "optim.lr=1e-4",
    "optim.warmup_steps_ratio=0.2",
    "optim.lr_warmup_steps=-1",
    "use_remove_padding=true",
    "ulysses_sequence_parallel_size=2",
    "trainer.default_hdfs_dir=null",
    "trainer.nnodes=1",
    "trainer.n_gpus_per_node=8",
    "trainer.logger=['console','wandb']",
    "trainer.total_epochs=1",
]


def error_of(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(list(words))
    return str(caught.value)


def test_a_launch_script_of_verl_runs_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config(VERL_SCRIPT)
    assert config.optim.lr_warmup_steps_ratio == 0.2 and config.model.ulysses_sequence_parallel_size == 2
    assert config.data.messages_key == "chat"
    assert config.trainer.logger == ["console", "wandb"]
    said = capsys.readouterr().err.splitlines()
    foreign = [word for word in VERL_SCRIPT if word.lstrip("+").partition("=")[0] not in known_keys()]
    assert [line.split(" ")[1] for line in said] == [word.lstrip("+") for word in foreign], "one line for each"
    assert "note: optim.warmup_steps_ratio=0.2 (of verl) is taken as optim.lr_warmup_steps_ratio=0.2" in said
    assert "note: model.strategy=fsdp2 (of verl) changes nothing here" in said
    ranks = "note: trainer.n_gpus_per_node=8 (of verl) changes nothing here: the ranks of a machine are the first word"
    assert f"{ranks}, bash run_sft.sh 8" in said


def test_what_verls_engine_writes_by_default_changes_nothing() -> None:
    """Of verl 0.9.1, as its resolved configuration has them."""
    values = {"enable_thinking_key": "enable_thinking", "override_config": "{}", "_target_": "verl.workers.config.X"}
    values |= {"wrap_policy.min_num_params": "0", "seed": "42", "use_torch_compile": "true", "qat.enable": "false"}
    values |= {"pad_to_length_bucket": "1024", "tiled_mlp.num_shards": "4", "lora.rank": "0", "num_cycles": "0.5"}
    groups = {"enable_thinking_key": "data", "num_cycles": "optim"} | dict.fromkeys(
        ("override_config", "tiled_mlp.num_shards", "lora.rank"), "model"
    )
    words = [f"{groups.get(key, 'engine')}.{key}={value}" for key, value in values.items()]
    assert own_words(["optim.zero_indexed_step=true", "trainer.profile_interval=[-1,-1]", *words]) == []


def test_what_is_said_once_is_not_said_by_every_rank(capsys: pytest.CaptureFixture[str]) -> None:
    """The ranks get the words the launcher made of them."""
    arguments = parse_arguments(["2", "model.strategy=fsdp2", "model.path=here", "optim.lr=1e-5"])
    assert arguments.overrides == ["model.partial_pretrain=here", "optim.lr=1e-5"]
    assert len(capsys.readouterr().err.splitlines()) == 2
    load_config(arguments.overrides)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("word", "origin", "here"),
    [
        ("trainer.nnodes=2", "verl", "the same command on each machine, with NNODES=2"),
        ("lora_r=8", "TRL", "here: model.lora_rank=8"),
        ("lora_dropout=0.1", "others", "adapters have no dropout"),
        ("model.use_liger=true", "verl", "Liger's kernels are not used"),
        ("model.fsdp_config.offload_params=true", "verl", "model.fsdp_config.cpu_offload=true"),
        ("data.prompt_dict_keys=[question]", "verl", "data.prompt_key=COLUMN.KEY"),
        ("data.custom_cls.path=mine.py", "verl", "write them as .jsonl"),
        ("optim.num_cycles=2", "verl", "a cosine schedule is half a period"),
        ("optim.learning_rate=1e-5", "transformers", "here: optim.lr=1e-5"),
        ("learning_rate=1e-5", "transformers", "here: optim.lr=1e-5"),
        ("trainer.output_dir=out", "transformers", "here: trainer.default_local_dir=out"),
        ("data.gradient_accumulation_steps=4", "transformers", "data.train_batch_size=N is the batch of all ranks"),
        ("per_device_train_batch_size=2", "transformers", "data.micro_batch_size_per_gpu=2"),
        ("num_train_epochs=3", "transformers", "here: trainer.total_epochs=3"),
        ("save_steps=50", "transformers", "here: trainer.save_freq=50"),
        ("eval_steps=50", "transformers", "here: trainer.test_freq=50"),
        ("warmup_ratio=0.03", "transformers", "here: optim.lr_warmup_steps_ratio=0.03"),
        ("max_seq_length=4096", "TRL", "here: data.max_length=4096"),
        ("packing=false", "TRL", "model.attention=per_document"),
        ("bf16=true", "transformers", "model.fsdp_config.param_dtype=bfloat16"),
        ("deepspeed=ds.json", "transformers", "reshard_after_forward=true is ZeRO-3"),
        ("sequence_len=4096", "axolotl", "here: data.max_length=4096"),
        ("base_model=gpt2", "axolotl", "here: model.partial_pretrain=gpt2"),
        ("cutoff_len=4096", "LLaMA-Factory", "here: data.max_length=4096"),
        ("finetuning_type=lora", "LLaMA-Factory", "model.lora_rank=16 trains LoRA adapters"),
        ("checkpointer.checkpoint_dir=/m", "torchtune", "here: model.partial_pretrain=/m"),
        ("tokenizer.max_seq_len=4096", "torchtune", "here: data.max_length=4096"),
    ],
)
def test_a_key_of_another_trainer_is_answered_with_what_it_is_here(word: str, origin: str, here: str) -> None:
    message = error_of(word)
    assert message.startswith(f"unknown configuration key '{word}' (of {origin}); here: ")
    assert here in message and "did you mean" not in message


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--learning_rate", "1e-5"], "'learning_rate' (of transformers); here: optim.lr=VALUE"),
        (["--learning-rate=1e-5"], "'learning_rate=1e-5' (of transformers); here: optim.lr=1e-5"),
        (["--multirun"], "'multirun' (of hydra); here: one run takes one value"),
        (["--config-name=mine"], "'config_name=mine' (of hydra); here: experiment=NAME"),
        (["--nproc_per_node=8"], "'nproc_per_node=8' (of torchrun); here: the ranks of a machine are the first word"),
    ],
)
def test_flags_of_others_are_answered_too(words: list[str], message: str) -> None:
    assert message in error_of(*words)


def test_all_foreign_keys_are_answered_at_once() -> None:
    lines = error_of("learning_rate=1e-5", "trainer.nnodes=1", "num_train_epochs=3", "optim.lr=1e-5").splitlines()
    assert [line.rpartition(" ")[2] for line in lines] == ["optim.lr=1e-5", "trainer.total_epochs=3"]


def test_the_table_names_only_keys_that_exist_and_none_of_ours() -> None:
    leaves = {key.rpartition(".")[2] for key in known_keys()}
    patterns = [row.pattern for row in foreign_keys()]
    assert len(patterns) > 150 and len(set(patterns)) == len(patterns)
    in_another_group = {row.pattern for row in foreign_keys() if (row.own_key or "").endswith(f".{row.pattern}")}
    assert not {*leaves, *known_keys()} & set(patterns) - in_another_group
    assert [key for key in known_keys() if (row := find_foreign(key)) and key not in (row.pattern, row.own_key)] == []
    named = {key for row in foreign_keys() for key in re.findall(r"\b(?:data|model|optim|trainer)\.[\w.]*\w", row.here)}
    groups = {"model.fsdp_config"}
    free = "data.apply_chat_template_kwargs."
    assert sorted(key for key in named - groups if key not in known_keys() and not key.startswith(free)) == []


def test_a_key_of_the_same_meaning_has_ours() -> None:
    same = [row for row in foreign_keys() if row.own_key]
    assert len(same) > 8 and {row.own_key for row in same} <= set(known_keys())
    assert own_words([f"+{row.pattern}=x" for row in same]) == [f"{row.own_key}=x" for row in same]
