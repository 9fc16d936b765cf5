"""The workload that the CPU comparisons share, as files that any trainer can read.

GSM8K chats, a byte-level BPE of 4,096 entries trained on them, and a model with random weights, by
default a Qwen2 of 5.4 M parameters (hidden size 256, 6 layers, 4 query and 2 key heads, tied
embeddings). The samples are in `samples.npz` in the order in which our trainer uses them, so every
trainer sees equal tokens, labels and batches.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import make_quickstart
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from trainer.config import RowKeys
from trainer.data.batch_plan import Share, rows_at
from trainer.data.rows import PrepareOptions
from trainer.data.samples import TokenDataset
from trainer.data.token_cache import prepare
from trainer.data.tokens import tokenizer_digest
from trainer.quickstart import MODEL_DIR

SEED = 1
BATCH = 32
LR = 1e-3
SIZE = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_key_value_heads": 2,
    "num_hidden_layers": 6,
}
QUICKSTART_CONFIG = json.loads((MODEL_DIR / "config.json").read_text(encoding="utf-8"))
MODEL_CONFIG = {**QUICKSTART_CONFIG, **SIZE}
MODELS: dict[str, dict[str, Any]] = {
    "5m": {},
    "149m": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_attention_heads": 14,
        "num_hidden_layers": 8,
        "layer_types": ["full_attention"] * 8,
        "vocab_size": 32_768,
    },
    # like Qwen3.5: of four layers, three have linear attention
    "hybrid": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "head_dim": 64,
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * 2,
        "num_hidden_layers": 8,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
    },
    "mixture": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "head_dim": 64,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 176,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    },
}
"""{name: differences from `MODEL_CONFIG`}."""


@dataclass(frozen=True)
class Case:
    """`model` contains config.json, the weights in fp32 and the tokenizer; `train_file` the rows as
    messages.
    """

    directory: Path

    @property
    def model(self) -> Path:
        return self.directory / "model"

    @property
    def train_file(self) -> Path:
        return self.directory / "train.jsonl"

    @property
    def cache_dir(self) -> Path:
        return self.directory / "cache"

    @property
    def samples(self) -> Path:
        return self.directory / "samples.npz"


def read_chats(path: Path) -> list[dict[str, list[dict[str, str]]]]:
    """Return GSM8K's question/answer rows as chats."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [
        {
            "messages": [
                {"role": "user", "content": row["question"]},
                {"role": "assistant", "content": row["answer"]},
            ]
        }
        for row in rows
    ]


def make_case(directory: Path, train_file: Path, model: str = "5m") -> Case:
    """Write all files of the case into an empty directory."""
    case = Case(directory)
    case.model.mkdir(parents=True)
    chats = read_chats(train_file)
    case.train_file.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    texts = [message["content"] for chat in chats for message in chat["messages"]]
    write_model(case.model, texts, **MODELS[model])
    write_samples(case, prepare_tokens(case))
    return case


def write_model(directory: Path, texts: list[str], **changes: Any) -> None:
    """Write the configuration, fp32 weights from `SEED`, and a tokenizer trained on `texts`."""
    (directory / "config.json").write_text(json.dumps(MODEL_CONFIG | changes))
    make_quickstart.write_tokenizer(directory, make_quickstart.train_tokenizer(texts))
    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(directory), dtype=torch.float32
    )
    model.save_pretrained(directory)


def prepare_tokens(
    case: Case, *, max_length: int = 2048, truncation: str = "error"
) -> TokenDataset:
    tokens = AutoTokenizer.from_pretrained(case.model)
    return prepare(
        [case.train_file],
        tokenizer=tokens,
        tokenizer_digest=tokenizer_digest(tokens),
        options=PrepareOptions(RowKeys("messages", "tools", None, None), max_length, truncation),
        cache_dir=case.cache_dir,
    )


def write_samples(case: Case, dataset: TokenDataset) -> None:
    _, order = rows_at(np.arange(len(dataset)), (Share(len(dataset)),), seed=SEED, epoch=0)
    parts = [dataset.sample(int(index)) for index in order]
    np.savez(
        case.samples,
        input_ids=np.concatenate([ids for ids, _ in parts]),
        loss_mask=np.concatenate([mask for _, mask in parts]),
        offsets=np.cumsum([0, *(len(ids) for ids, _ in parts)]),
    )
