"""Write your own rows, train on them, and print the path of the model.

    python examples/own_data.py model.partial_pretrain=Qwen/Qwen2.5-0.5B-Instruct

Accepts any `key=value` of a run. Without a model, it trains the quickstart's tiny model from
random weights, which works on a CPU.
"""

import json
import sys
from pathlib import Path

from trainer.api import train

FILE = Path("chats.jsonl")
WORDS = (
    f"data.train_files={FILE}",
    "data.train_batch_size=8",
    "data.val_ratio=0.1",
    "trainer.project_name=examples",
    "trainer.experiment_name=own_data",
    "trainer.total_epochs=2",
    "trainer.test_freq=5",
)


def main() -> None:
    chats = [(f"What is {n} plus {n}?", f"{n} plus {n} is {n + n}.") for n in range(40)]
    with FILE.open("w", encoding="utf-8") as file:
        for question, answer in chats:
            messages = [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")
    run = train(*WORDS, *sys.argv[1:])
    last = [row["val/loss"] for row in run.metrics() if "val/loss" in row][-1]
    print(f"validation loss {last:.3f}; for transformers and vLLM: {run.export}")


if __name__ == "__main__":
    main()
