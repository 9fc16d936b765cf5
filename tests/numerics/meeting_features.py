"""Features that can be combined in a run, with their values, as command-line arguments."""

import random
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from family_trials import save_model
from peft import LoraConfig, get_peft_model
from plain_training import BETAS, DECAY, EPS, MIN_LR_RATIO
from safetensors.torch import load_file, save_file
from small_files import read_json, write_lines
from transformers import AutoModelForCausalLM, AutoTokenizer

from trainer.data.formats import vocabulary_digest
from trainer.model import nf4
from trainer.quickstart import MODEL_DIR
from trainer.train.start.compose import as_word

MIXTURE = "qwen3_moe"
"""The family whose experts can be adapted and divided among ranks."""
Row = dict[str, str]
"""{feature: value}."""
FEATURES = {
    "family": ("qwen2", "llama", "qwen3_moe", "gemma3_text", "gemma2", "mistral", "qwen3_next"),
    "ranks": ("2", "4"),
    "resumed on": ("the same", "fewer", "more"),
    "attention": ("auto", "per_document"),
    "sequence": ("1", "2"),
    "fsdp_size": ("-1", "1", "2"),
    "reshard": ("auto", "true", "false"),
    "offload": ("false", "true"),
    "recompute": ("false", "true", "selective", "offload"),
    "experts": ("1", "2"),
    "trained": ("all", "lora", "some", "lora on nf4", "lora and ends", "lora on experts"),
    "loss": ("cross_entropy", "dft"),
    "optimizer": ("adamw", "muon"),
    "states": ("float32", "bfloat16", "bfloat16 parameters"),
    "schedule": ("cosine", "linear", "constant", "wsd"),
    "sources": ("one", "two"),
    "micro-batches": ("unlimited", "tokens", "one", "two"),
    "length": ("steps", "epochs"),
    "deterministic": ("false", "true"),
    "validation": ("on", "off"),
    "guard": ("quiet", "skips"),
    "clipping": ("never", "hit"),
    "async_save": ("true", "false"),
    "num_workers": ("0", "1"),
}
ADAPTERS = [value for value in FEATURES["trained"] if value.startswith("lora")]
REFUSED = [
    {"sequence": "2", "attention": "per_document"},
    {"sequence": "2", "family": "qwen3_next"},
    {"experts": "2", "offload": "true"},
    {"experts": "2", "fsdp_size": "1"},
    # six ranks cannot hold equal numbers of four experts
    {"experts": "2", "fsdp_size": "-1", "ranks": "4", "resumed on": "more"},
    *({"experts": "2", "trained": value} for value in ADAPTERS),
    *({"experts": "2", "family": name} for name in FEATURES["family"] if name != MIXTURE),
    *({"trained": "lora on experts", "family": n} for n in FEATURES["family"] if n != MIXTURE),
]
"""Incompatible values."""
FROZEN = ("embed_tokens", r"layers\.0\.")
MAX_LENGTH = 40
LR = 1e-3
BATCH_SIZE = 4
TEST_FREQ = 2
SAVE_FREQ = 2
NUM_STEPS = 4
NUM_EPOCHS = 2
ADAPTED = ("q_proj", "v_proj", "o_proj")
SHAPES = {"qwen3_moe": {"router_aux_loss_coef": 0.1}, "qwen3_next": {"router_aux_loss_coef": 0.1}}
SHAPES |= {"llama": {"tie_word_embeddings": True}}


@dataclass(frozen=True)
class Places:
    """Directories of models, adapters, data and the token cache, made once for all trials."""

    root: Path

    def model(self, row):
        """The weights of a model for NF4 are exact NF4 levels, so storing them in NF4 changes none
        of them.
        """
        family = row["family"]
        is_nf4 = row["trained"] == "lora on nf4"
        path = self.root / ("nf4 models" if is_nf4 else "models") / family
        if not path.exists():
            longer = {"vocab_size": VOCAB, "max_position_embeddings": 128}
            wider = {"hidden_size": 64, "intermediate_size": 128} if is_nf4 else {}
            save_model(path, family, **(longer | SHAPES.get(family, {}) | wider))
            if is_nf4:
                round_to_nf4(path / "model.safetensors")
            for file in MODEL_DIR.iterdir():
                if file.name not in ("config.json", "generation_config.json"):
                    shutil.copy(file, path)
        return path

    def adapter(self, row):
        """An adapter made by peft. Neither of its two matrices is zero."""
        if not row["trained"].startswith("lora"):
            return None
        path = self.root / "adapters" / row["family"] / row["trained"]
        if not path.exists():
            model = AutoModelForCausalLM.from_pretrained(self.model(row))
            ends = ["embed_tokens", "lm_head"] if row["trained"] == "lora and ends" else None
            is_on_experts = row["trained"] == "lora on experts"
            experts = ["experts.gate_up_proj", "experts.down_proj"] if is_on_experts else None
            config = LoraConfig(
                r=4,
                lora_alpha=8,
                target_modules=list(ADAPTED),
                target_parameters=experts,
                modules_to_save=ends,
                ensure_weight_tying=ends is not None,
                init_lora_weights=False,
                task_type="CAUSAL_LM",
            )
            get_peft_model(model, config).save_pretrained(path)
        return path

    def data(self, name):
        path = self.root / "data" / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        digest = {"vocabulary_digest": vocabulary_digest(AutoTokenizer.from_pretrained(MODEL_DIR))}
        rows = [
            {"input_ids": ids, "loss_mask": list(map(int, mask)), **digest}
            for ids, mask in DATA[name]
        ]
        write_lines(path, rows)
        return path


def round_to_nf4(file):
    """Round in place the matrices that may belong to linear layers."""
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and tensor.shape[1] % nf4.BLOCK == 0:
            levels = torch.tensor(nf4.LEVELS)
            tensors[name] = nf4.dequantized(nf4.quantized(tensor), levels, tensor.dtype)
    save_file(tensors, file, metadata={"format": "pt"})


def _drawn_rows(seed, count):
    """Draw token ids and a mask of the supervised ones, in which at least the last is supervised."""
    generator = random.Random(seed)
    rows = []
    for _ in range(count):
        length = generator.randrange(4, MAX_LENGTH)
        ids = [generator.randrange(NUM_IDS) for _ in range(length)]
        rows.append((ids, [*(generator.random() < 0.5 for _ in ids[1:]), True]))
    return rows


NUM_IDS = 1000
"""The range of the drawn token ids. The tokenizer has more."""
VOCAB = read_json(MODEL_DIR / "config.json")["vocab_size"]
DATA = {
    "main": _drawn_rows(0, 8),
    "first": _drawn_rows(1, 5),
    "second": _drawn_rows(2, 3),
    "held": _drawn_rows(3, 3),
}
SOURCES = {"one": {"main": 1.0}, "two": {"first": 1.5, "second": 1.0}}
"""Files, and how often an epoch trains their rows."""


def words_of(row, places, *, limits):
    """`limits` contains the gradient norms beyond which updates are clipped and skipped."""
    parts = [
        f"{{files: {places.data(name)}, repeat: {repeat}}}"
        for name, repeat in SOURCES[row["sources"]].items()
    ]
    held = [f"{{files: {places.data('held')}}}"]
    held += [f"{{files: {places.data('second')}}}"] if row["sources"] == "two" else []
    tokens = MAX_LENGTH // int(row["sequence"])
    micro_batches = {
        "unlimited": "data.max_token_len_per_gpu=8192",
        "tokens": f"data.max_token_len_per_gpu={tokens}",
        "one": "data.micro_batch_size_per_gpu=1",
        "two": "data.micro_batch_size_per_gpu=2",
    }
    adapter = places.adapter(row)
    skip = f"{{metric: train/grad_norm, above: {limits.get('skip', 1e9)!r}, do: skip}}"
    optional = [
        (adapter is not None, f"model.lora_adapter_path={adapter}"),
        (row["trained"] == "lora on nf4", "model.load_in_4bit=true"),
        (row["trained"] == "some", f"model.freeze=[{','.join(map(as_word, FROZEN))}]"),
        (row["guard"] == "skips", f"trainer.guard.rules=[{skip}]"),
        (row["states"] != "float32", "optim.state_dtype=bfloat16"),
        (row["states"] == "bfloat16 parameters", "model.master_dtype=bfloat16"),
        (row["length"] == "steps", f"trainer.total_training_steps={NUM_STEPS}"),
        (row["validation"] == "on", f"data.val_files=[{','.join(held)}]"),
    ]
    return [
        f"model.partial_pretrain={places.model(row)}",
        f"data.train_files=[{','.join(parts)}]",
        micro_batches[row["micro-batches"]],
        *(word for is_meant, word in optional if is_meant),
        f"data.max_length={MAX_LENGTH}",
        f"optim.clip_grad={limits.get('clip', 1e9)!r}",
        *(f"{KEYS[name]}={row[name]}" for name in KEYS),
        "model.fsdp_config.param_dtype=float32",
        f"optim.lr={LR}",
        f"optim.eps={EPS}",
        f"optim.betas=[{','.join(map(str, BETAS))}]",
        f"optim.weight_decay={DECAY}",
        "optim.lr_warmup_steps_ratio=0",
        f"optim.min_lr_ratio={MIN_LR_RATIO}",
        f"data.train_batch_size={BATCH_SIZE}",
        f"data.cache_dir={places.root / 'cache'}",
        "data.val_ratio=0",
        f"trainer.total_epochs={NUM_EPOCHS}",
        f"trainer.save_freq={SAVE_FREQ}",
        f"trainer.test_freq={TEST_FREQ}",
        "trainer.max_ckpt_to_keep=null",
        "trainer.checkpoint.export_dtype=float32",
        "trainer.device=cpu",
        "trainer.logger=[]",
        "trainer.hang_timeout_s=20",
    ]


KEYS = {
    "attention": "model.attention",
    "sequence": "model.ulysses_sequence_parallel_size",
    "fsdp_size": "model.fsdp_config.fsdp_size",
    "experts": "model.expert_parallel_size",
    "reshard": "model.fsdp_config.reshard_after_forward",
    "offload": "model.fsdp_config.cpu_offload",
    "recompute": "model.enable_gradient_checkpointing",
    "loss": "model.loss",
    "optimizer": "optim.name",
    "schedule": "optim.lr_scheduler",
    "deterministic": "trainer.deterministic",
    "async_save": "trainer.checkpoint.async_save",
    "num_workers": "data.num_workers",
}
"""Features whose values are the values of one key."""


def ranks_of(row):
    """The number of ranks that train, and the number that continues after the kill."""
    num_ranks = int(row["ranks"])
    return num_ranks, {"the same": num_ranks, "fewer": num_ranks // 2, "more": num_ranks + 2}[
        row["resumed on"]
    ]


def drawn(seed):
    """Return one value for each feature, so that all values are compatible."""
    generator = random.Random(seed)
    while True:
        row = {name: generator.choice(values) for name, values in FEATURES.items()}
        if not any(refused.items() <= row.items() for refused in REFUSED):
            return row
