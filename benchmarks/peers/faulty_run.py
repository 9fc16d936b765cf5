"""Real logs of TRL and of transformers' Trainer, healthy or with a wrong learning rate, for
`tests/real_logs`.

    python benchmarks/peers/faulty_run.py --case CASE --trainer trl --fault raised --output
    /tmp/trl_raised

`raised` multiplies the scheduled learning rate by `--factor` in `FAULT_STEPS`, as a wrong schedule
does; `peak` trains with a peak that many times too high from the start. The library writes
trainer_state.json; nothing in it is changed.
"""

import argparse
import math
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import BETAS, EPS, MAX_NORM, WEIGHT_DECAY, read_samples
from datasets import Dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Trainer,
    TrainingArguments,
)
from trl import SFTConfig, SFTTrainer

STEPS, WARMUP_STEPS, EVAL_EVERY, BATCH, NUM_EVAL_SAMPLES = 600, 30, 50, 8, 32
LR = 3e-3  # of the case three times: the model is much smaller
MAX_LENGTH = 96  # of each sample the end, which is the supervised part
FAULT_STEPS = range(400, 415)  # 1 for the first optimizer step, as the logs count
SMALL = {
    "num_hidden_layers": 2,
    "layer_types": ["full_attention"] * 2,
    "hidden_size": 128,
    "intermediate_size": 384,
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--case", type=Path, required=True, help="a directory of benchmarks/case.py"
    )
    parser.add_argument("--trainer", choices=("trl", "transformers"), required=True)
    parser.add_argument("--fault", choices=("none", "raised", "peak"), required=True)
    parser.add_argument("--factor", type=float, default=50.0)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--logging-steps", type=int, default=1)
    return parser.parse_args()


def lr_factor(scheduler_step: int, *, fault: str, factor: float) -> float:
    """Warm-up and cosine decay to zero, times the fault."""
    step = scheduler_step + 1
    if step <= WARMUP_STEPS:
        healthy = step / WARMUP_STEPS
    else:
        healthy = 0.5 * (1 + math.cos(math.pi * (step - WARMUP_STEPS) / (STEPS - WARMUP_STEPS)))
    faulty = fault == "peak" or (fault == "raised" and step in FAULT_STEPS)
    return factor * healthy if faulty else healthy


def datasets(case: Path, *, trainer: str) -> tuple[Dataset, Dataset]:
    """Training and held-out samples, as token ids."""
    samples = [
        (ids[-MAX_LENGTH:], mask[-MAX_LENGTH:])
        for ids, mask in read_samples(case, STEPS * BATCH + NUM_EVAL_SAMPLES)
    ]
    rows = [
        {"input_ids": ids.tolist(), "completion_mask": mask.astype(int).tolist()}
        if trainer == "trl"
        else {
            "input_ids": ids.tolist(),
            "labels": np.where(mask, ids, -100).tolist(),
            "attention_mask": [1] * len(ids),
        }
        for ids, mask in samples
    ]
    return Dataset.from_list(rows[NUM_EVAL_SAMPLES:]), Dataset.from_list(rows[:NUM_EVAL_SAMPLES])


def settings(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "output_dir": str(options.output / "run"),
        "max_steps": STEPS,
        "per_device_train_batch_size": BATCH,
        "per_device_eval_batch_size": BATCH,
        "learning_rate": LR,
        "max_grad_norm": MAX_NORM,
        "use_cpu": True,
        "seed": 1,
        "logging_steps": options.logging_steps,
        "eval_strategy": "steps",
        "eval_steps": EVAL_EVERY,
        "save_strategy": "steps",
        "save_steps": STEPS,
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(options.case / "model", **SMALL), dtype=torch.float32
    )
    tokenizer = AutoTokenizer.from_pretrained(options.case / "model")
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, partial(lr_factor, fault=options.fault, factor=options.factor)
    )
    train, held_out = datasets(options.case, trainer=options.trainer)
    parts = {"train_dataset": train, "eval_dataset": held_out, "optimizers": (optimizer, schedule)}
    if options.trainer == "trl":
        config = SFTConfig(
            **settings(options), bf16=False, max_length=None, completion_only_loss=True
        )
        trainer: Trainer = SFTTrainer(model, config, processing_class=tokenizer, **parts)
    else:
        collator = DataCollatorForSeq2Seq(tokenizer, padding=True)
        trainer = Trainer(
            model, TrainingArguments(**settings(options)), data_collator=collator, **parts
        )
    trainer.train()
    shutil.copy(
        options.output / "run" / f"checkpoint-{STEPS}" / "trainer_state.json", options.output
    )


if __name__ == "__main__":
    main()
