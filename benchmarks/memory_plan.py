"""Does a run take the memory that `python -m trainer.cli plan` predicts?

    python benchmarks/memory_plan.py

Each case is planned on fake tensors and then trained: the whole trainer on gloo ranks, on rows cut
to `data.max_length` tokens. In the second step of rank 0 every living tensor is followed, as in the
plan but on real tensors and in the trainer's own loop. Beside it stands what the kernel says: the
largest size of the process so far, against the planned tensors with what the tool assumes besides.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import torch
from measuring import REPOSITORY, header, peak_bytes, table, write_result
from transformers import AutoConfig, AutoModelForCausalLM

from trainer.data.batch import StepBatch
from trainer.quickstart import MODEL_DIR
from trainer.train.start.compose import load_config

NUM_STEPS = 2
WORKER = "--worker"
GIB = 2**30


@dataclass(frozen=True)
class Case:
    """A Qwen2 like the quickstart's, and the contents of a micro-batch."""

    hidden: int
    layers: int
    tokens: int
    max_length: int
    ranks: int = 1
    micro_batches: int = 1
    dtype: str = "float32"
    recompute: str = "false"
    model: dict[str, Any] = field(default_factory=dict)
    more: tuple[str, ...] = ()
    """Overrides of the command."""

    @property
    def name(self) -> str:
        changes = " ".join([*(f"{key}={value}" for key, value in self.model.items()), *self.more])
        return f"{self.hidden} x {self.layers} {changes}".strip()

    def words(self, directory: Path) -> list[str]:
        model_dir = directory / "model"
        train_file = directory / "train.jsonl"
        batch = self.ranks * self.micro_batches * (self.tokens // self.max_length)
        values = {
            "data.train_files": train_file,
            "data.val_ratio": 0,
            "data.train_batch_size": batch,
            "data.max_token_len_per_gpu": self.tokens,
            "data.max_length": self.max_length,
            "data.truncation": "right",
            "data.num_workers": 0,
            "data.cache_dir": directory / "cache",
            "model.partial_pretrain": model_dir,
            "model.enable_gradient_checkpointing": self.recompute,
            "model.fsdp_config.param_dtype": self.dtype,
            "trainer.device": "cpu",
            "trainer.total_training_steps": NUM_STEPS,
            "trainer.save_freq": -1,
            "trainer.test_freq": -1,
            "trainer.default_local_dir": directory / "run",
        }
        return [*(f"{key}={value}" for key, value in values.items()), *self.more]


WIDE = {"vocab_size": 16384}
EXPERTS = {
    "model_type": "qwen3_moe",
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
}
CASES = [
    Case(256, 4, 2048, 256),
    Case(256, 4, 8192, 2048),
    Case(256, 4, 2048, 256, ranks=2, micro_batches=2, recompute="true"),
    Case(256, 4, 4096, 1024, ranks=2, dtype="bfloat16", recompute="selective"),
    Case(512, 8, 2048, 512),
    Case(512, 8, 2048, 512, recompute="true"),
    Case(512, 8, 2048, 512, ranks=2, dtype="bfloat16"),
    Case(512, 8, 2048, 512, ranks=2, micro_batches=2, recompute="selective"),
    Case(768, 8, 1024, 512, ranks=2, model=WIDE),
    Case(768, 8, 1024, 512, ranks=2, dtype="bfloat16", recompute="true", model=WIDE),
    Case(512, 8, 2048, 512, ranks=2, dtype="bfloat16", more=("model.lora_rank=16",)),
    Case(
        768,
        8,
        1024,
        512,
        ranks=2,
        dtype="bfloat16",
        recompute="true",
        model=WIDE,
        more=("model.lora_rank=16",),
    ),
    Case(512, 8, 2048, 512, ranks=2, more=(r"model.freeze=['embed_tokens','layers\.[0-3]\.']",)),
    Case(256, 4, 2048, 256, model=EXPERTS),
    Case(256, 8, 2048, 256, ranks=2, dtype="bfloat16", recompute="selective", model=EXPERTS),
]


def main() -> None:
    if WORKER in sys.argv:
        return train(Path(sys.argv[2]), sys.argv[3:])
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path)
    parser.add_argument(
        "--cases",
        type=int,
        nargs="+",
        default=range(len(CASES)),
        help="numbers of the cases to run",
    )
    arguments = parser.parse_args()
    rows = []
    for number in arguments.cases:
        rows.append(run_case(CASES[number]))
        print(json.dumps(rows[-1]), flush=True)
    result = {**header(), "cases": rows, "planned_over_measured": extremes(rows)}
    print(readable(rows))
    write_result("memory_plan", result, arguments.output)


def run_case(case: Case) -> dict[str, Any]:
    from trainer.tools.plan.memory import plan_memory

    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_inputs(directory, case)
        words = case.words(directory)
        plan = plan_memory(load_config(words), case.ranks)
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={case.ranks}",
        ]
        report = directory / "report.json"
        subprocess.run(
            [*command, __file__, WORKER, str(report), *words],
            cwd=directory,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
            check=True,
            stdout=subprocess.DEVNULL,
        )
        measured = json.loads(report.read_text())
    return {
        "model": case.name,
        "parameters": plan.num_parameters,
        "ranks": case.ranks,
        "tokens": case.tokens,
        "max_length": case.max_length,
        "micro_batches": case.micro_batches,
        "dtype": case.dtype,
        "recompute": case.recompute,
        "planned_bytes": plan.device_bytes,
        "planned_peak_bytes": plan.peak_bytes,
        "planned_process_bytes": plan.peak_bytes + round(plan.outside_gib * GIB),
        **measured,
    }


def write_inputs(directory: Path, case: Case) -> None:
    """A model directory with random weights, and rows that are all longer than `max_length`."""
    shutil.copytree(MODEL_DIR, directory / "model")
    quickstart = json.loads((MODEL_DIR / "config.json").read_text())
    size = {
        "hidden_size": case.hidden,
        "intermediate_size": case.hidden * 11 // 4,
        "num_hidden_layers": case.layers,
    }
    heads = {"num_attention_heads": case.hidden // 64, "num_key_value_heads": case.hidden // 128}
    (directory / "model" / "config.json").write_text(
        json.dumps(quickstart | size | heads | case.model)
    )
    config = AutoConfig.from_pretrained(directory / "model")
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(
        directory / "model"
    )
    turns = [
        {"role": "user", "content": "Count."},
        {"role": "assistant", "content": "one two three " * case.max_length},
    ]
    num_rows = NUM_STEPS * case.ranks * case.micro_batches * (case.tokens // case.max_length)
    (directory / "train.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * num_rows)


def train(report: Path, words: list[str]) -> None:
    """Run one rank of the real run. Rank 0 tracks the tensors of its second step."""
    import trainer.train.start.main  # noqa: F401  before the process is looked at
    from trainer.__main__ import main
    from trainer.tools.plan.fake_step import follow
    from trainer.tools.plan.live_storage import LiveStorages
    from trainer.train import fit
    from trainer.train.run import Run

    imported_bytes = psutil.Process().memory_info().rss
    step = fit.training_step

    def followed(run: Run, batch: StepBatch) -> Any:
        if not run.world.is_main or batch.step != NUM_STEPS:
            return step(run, batch)
        live = LiveStorages()
        with live:
            follow(run.model, run.optimizer, live)
            metrics = step(run, batch)
        peak = max(live.peaks().values(), key=lambda held: held.total())
        found = {
            "measured_bytes": peak,
            "measured_peak_bytes": peak.total(),
            "process_imported_bytes": imported_bytes,
            "process_peak_bytes": peak_bytes(),
        }
        report.write_text(json.dumps(found))
        return metrics

    with patch.object(fit, "training_step", followed):
        code = main(words)
    if code:
        raise SystemExit(code)


def extremes(rows: list[dict[str, Any]]) -> dict[str, float]:
    ratios = [row["planned_peak_bytes"] / row["measured_peak_bytes"] for row in rows]
    return {"min": min(ratios), "max": max(ratios)}


def readable(rows: list[dict[str, Any]]) -> str:
    columns = [
        "model",
        "dtype",
        "ranks",
        "tokens",
        "recompute",
        "planned MiB",
        "measured MiB",
        "ratio",
    ]
    columns += ["process assumed MiB", "process MiB"]
    cells = [
        [
            row["model"],
            row["dtype"],
            row["ranks"],
            f"{row['micro_batches']} x {row['tokens']:,} of {row['max_length']:,}",
            row["recompute"],
            f"{row['planned_peak_bytes'] / 2**20:.1f}",
            f"{row['measured_peak_bytes'] / 2**20:.1f}",
            f"{row['planned_peak_bytes'] / row['measured_peak_bytes']:.4f}",
            f"{row['planned_process_bytes'] / 2**20:.0f}",
            f"{row['process_peak_bytes'] / 2**20:.0f}",
        ]
        for row in rows
    ]
    return table(columns, cells)


if __name__ == "__main__":
    main()
