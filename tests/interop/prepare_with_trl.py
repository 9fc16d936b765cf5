"""Prepare rows with TRL and dump them with the script that `data compare` ships: VERL_PYTHON prepare_with_trl.py DIR.

DIR has dump_trl.py and jobs.json: for each name the model's directory, rows, TRL's options, its chat template by name,
and whether arrow may fill absent fields. Written are NAME.jsonl and each template, as NAME.jinja.
"""

import json
import sys
from pathlib import Path
from typing import Any

import datasets
import torch
import trl
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

TEMPLATES = Path(trl.__file__).parent / "chat_templates"


def main(directory: Path) -> None:
    sys.path.insert(0, str(directory))
    from dump_trl import dump

    torch.set_num_threads(1)
    datasets.disable_progress_bars()
    for name, job in json.loads((directory / "jobs.json").read_text()).items():
        dump(trainer_of(directory, job), directory / f"{name}.jsonl")


def trainer_of(directory: Path, job: dict[str, Any]) -> trl.SFTTrainer:
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    if job["template"]:
        file = f"{job['template']}.jinja"
        tokenizer.chat_template = (TEMPLATES / file).read_text()
        (directory / file).write_text(tokenizer.chat_template)
    config = AutoConfig.from_pretrained(job["model"], num_hidden_layers=1)
    mixed = None if job["is_filled"] else "use_json"  # as files are read
    return trl.SFTTrainer(
        model=AutoModelForCausalLM.from_config(config),
        args=trl.SFTConfig(output_dir=str(directory / "out"), report_to=[], use_cpu=True, bf16=False, **job["options"]),
        train_dataset=datasets.Dataset.from_list(job["rows"], on_mixed_types=mixed),
        processing_class=tokenizer,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
