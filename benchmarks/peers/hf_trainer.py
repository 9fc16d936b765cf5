"""Trains the case with TRL's SFTTrainer or, with `--option plain`, with transformers' own Trainer.

`--option compile` enables torch.compile, and `--option recompute` gradient checkpointing. There is
no option for packing: without the flash-attn package, TRL packs with a mask that does not separate
documents, so the work would differ.
"""

import os

import numpy as np
import torch
from common import BETAS, EPS, LR, MAX_NORM, WEIGHT_DECAY, Report, arguments, read_samples
from datasets import Dataset
from torch.utils.data import SequentialSampler
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Trainer,
    TrainerCallback,
)
from transformers import TrainingArguments as PlainConfig
from trl import SFTConfig, SFTTrainer


class StepReport(TrainerCallback):
    """Token counts come from the case; the loss is the one that the trainer logs."""

    def __init__(self, report: Report, num_tokens: list[int]) -> None:
        self.report = report
        self.num_tokens = num_tokens

    def on_log(self, args, state, control, logs=None, **kwargs):  # type: ignore[no-untyped-def]
        if logs and "loss" in logs and state.is_world_process_zero:
            step = state.global_step
            self.report.add(
                step=step,
                loss=float(logs["loss"]),
                grad_norm=float(logs["grad_norm"]),
                num_tokens=self.num_tokens[step - 1],
            )


class InOrder:
    def _get_train_sampler(self, dataset=None):  # type: ignore[no-untyped-def]
        return SequentialSampler(self.train_dataset)  # type: ignore[attr-defined]


class OrderedTrl(InOrder, SFTTrainer):
    pass


class OrderedPlain(InOrder, Trainer):
    pass


def main() -> None:
    options = arguments()
    samples = read_samples(options.case, options.steps * options.batch)
    lengths = np.array([len(ids) for ids, _ in samples]).reshape(options.steps, options.batch)
    report = StepReport(Report(options.output), lengths.sum(axis=1).tolist())
    dataset = Dataset.from_list(
        [
            {
                "input_ids": ids.tolist(),
                "labels": np.where(mask, ids, -100).tolist(),
                "attention_mask": [1] * len(ids),
            }
            if "plain" in options.option
            else {"input_ids": ids.tolist(), "completion_mask": mask.astype(int).tolist()}
            for ids, mask in samples
        ]
    )
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    common = {
        "output_dir": str(options.output) + ".run",
        "max_steps": options.steps,
        "per_device_train_batch_size": options.micro_batch,
        "gradient_accumulation_steps": options.batch // options.micro_batch // world_size,
        "learning_rate": LR,
        "lr_scheduler_type": "constant",
        "adam_beta1": BETAS[0],
        "adam_beta2": BETAS[1],
        "adam_epsilon": EPS,
        "weight_decay": WEIGHT_DECAY,
        "max_grad_norm": MAX_NORM,
        "optim": "adamw_torch_fused",
        "bf16": options.dtype == "bfloat16",
        "use_cpu": options.device == "cpu",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "torch_compile": "compile" in options.option,
        "ddp_backend": "gloo" if world_size > 1 else None,
    }
    if options.random_weights:
        with torch.device(options.device):
            config = AutoConfig.from_pretrained(options.case / "model")
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    else:
        model = AutoModelForCausalLM.from_pretrained(options.case / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(options.case / "model")
    if "plain" in options.option:
        trainer = OrderedPlain(
            model,
            PlainConfig(**common),
            train_dataset=dataset,
            data_collator=DataCollatorForSeq2Seq(tokenizer, padding=True),
            callbacks=[report],
        )
    else:
        config = SFTConfig(
            **common,
            max_length=None,
            gradient_checkpointing="recompute" in options.option,
            completion_only_loss=True,
        )
        trainer = OrderedTrl(
            model, config, train_dataset=dataset, processing_class=tokenizer, callbacks=[report]
        )
    trainer.train()


if __name__ == "__main__":
    main()
