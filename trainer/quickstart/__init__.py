"""The bundled default: a tiny model without weights, its tokenizer and 3,840 instructions, as files.

`python tests/make_quickstart.py` generates the tokenizer.
"""

from pathlib import Path

MODEL_DIR = Path(__file__).parent / "model"
"""Configuration, tokenizer and chat template; weights are made from the run's seed."""
TRAIN_FILE = Path(__file__).parent / "train.jsonl"
"""Rows of `messages`, and `check`: an expression that is true after executing the answer."""
