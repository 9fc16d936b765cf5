"""The embedded default as files: made on first use, without network, and reused."""

import hashlib
import json
import os
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.errors import CannotWriteError
from trainer.quickstart.samples import generate_samples
from trainer.quickstart.tokenizer import (
    END_TOKEN,
    MAX_LENGTH,
    PAD_TOKEN,
    SPECIAL_TOKENS,
    VOCAB_SIZE,
    train_tokenizer,
    write_tokenizer,
)
from trainer.runtime.file_lock import locked

HERE = Path(__file__).resolve().parent
TOKEN_IDS = {"eos_token_id": SPECIAL_TOKENS.index(END_TOKEN), "pad_token_id": SPECIAL_TOKENS.index(PAD_TOKEN)}
MODEL_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LENGTH,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
    "use_cache": True,
    "use_sliding_window": False,
    "torch_dtype": "bfloat16",
    **TOKEN_IDS,
}
GENERATION_CONFIG: dict[str, Any] = {**TOKEN_IDS, "do_sample": False}


@dataclass(frozen=True)
class QuickstartFiles:
    """`model_dir` holds configuration and tokenizer but no weights; `train_file` the generated chats."""

    model_dir: Path
    train_file: Path


def ensure_quickstart(cache_dir: Path) -> QuickstartFiles:
    """The quickstart files under `cache_dir`, made if absent; safe when several processes come at once.

    What a killed process left half made is removed. Raises `CannotWriteError`.
    """
    directory = cache_dir / "quickstart" / content_version()
    if not directory.is_dir() or any(_half_made(directory)):
        try:
            with locked(cache_dir / "quickstart.lock") as is_alone:
                for leftover in _half_made(directory) if is_alone else ():
                    shutil.rmtree(leftover, ignore_errors=True)
                if not directory.is_dir():
                    _make(directory)
        except OSError as error:
            if directory.is_dir():  # no matter then that others' leftovers cannot be removed
                return _files_of(directory)
            raise CannotWriteError(
                f"cannot write the quickstart files to '{directory}': {error.strerror}; "
                f"set data.cache_dir to a directory that can be written"
            ) from error
    return _files_of(directory)


def _files_of(directory: Path) -> QuickstartFiles:
    return QuickstartFiles(model_dir=directory / "model", train_file=directory / "train.jsonl")


def _half_made(directory: Path) -> list[Path]:
    """Directories beside it that did not get their name, of any version."""
    return [path for path in directory.parent.glob(".*") if path.is_dir()]


def content_version() -> str:
    """Digest of everything the files are made from, so that a changed generator never meets old files."""
    sources = sorted(path for path in HERE.iterdir() if path.suffix in (".py", ".txt", ".jinja"))
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in sources)).hexdigest()[:12]


def _make(directory: Path) -> None:
    """Write everything beside `directory`, then give it its name; whoever comes second drops his copy."""
    staging = directory.with_name(f".{directory.name}.{uuid.uuid4().hex}")
    (staging / "model").mkdir(parents=True)
    try:
        _write(staging)
        os.rename(staging, directory)
    except OSError:
        if not directory.is_dir():
            raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _write(directory: Path) -> None:
    rows = generate_samples()
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    (directory / "train.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    model_dir = directory / "model"
    for name, content in (("config.json", MODEL_CONFIG), ("generation_config.json", GENERATION_CONFIG)):
        (model_dir / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    texts = [message["content"] for row in rows for message in row["messages"]]
    english = (HERE / "english.txt").read_text(encoding="utf-8").splitlines(keepends=True)
    tokenizer = train_tokenizer([*texts, *english])
    write_tokenizer(
        model_dir, tokenizer=tokenizer, chat_template=(HERE / "chat_template.jinja").read_text(encoding="utf-8")
    )
