"""Forty released checkpoints as tiny replicas, trained in full and with LoRA; table of docs/models.md.

`python tests/checkpoint_table.py` tries the checkpoints without an entry in
benchmarks/results/checkpoints.json; `python tests/checkpoint_table.py openai/gpt-oss-20b` tries
this one again. The command itself trains each replica on two ranks, is killed with SIGKILL and
resumed. transformers and peft load the exports.
"""

import shutil
import sys
import tempfile
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from small_files import read_json

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from exports import tensors_in
from family_runs import interrupted_run, save_tokenizer, words_of_run, write_samples
from family_trials import save_model
from peft import PeftModel
from quantized_files import quantize_float8, quantize_mxfp4
from result_table import ResultTable
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM
from whole_models import WRAPPERS, write_whole_model
from whole_runs import curve, train

from trainer.checkpoint.offline_export import export_from_shards

LORA = ("model.lora_rank=4",)
MTP = ("eh_proj.weight", "enorm.weight", "embed_tokens.weight", "mlp.up_proj.weight")
QWEN_MTP = ("mtp.fc.weight", "mtp.norm.weight", "mtp.layers.0.mlp.up_proj.weight")


@dataclass(frozen=True)
class Replica:
    """A released checkpoint as a tiny one. `family`: of tests/families.py, or of
    tests/whole_models.py for one of several parts; `form`: of its weights; `extra`: tensors that no
    class of transformers has.
    """

    family: str
    form: str = "bf16"
    extra: tuple[str, ...] = ()
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def is_whole(self):
        return self.family in WRAPPERS


def _layer(number):
    return tuple(f"model.layers.{number}.{name}" for name in MTP)


_TIED = {"tie_word_embeddings": True}
CHECKPOINTS = {
    "Qwen/Qwen2.5-7B-Instruct": Replica("qwen2"),
    "Qwen/Qwen2.5-0.5B-Instruct": Replica("qwen2", changes=_TIED),
    "Qwen/Qwen3-8B": Replica("qwen3"),
    "Qwen/Qwen3-8B-FP8": Replica("qwen3", "fp8 blocks"),
    "Qwen/Qwen3-30B-A3B": Replica("qwen3_moe"),
    "Qwen/Qwen3-235B-A22B-FP8": Replica("qwen3_moe", "fp8 blocks"),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": Replica("qwen3_next", extra=QWEN_MTP),
    "Qwen/Qwen3.5-27B": Replica("qwen3_5", extra=QWEN_MTP),
    "Qwen/Qwen3.5-35B-A3B": Replica("qwen3_5_moe", extra=QWEN_MTP),
    "meta-llama/Llama-3.1-8B-Instruct": Replica("llama"),
    "meta-llama/Llama-3.2-1B-Instruct": Replica("llama", changes=_TIED),
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": Replica("llama4"),
    "google/gemma-2-9b-it": Replica("gemma2"),
    "google/gemma-3-1b-it": Replica("gemma3_text"),
    "google/gemma-3-12b-it": Replica("gemma3"),
    "mistralai/Mistral-7B-Instruct-v0.3": Replica("mistral"),
    "mistralai/Mistral-Small-3.2-24B-Instruct-2506": Replica("mistral3"),
    "mistralai/Mixtral-8x7B-Instruct-v0.1": Replica("mixtral"),
    "RedHatAI/Llama-3.1-8B-Instruct-FP8": Replica("llama", "fp8 tensor"),
    "RedHatAI/Qwen2.5-7B-Instruct-FP8-dynamic": Replica("qwen2", "fp8 channel"),
    "microsoft/phi-4": Replica("phi3"),
    "microsoft/Phi-4-mini-instruct": Replica("phi3 longrope"),
    "openai/gpt-oss-20b": Replica("gpt_oss", "mxfp4", changes={"intermediate_size": 64}),
    "deepseek-ai/DeepSeek-V3-0324": Replica("deepseek_v3", "fp8 blocks", _layer(2)),
    "deepseek-ai/DeepSeek-V3.2": Replica("deepseek_v32", "fp8 blocks"),
    "moonshotai/Kimi-K2-Instruct": Replica("deepseek_v3", "fp8 blocks"),
    "moonshotai/Kimi-Linear-48B-A3B-Instruct": Replica("kimi_linear"),
    "zai-org/GLM-4-9B-0414": Replica("glm4"),
    "zai-org/GLM-4.5-Air": Replica("glm4_moe", extra=_layer(46)),
    "zai-org/GLM-4.7-Flash": Replica("glm4_moe_lite", extra=_layer(47)),
    "MiniMaxAI/MiniMax-M2": Replica("minimax_m2", "fp8 blocks"),
    "XiaomiMiMo/MiMo-V2-Flash": Replica(
        "mimo_v2_flash", "fp8 blocks", tuple(f"model.mtp.layers.0.{name}" for name in MTP)
    ),
    "allenai/Olmo-3-7B-Instruct": Replica("olmo3"),
    "HuggingFaceTB/SmolLM3-3B": Replica("smollm3"),
    "ibm-granite/granite-4.0-h-small": Replica("granitemoehybrid"),
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": Replica("nemotron_h"),
    "LiquidAI/LFM2-8B-A1B": Replica("lfm2_moe"),
    "tiiuae/Falcon-H1-7B-Instruct": Replica("falcon_h1"),
    "baidu/ERNIE-4.5-21B-A3B-PT": Replica("ernie4_5_moe"),
    "ByteDance-Seed/Seed-OSS-36B-Instruct": Replica("seed_oss"),
}


def write_replica(root, replica):
    """Write the replica as it is published, and `plain`, the model that its weights stand for."""
    published = root / "model"
    if replica.is_whole:
        write_whole_model(published, replica.family, has_extra=False, **replica.changes)
    else:
        save_model(published, replica.family, **replica.changes)
    save_tokenizer(published)
    generator = torch.Generator().manual_seed(1)
    files = {
        name: tensor if replica.is_whole else tensor.bfloat16()
        for name, tensor in load_file(published / "model.safetensors").items()
    }
    files |= {name: torch.randn(48, 32, generator=generator).bfloat16() for name in replica.extra}
    save_file(files, published / "model.safetensors", {"format": "pt"})
    shutil.copytree(published, root / "plain")
    if replica.form == "mxfp4":
        files = quantize_mxfp4(published)
    elif replica.form != "bf16":
        files = quantize_float8(published, replica.form.split()[1], size=16)
    save_file(files, root / "plain" / "model.safetensors", {"format": "pt"})


def load(replica, directory):
    """Load a model by its own class; return it, and the keys that do not fit."""
    auto = AutoModelForMultimodalLM if replica.is_whole else AutoModelForCausalLM
    model, info = auto.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
    unfit = {key: found for key, found in info.items() if found}
    unexpected = set(unfit.pop("unexpected_keys", ())) - set(replica.extra)
    return model, [f"load: {unfit}, {unexpected}"] if unfit or unexpected else []


def export_faults(replica, root, export):
    """Compare names and untrained tensors of an export of the whole model with the source."""
    source = tensors_in(root / "plain")
    exported = tensors_in(export)
    faults = [f"export: names differ: {sorted(source.keys() ^ exported.keys())[:4]}"]
    if source.keys() == exported.keys():
        untrained = set(replica.extra) | {name for name in source if "vis" in name}
        changed = [name for name in untrained if not torch.equal(source[name], exported[name])]
        faults = [f"export: untrained tensors differ: {changed[:4]}"] if changed else []
    if "quantization_config" in read_json(export / "config.json"):
        faults.append("export: config.json has a quantization_config")
    return faults + load(replica, export)[1]


def try_full(root, replica):
    faults = interrupted_faults(root, root / "model")
    if replica.form != "bf16":
        train(root / "unquantized", 2, *words_of_run(root, root / "plain"))
        if curve(root / "unquantized") != curve(root / "straight"):
            faults.append("losses differ from those of the unquantized weights")
    export = root / "straight" / "global_step_6" / "huggingface"
    return faults + export_faults(replica, root, export)


def interrupted_faults(root, model, *words):
    return [f"resume: {difference}" for difference in interrupted_run(root, model, *words)]


def try_lora(root, replica):
    model = root / "model"
    faults = interrupted_faults(root, model, *LORA)
    checkpoint = root / "straight" / "global_step_6"
    base, _ = load(replica, root / "plain")
    peft_model = PeftModel.from_pretrained(base, checkpoint / "huggingface")
    adapter = load_file(checkpoint / "huggingface" / "adapter_model.safetensors")
    loaded = sum(".lora_" in name for name, _ in peft_model.named_parameters())
    if loaded != len(adapter):
        faults.append(f"peft: {loaded} of {len(adapter)} tensors")
    merged = root / "merged"
    export_from_shards(checkpoint, merged, dtype="float32", lora="merged", base=model)
    source = tensors_in(root / "plain")
    exported = tensors_in(merged)
    changed = [
        name for name in source if not torch.equal(exported[name].float(), source[name].float())
    ]
    # adapters of layers without a gradient, as an indexer that picks tokens, keep their zeros
    num_trained = sum(bool(tensor.any()) for name, tensor in adapter.items() if ".lora_B." in name)
    if len(changed) != num_trained:
        faults.append(f"merge: {len(changed)} tensors changed, {num_trained} trained adapters")
    return faults + export_faults(replica, root, merged)


TRIALS = {"full": try_full, "LoRA": try_lora}


def attempt(names):
    """Return the faults of each trial of a checkpoint; none if all holds."""
    entry = {}
    replica = CHECKPOINTS[names[0]]
    for kind, trial in TRIALS.items():
        with tempfile.TemporaryDirectory(prefix="checkpoint-") as directory:
            root = Path(directory)
            try:
                write_replica(root, replica)
                write_samples(root / "samples.jsonl")
                entry[kind] = trial(root, replica)
            except Exception:
                entry[kind] = [traceback.format_exc()[-600:]]
    return [entry]


def faults_of(entry):
    return [f"{kind}: {fault}" for kind, faults in entry.items() for fault in faults]


def table(results):
    entries = {name: results["checkpoints"].get(name, {}) for name in CHECKPOINTS}
    counts = {kind: sum(entry.get(kind) == [] for entry in entries.values()) for kind in TRIALS}
    lines = [
        ", ".join(f"{kind}: {count} of {len(entries)}" for kind, count in counts.items())
        + f". transformers {results['versions']['transformers']}, "
        f"torch {results['versions']['torch']}.",
        "",
        f"| checkpoint | structure | weights | {' | '.join(TRIALS)} |",
        f"|---|---|---|{'---|' * len(TRIALS)}",
    ]
    for name, entry in entries.items():
        replica = CHECKPOINTS[name]
        structure = replica.family.split()[0] + (" (several parts)" if replica.is_whole else "")
        weights = replica.form + (", MTP" if replica.extra else "")
        cells = ["yes" if entry.get(kind) == [] else "no" for kind in TRIALS]
        lines.append(f"| {name} | {structure} | {weights} | {' | '.join(cells)} |")
    return lines


TABLE = ResultTable(
    command="tests/checkpoint_table.py",
    results="checkpoints.json",
    key="checkpoints",
    names=tuple(CHECKPOINTS),
    measure=attempt,
    faults=faults_of,
    lines=table,
)

if __name__ == "__main__":
    sys.exit(TABLE.main(sys.argv[1:]))
