"""Prepare rows with TRL and write its token ids and labels: VERL_PYTHON prepare_with_trl.py DIR.

DIR/jobs.json has for each name the model's directory, the rows, TRL's options, and a chat template
of TRL's by name. Writes NAME.jsonl for each job, with labels as the data collator makes them,
before the shift, and NAME.jinja for each template.
"""

import json
import sys
from pathlib import Path

import datasets
import torch
import trl
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

TEMPLATES = Path(trl.__file__).parent / "chat_templates"


def main(directory):
    torch.set_num_threads(1)
    datasets.disable_progress_bars()
    for name, job in json.loads((directory / "jobs.json").read_text()).items():
        dump(trainer_of(directory, job), directory / f"{name}.jsonl")


def dump(trainer, path):
    with path.open("w") as file:
        for row in trainer.train_dataset:
            batch = trainer.data_collator([row])
            row = {key: batch[key][0].tolist() for key in ("input_ids", "labels")}
            file.write(json.dumps(row) + "\n")


def trainer_of(directory, job):
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    if job["template"]:
        file = f"{job['template']}.jinja"
        tokenizer.chat_template = (TEMPLATES / file).read_text()
        (directory / file).write_text(tokenizer.chat_template)
    config = AutoConfig.from_pretrained(job["model"], num_hidden_layers=1)
    return trl.SFTTrainer(
        model=AutoModelForCausalLM.from_config(config),
        args=trl.SFTConfig(
            output_dir=str(directory / "out"),
            report_to=[],
            use_cpu=True,
            bf16=False,
            **job["options"],
        ),
        train_dataset=datasets.Dataset.from_list(job["rows"], on_mixed_types="use_json"),
        processing_class=tokenizer,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
