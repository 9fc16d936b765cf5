"""Facts of sixteen example files of other trainers, and what each of them trains with, worked out by hand.

The files themselves: verl 0.7 (`examples/sft`) and its engine's test, TRL 1.16 (`examples`, `trl/scripts/sft.py`, the
pages on its command line), axolotl (`examples/llama-3`) and LLaMA-Factory (`examples`), of mid 2026.
"""

from dataclasses import dataclass, field
from typing import Any

HALF_OF_QWEN = "Qwen/Qwen2.5-0.5B"
GSM8K = "data.train_files=$HOME/data/gsm8k/train.parquet data.val_files=$HOME/data/gsm8k/test.parquet"
INSIDE = "data.prompt_key=extra_info data.response_key=extra_info data.prompt_dict_keys=['question']"


@dataclass(frozen=True)
class ForeignExample:
    """`expected`: our keys; `words` stand behind the file's name; `named`: keys that have no equal or are not known."""

    name: str
    text: str
    expected: dict[str, Any]
    words: tuple[str, ...] = ()
    named: set[str] = field(default_factory=set)


def yaml_lines(**settings: Any) -> str:
    return "".join(f"{key}: {'' if value is None else value}\n" for key, value in settings.items())


def launch(command: str, *words: str) -> str:
    return "#!/bin/bash\nset -x\n" + " \\\n    ".join([command, *words]) + "\n"


def expected(
    batch: int, lr: float, epochs: int, schedule: str, warmup: float, length: int, **more: Any
) -> dict[str, Any]:
    fixed = {"data.train_batch_size": batch, "optim.lr": lr, "trainer.total_epochs": epochs, "data.max_length": length}
    fixed |= {"optim.lr_scheduler": schedule, "optim.lr_warmup_steps_ratio": warmup}
    return fixed | {name.replace("__", "."): value for name, value in more.items()}


LEGACY = "nproc=$1\nsave_path=$2\nshift 2\n"
TORCHRUN = "torchrun --standalone --nnodes=1 --nproc_per_node=$nproc -m verl.trainer.fsdp_sft_trainer"
OPEN = {"nproc_per_node", "trainer.default_local_dir"}
ENGINE = """
NUM_GPUS=${NUM_GPUS:-8}
BACKEND=${BACKEND:-fsdp}
ENGINE_CONFIG="engine=${BACKEND} optim=${BACKEND} optim.lr=1e-5 optim.lr_warmup_steps_ratio=0.2 \\
    optim.weight_decay=0.1 optim.betas="[0.9,0.95]" optim.clip_grad=1.0 optim.min_lr_ratio=0.1 \\
    optim.lr_scheduler_type=cosine engine.ulysses_sequence_parallel_size=2 engine.strategy=fsdp2 engine.fsdp_size=4"
torchrun --nnodes=1 --nproc-per-node=${NUM_GPUS:-1} -m verl.trainer.sft_trainer data.train_files="~/d/train.parquet" \\
    data.train_batch_size=128 data.pad_mode=no_padding data.use_dynamic_bsz=True data.max_token_len_per_gpu=2048 \\
    model.path=${MODEL_PATH:-${HOME}/models/Qwen} ${ENGINE_CONFIG} trainer.test_freq=after_each_epoch \\
    trainer.save_freq=-1 trainer.logger=['console','file'] trainer.total_epochs=2 trainer.total_training_steps=2
"""
VERL = [
    ForeignExample(
        "gemma.sh",
        launch(
            LEGACY + TORCHRUN, GSM8K, INSIDE, "+data.response_dict_keys=['answer']", "data.micro_batch_size_per_gpu=4",
            "model.partial_pretrain=google/gemma-2b-it", "trainer.default_local_dir=$save_path",
            "trainer.total_epochs=2", """trainer.logger='["console","wandb"]' $@""",
        ),
        expected(256, 1e-5, 2, "cosine", 0.1, 1024, data__prompt_key="extra_info.question", data__truncation="error")
        | {"data.response_key": "extra_info.answer", "optim.betas": [0.9, 0.95], "trainer.logger": ["console", "wandb"]}
        | {"data.micro_batch_size_per_gpu": 4, "trainer.test_freq": -1, "trainer.max_ckpt_to_keep": None},
        named=OPEN,
    ),
    ForeignExample(
        "qwen_peft.sh",
        launch(
            LEGACY + TORCHRUN, GSM8K, INSIDE, "+data.response_dict_keys=['answer']", "optim.lr=1e-4",
            f"model.partial_pretrain={HALF_OF_QWEN}-Instruct", "trainer.total_epochs=1 $@", "model.lora_rank=32\\\n",
            "model.lora_alpha=16", "model.target_modules=all-linear",
        ),
        expected(256, 1e-4, 1, "cosine", 0.1, 1024, model__lora_rank=32, model__lora_alpha=16),
        named={"nproc_per_node"},
    ),
    ForeignExample(
        "multiturn_sp2.sh",
        launch(
            LEGACY + TORCHRUN, "data.train_files=$HOME/m/train.parquet", "data.multiturn.enable=true",
            "data.multiturn.messages_key=messages", "data.micro_batch_size=4", f"model.partial_pretrain={HALF_OF_QWEN}",
            "trainer.total_training_steps=1 $@", "ulysses_sequence_parallel_size=2", "use_remove_padding=true",
        ),
        expected(256, 1e-5, 4, "cosine", 0.1, 1024, data__prompt_key=None, trainer__total_training_steps=1)
        | {"model.ulysses_sequence_parallel_size": 2, "data.val_ratio": 0.0},
        named={"nproc_per_node"},
    ),
    ForeignExample(
        "engine.sh",
        ENGINE,
        expected(128, 1e-5, 2, "cosine", 0.2, 1024, optim__weight_decay=0.1, optim__min_lr_ratio=0.1)
        | {"model.ulysses_sequence_parallel_size": 2, "model.fsdp_config.fsdp_size": 4, "data.val_ratio": 0.0}
        | {"data.max_token_len_per_gpu": 2048, "trainer.total_training_steps": 2, "trainer.logger": ["console"]},
        named={"trainer.test_freq"},
    ),
]  # fmt: skip
TRL_SCRIPT = "accelerate launch --num_processes 1 trl/scripts/sft.py"
TRL = [
    ForeignExample(
        "cli.yaml",
        "model_name_or_path:\n  Qwen/Qwen2.5-0.5B\ndataset_name:\n  org/films\nreport_to:\n  none\n"
        "learning_rate:\n  0.0001\nlr_scheduler_type:\n  cosine\n",
        expected(16, 1e-4, 3, "cosine", 0.0, 1024, data__train_files="hf://org/films:train", trainer__seed=42)
        | {"data.truncation": "right", "optim.weight_decay": 0.0, "optim.betas": [0.9, 0.999], "data.val_ratio": 0.0}
        | {"model.enable_gradient_checkpointing": True, "model.fsdp_config.param_dtype": "bfloat16"},
        words=("2",),
    ),
    ForeignExample(
        "processes.yaml",
        yaml_lines(model_name_or_path=HALF_OF_QWEN, dataset_name="org/films", num_processes=4),
        expected(32, 2e-5, 3, "linear", 0.0, 1024, optim__clip_grad=1.0, data__chat_template=None),
    ),
    ForeignExample(
        "lora.sh",
        launch(
            TRL_SCRIPT, "--model_name_or_path Qwen/Qwen2-0.5B", "--dataset_name org/chats", "--learning_rate 2.0e-4",
            "--num_train_epochs 1", "--packing", "--per_device_train_batch_size 2", "--gradient_accumulation_steps 8",
            "--eos_token '<|im_end|>'", "--eval_strategy steps", "--eval_steps 100", "--use_peft", "--lora_r 32",
            "--lora_alpha 16", "--output_dir out", "--push_to_hub",
        ),
        # 2 x 8 x 1 packed sequences of 1,024 tokens are 16 x 1,024 / 512 rows
        expected(32, 2e-4, 1, "linear", 0.0, 1024, model__lora_rank=32, model__lora_alpha=16, trainer__test_freq=100)
        | {"data.val_files": "hf://org/chats:test", "model.target_modules": ["q_proj", "v_proj"]},
        words=("--mean-tokens", "512"),
        named={"eos_token", "push_to_hub", "lora_dropout"},
    ),
    ForeignExample(
        "gpt_oss.sh",
        launch(
            "accelerate launch --config_file zero3.yaml sft_gpt_oss.py", "--dtype bfloat16",
            "--model_name_or_path openai/gpt-oss-20b", "--packing", "--run_name 20b-full", "--dataset_num_proc 12",
            "--dataset_name org/thinking", "--max_length 4096", "--per_device_train_batch_size 2",
            "--num_train_epochs 1", "--warmup_steps 0.03", "--lr_scheduler_type cosine_with_min_lr",
            """--lr_scheduler_kwargs '{"min_lr_rate": 0.1}'""", "--report_to trackio", "--seed 42",
        ),
        # 2 x 8 packed sequences of 4,096 tokens are 16 x 4,096 / 1,024 rows
        expected(64, 2e-5, 1, "cosine", 0.03, 4096, optim__min_lr_ratio=0.1, model__master_dtype="bfloat16")
        | {"trainer.experiment_name": "20b-full", "data.max_token_len_per_gpu": 8192, "optim.state_dtype": "bfloat16"},
        words=("8", "--mean-tokens", "1024"),
    ),
]  # fmt: skip
AXOLOTL_ALWAYS = {
    "val_set_size": 0.05, "output_dir": "./outputs/out", "wandb_project": None, "lr_scheduler": "cosine",
    "bf16": "auto", "tf32": False, "gradient_checkpointing": True, "logging_steps": 1, "warmup_ratio": 0.1,
    "evals_per_epoch": 4, "saves_per_epoch": 1, "weight_decay": 0.0, "special_tokens": "{pad_token: <pad>}",
}  # fmt: skip
BY_EPOCH = {"evals_per_epoch", "saves_per_epoch", "special_tokens"}
AXOLOTL_LORA = {"adapter": "lora", "lora_r": 32, "lora_alpha": 16, "lora_dropout": 0.05, "lora_target_linear": True}


def axolotl(**settings: Any) -> str:
    return yaml_lines(**AXOLOTL_ALWAYS | settings)


AXOLOTL = [
    ForeignExample(
        "fft-8b.yaml",
        axolotl(
            base_model="Llama-3.1-8B", datasets="[{path: org/alpaca, type: alpaca}]", sequence_len=8192,
            sample_packing=True, gradient_accumulation_steps=8, micro_batch_size=1, num_epochs=1,
            optimizer="paged_adamw_8bit", learning_rate="2e-5", attn_implementation="flash_attention_2",
        ),
        # 1 x 8 x 8 packed sequences of 8,192 tokens at 256 tokens a row
        expected(2048, 2e-5, 1, "cosine", 0.1, 8192, data__truncation="drop", data__val_ratio=0.05)
        | {"model.lora_rank": 0, "data.max_token_len_per_gpu": 8192, "optim.weight_decay": 0.0},
        words=("8", "--mean-tokens", "256"),
        named=BY_EPOCH,
    ),
    ForeignExample(
        "lora-8b.yml",
        axolotl(
            base_model="Llama-3-8B", load_in_8bit=True, load_in_4bit=False, sequence_len=4096, sample_packing=False,
            datasets="[{path: data/alpaca.jsonl, type: alpaca}]", lora_modules_to_save="[embed_tokens, lm_head]",
            gradient_accumulation_steps=4, micro_batch_size=2, num_epochs=4, optimizer="adamw_bnb_8bit",
            learning_rate=0.0002, **AXOLOTL_LORA,
        ),
        expected(8, 2e-4, 4, "cosine", 0.1, 4096, model__lora_rank=32, data__train_files="data/alpaca.jsonl"),
        words=("1",),
        named=BY_EPOCH | {"load_in_8bit", "lora_modules_to_save", "lora_dropout"},
    ),
    ForeignExample(
        "instruct-lora-8b.yml",
        axolotl(
            base_model="Llama-3-8B-Instruct", chat_template="llama3", sample_packing=False, sequence_len=4096,
            datasets="[{path: org/messages, type: chat_template}]", gradient_accumulation_steps=4, num_epochs=4,
            micro_batch_size=2, optimizer="adamw_bnb_8bit", learning_rate=0.0002, **AXOLOTL_LORA,
        ),
        expected(64, 2e-4, 4, "cosine", 0.1, 4096, data__chat_template="llama3", model__target_modules="all-linear")
        | {"model.lora_alpha": 16, "data.train_files": "hf://org/messages:train", "data.val_ratio": 0.05},
        words=("8",),
        named=BY_EPOCH | {"lora_dropout"},
    ),
    ForeignExample(
        "fft-liger-fsdp.yaml",
        axolotl(
            base_model="Llama-3.1-8B", plugins="[axolotl.integrations.liger.LigerPlugin]", liger_rope=True,
            chat_template="llama3", sequence_len=4096, sample_packing=True, gradient_accumulation_steps=4,
            datasets="[{path: org/FineTome, type: chat_template, split: 'train[:20%]', field_messages: conversations, "
            "message_property_mappings: {role: from, content: value}}]", micro_batch_size=2, num_epochs=1,
            optimizer="adamw_torch_fused", learning_rate="2e-5", fsdp="[full_shard, auto_wrap]",
            fsdp_config="{fsdp_offload_params: true, fsdp_state_dict_type: FULL_STATE_DICT}",
        ),
        # without the mean length of a row: 2 x 4 x 8 rows, and a line that says how much more it was
        expected(64, 2e-5, 1, "cosine", 0.1, 4096, data__chat_template="llama3", model__fsdp_config__cpu_offload=True)
        | {"data.train_files": "hf://org/FineTome:train", "data.messages_key": "messages"},
        words=("8",),
        named=BY_EPOCH | {"plugins"},
    ),
]  # fmt: skip
FACTORY_ALWAYS = {
    "trust_remote_code": True, "stage": "sft", "do_train": True, "dataset": "identity,alpaca_en_demo",
    "cutoff_len": 2048, "max_samples": 1000, "overwrite_cache": True, "preprocessing_num_workers": 16,
    "dataloader_num_workers": 4, "output_dir": "saves/out", "logging_steps": 10, "save_steps": 500, "plot_loss": True,
    "overwrite_output_dir": True, "save_only_model": False, "report_to": "none", "per_device_train_batch_size": 1,
    "num_train_epochs": 3.0, "lr_scheduler_type": "cosine", "warmup_ratio": 0.1, "bf16": True, "ddp_timeout": 180000000,
}  # fmt: skip


def factory(**settings: Any) -> str:
    return yaml_lines(**FACTORY_ALWAYS | settings)


FACTORY = [
    ForeignExample(
        "qwen3_full.yaml",
        factory(
            model_name_or_path="Qwen/Qwen3-4B", finetuning_type="full", deepspeed="ds_z3.json", learning_rate=1e-5,
            template="qwen3_nothink", gradient_accumulation_steps=2, resume_from_checkpoint=None,
        ),
        expected(16, 1e-5, 3, "cosine", 0.1, 2048, data__truncation="right", data__chat_template=None)
        | {"model.lora_rank": 0, "model.enable_gradient_checkpointing": True, "data.train_max_samples": 1000}
        | {"trainer.seed": 42, "trainer.save_freq": 500, "data.val_ratio": 0.0, "optim.weight_decay": 0.0},
        words=("8",),
        named={"dataset"},
    ),
    ForeignExample(
        "qwen3_lora.sh",
        launch(
            "MODEL_PATH=Qwen/Qwen3-4B\nllamafactory-cli train", "--model_name_or_path ${MODEL_PATH}", "--stage sft",
            "--do_train", "--finetuning_type lora", "--lora_rank 8", "--lora_target all", "--dataset identity",
            "--template qwen3_nothink", "--cutoff_len 2048", "--per_device_train_batch_size 1",
            "--gradient_accumulation_steps 8", "--learning_rate 1e-4", "--num_train_epochs 3.0",
            "--lr_scheduler_type cosine", "--warmup_ratio 0.1", "--bf16",
        ),
        expected(8, 1e-4, 3, "cosine", 0.1, 2048, model__lora_rank=8, model__lora_alpha=16)
        | {"model.target_modules": "all-linear", "model.partial_pretrain": "Qwen/Qwen3-4B"},
        words=("1",),
        named={"dataset"},
    ),
    ForeignExample(
        "qwen2_dft.yaml",
        factory(
            model_name_or_path="Qwen/Qwen2-1.5B-Instruct", finetuning_type="full", use_dft_loss=True, template="qwen",
            gradient_accumulation_steps=8, learning_rate=1e-5,
        ),
        expected(32, 1e-5, 3, "cosine", 0.1, 2048, model__loss="dft"),
        words=("4",),
        named={"dataset"},
    ),
    ForeignExample(
        "llama3_qlora.yaml",
        factory(
            model_name_or_path="meta-llama/Meta-Llama-3-8B-Instruct", quantization_bit=4, finetuning_type="lora",
            lora_rank=8, lora_target="all", template="llama3", gradient_accumulation_steps=8, learning_rate=1e-4,
        ),
        expected(16, 1e-4, 3, "cosine", 0.1, 2048, model__lora_rank=8, data__chat_template="llama3"),
        words=("2",),
        named={"dataset", "quantization_bit"},
    ),
]  # fmt: skip
