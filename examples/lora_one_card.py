"""Train a LoRA adapter on one GPU. This needs the extra `lora` (peft).

    python examples/lora_one_card.py model.partial_pretrain=Qwen/Qwen2.5-7B-Instruct

Accepts any `key=value` of a run. Without a model, it uses the model and the rows that own_data.py
wrote.
"""

import sys
from pathlib import Path

from trainer.api import RunDirectory, train

BASE = RunDirectory(Path("checkpoints/examples/own_data"))
WORDS = (
    "data.train_files=chats.jsonl",
    "data.train_batch_size=8",
    "data.val_ratio=0.1",
    "model.lora_rank=16",
    "model.lora_alpha=32",
    "model.enable_gradient_checkpointing=true",
    "optim.lr=2e-4",
    "trainer.project_name=examples",
    "trainer.experiment_name=lora",
    "trainer.total_epochs=1",
)


def main() -> None:
    words = sys.argv[1:]
    if not any(word.startswith("model.partial_pretrain=") for word in words):
        if BASE.export is None:
            sys.exit(
                "there is no model yet: python examples/own_data.py, or model.partial_pretrain=…"
            )
        words = [f"model.partial_pretrain={BASE.export}", *words]
    run = train(*WORDS, *words, num_ranks=1)
    print(f"the adapter, for vLLM's --lora-modules and peft: {run.export}")


if __name__ == "__main__":
    main()
