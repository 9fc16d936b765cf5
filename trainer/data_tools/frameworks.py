"""The frameworks to compare with: how to dump what each prepared, and which of its settings explains a difference."""

from dataclasses import dataclass

_FROM_DISK = """
import json, sys
from datasets import DatasetDict, load_from_disk

dataset = load_from_disk(sys.argv[1])
dataset = dataset["train"] if isinstance(dataset, DatasetDict) else dataset
with open(sys.argv[2], "w") as file:
    for row in dataset:
        file.write(json.dumps({"input_ids": row["input_ids"], "labels": row["labels"]}) + "\\n")
"""


@dataclass(frozen=True)
class Framework:
    """`fixes`: by the start of a rule's name, the setting there that makes it like here."""

    script: str
    fixes: dict[str, str]


FRAMEWORKS = {
    "trl": Framework(
        """# Dump what TRL trains. In your training script: from dump_trl import dump; dump(trainer, "trl.jsonl")
# with packing=False; labels are those of the data collator, before the shift.
import json


def dump(trainer, path):
    with open(path, "w") as file:
        for row in trainer.train_dataset:
            batch = trainer.data_collator([row])
            row = {key: batch[key][0].tolist() for key in ("input_ids", "labels")}
            file.write(json.dumps(row) + "\\n")
""",
        {"whole conversation": "assistant_only_loss=True (messages) or completion_only_loss=True (prompt, completion)"},
    ),
    "llamafactory": Framework(
        "# Dump what LLaMA-Factory trains: run llamafactory-cli train YAML with tokenized_path: DIR, packing: false,\n"
        "# max_steps: 1 (it saves the tokens and trains on), then: python dump_llamafactory.py DIR llamafactory.jsonl"
        + _FROM_DISK,
        {
            "whole conversation": "train_on_prompt: false",
            "only the last turn": "mask_history: false",
            "system prompt only there": 'default_system: ""',
        },
    ),
    "axolotl": Framework(
        "# Dump what axolotl trains: run axolotl preprocess YAML with dataset_prepared_path: DIR,\n"
        "# sample_packing: false, then: python dump_axolotl.py DIR/HASH axolotl.jsonl" + _FROM_DISK,
        {
            "whole conversation": "train_on_inputs: false",
            "text outside": "train_on_inputs: false",
            "end token not": "train_on_eos: turn",
            "other chat template": "chat_template: tokenizer_default",
            "order differs": "shuffle_merged_datasets: false",
            "row missing there, longer": "excess_length_strategy: truncate, here data.truncation=right",
        },
    ),
}
