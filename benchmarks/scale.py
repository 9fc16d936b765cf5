"""How cost grows: with rows, with the length of a document, with ranks and with parameters.

    python benchmarks/scale.py --only rows many length ranks checkpoint

many: the shortest chats, one million and ten of them: what grows with rows alone.
rows: chats of about 45 tokens are prepared in a fresh process, then three steps of a tiny model
start from the cache.
length: one document per step; memory is the process's high-water mark above that before its first
step.
ranks: bytes of parameters, gradients and optimizer state that a rank of the real FSDP2 model holds,
counted over the memory of its local tensors, and bytes it receives in collectives during one step.
checkpoint: a save in the way of training, an export, and the proof and load of a resume, in one
process each. A sub-measure that is not asked for keeps what the result file holds of it.
"""

import argparse
import json
import random
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import numpy as np
import torch.distributed as dist
from case import SEED, Case, prepare_tokens
from lifecycle import run_probe, tree_bytes
from make_quickstart import ENGLISH
from measuring import RESULTS, header, middle, peak_bytes, table, write_bytes_per_s, write_result
from ranks import run_ranks
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from toy import ToySamples, build_toy_model, toy_run, write_model_config
from toy_runs import CONTENTS, saved_parts

from trainer.checkpoint import choice
from trainer.checkpoint.export import ExportSource
from trainer.checkpoint.manager import CheckpointManager
from trainer.checkpoint.manifest import verify_files
from trainer.checkpoint.model_files import ModelFiles
from trainer.checkpoint.offline_export import export_from_shards
from trainer.checkpoint.save import Saver
from trainer.config import CheckpointConfig
from trainer.data.batch_plan import START
from trainer.loop import step
from trainer.loop.fit import fit
from trainer.loop.run import Cadence, Run
from trainer.model.packed_lm import ModelSource
from trainer.optim.clip import local_square_sum
from trainer.progress import Position
from trainer.quickstart import MODEL_DIR
from trainer.runtime.distributed import World
from trainer.runtime.environment import keep_freed_memory

ROWS = (1_000, 10_000, 100_000, 1_000_000)
MANY = (1_000_000, 10_000_000)
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
LENGTH_MODEL = {
    "vocab_size": 4096,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 352,
    "max_position_embeddings": LENGTHS[-1],
    "initializer_range": 0.02,
}
RANKS = (1, 2, 4, 8)
RANKS_MODEL = {
    "vocab_size": 8192,
    "hidden_size": 640,
    "num_hidden_layers": 10,
    "num_attention_heads": 10,
    "num_key_value_heads": 5,
    "head_dim": 64,
    "intermediate_size": 1712,
    "initializer_range": 0.02,
}
SIZES = {"1 M": (128, 4), "5 M": (256, 6), "20 M": (512, 6), "50 M": (768, 6), "100 M": (1024, 8)}
"""Hidden size and number of layers."""
TIMEOUT_S = 400.0


# --- rows -----------------------------------------------------------------------------------------
# --------------------


def write_rows(path: Path, num_rows: int, *, num_words: tuple[int, int] = (8, 22)) -> None:
    """Chats of two turns of so many random words, about one token each, written one by one."""
    generator = random.Random(SEED)
    words = sorted(
        {word for word in ENGLISH.read_text().split() if word.isalpha() and word.islower()}
    )
    with path.open("w") as file:
        for _ in range(num_rows):
            texts = [
                " ".join(generator.choices(words, k=generator.randint(*num_words)))
                for _ in range(2)
            ]
            roles = zip(("user", "assistant"), texts, strict=True)
            file.write(
                json.dumps({"messages": [{"role": role, "content": text} for role, text in roles]})
                + "\n"
            )


def write_tiny_model(root: Path) -> Path:
    """The quickstart's tokenizer with one layer of width 64."""
    model = root / "tiny"
    shutil.copytree(MODEL_DIR, model)
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    config = json.loads((model / "config.json").read_text()) | small
    (model / "config.json").write_text(json.dumps(config))
    return model


def prepare_rows(case: Case) -> dict[str, float]:
    """In a fresh process: rows and tokens per second of filling the cache, and what memory it and
    the largest of those that it starts took.
    """
    before, started = peak_bytes(), time.perf_counter()
    dataset = prepare_tokens(case)
    seconds = time.perf_counter() - started
    return {
        "mean_tokens": len(dataset.tokens) / len(dataset),
        "prepare_s": seconds,
        "rows_per_s": len(dataset) / seconds,
        "prepare_peak_mib": peak_bytes() / 2**20,
        "prepare_growth_mib": (peak_bytes() - before) / 2**20,
        "largest_worker_mib": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024,
    }


def start_from_cache(case: Case, number: int) -> dict[str, float]:
    """Seconds from before the process is made to the end of its first step, and its peak memory."""
    overrides = {
        "data.train_files": case.train_file,
        "data.cache_dir": case.cache_dir,
        "data.val_ratio": 0,
        "model.partial_pretrain": case.model,
        "model.random_weights": "true",
        "trainer.total_training_steps": 3,
        "trainer.save_freq": -1,
        "trainer.default_local_dir": case.directory / f"run{number}",
    }
    found = run_probe(
        [f"{key}={value}" for key, value in overrides.items()],
        case.directory / f"start{number}.json",
    )
    start = found["start"]
    return {
        "to_first_step_s": start["total_s"],
        "after_imports_s": start["total_s"] - start["imports_s"],
        "data_s": start["data_s"],
        "start_peak_mib": found["peak_bytes"] / 2**20,
    }


def measure_many(root: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    return measure_rows(root, argparse.Namespace(rows=arguments.many, rounds=1), num_words=(1, 1))


def measure_rows(
    root: Path, arguments: argparse.Namespace, num_words: tuple[int, int] = (8, 22)
) -> list[dict[str, Any]]:
    model, found = write_tiny_model(root), []
    for num_rows in arguments.rows:
        case = Case(root / f"rows{num_rows}")
        case.directory.mkdir()
        case.model.symlink_to(model)
        write_rows(case.train_file, num_rows, num_words=num_words)
        row: dict[str, Any] = {"rows": num_rows, "file_mb": case.train_file.stat().st_size / 1e6}
        # as a rank it may start processes
        with ProcessPoolExecutor(1, get_context("spawn")) as fresh:
            row |= fresh.submit(prepare_rows, case).result()
        starts = [start_from_cache(case, number) for number in range(arguments.rounds)]
        row |= {key: middle(start[key] for start in starts) for key in starts[0]}
        shutil.rmtree(case.directory)
        print(json.dumps(row), flush=True)
        found.append(row)
    return found


# --- length ---------------------------------------------------------------------------------------
# --------------------


class Documents:
    """Random documents of one length, their second half supervised."""

    def __init__(self, length: int, num_samples: int) -> None:
        self._length = length
        self.lengths = np.full(num_samples, length)
        self.num_loss_tokens = np.full(num_samples, length - length // 2)

    def sample(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        generator = np.random.default_rng((SEED, index))
        ids = generator.integers(0, LENGTH_MODEL["vocab_size"], self._length)
        return ids.astype(np.int32), np.arange(self._length) >= self._length // 2


def train_on_documents(
    world: World, source: ModelSource, length: int, steps: int
) -> dict[str, float]:
    """In a fresh process: seconds per step after the first, and memory above that before the
    first step.
    """
    keep_freed_memory()
    model = build_toy_model(world, source, param_dtype="auto")
    parts = toy_run(world, model, Documents(length, steps), total_steps=steps, batch_size=1)
    before = peak_bytes()
    fit(parts)
    times: Any = parts.tracking
    return {
        "step_s": min(times.column("train/time(s)")[1:]),
        "peak_bytes": peak_bytes() - before,
        "before": before,
    }


def measure_length(root: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    (root / "length").mkdir()
    source = write_model_config(root / "length", **LENGTH_MODEL)
    found: list[dict[str, Any]] = []
    for length in arguments.lengths:
        runs = []
        for _ in range(arguments.rounds if length <= 4096 else 1):
            runs += run_ranks(
                train_on_documents,
                1,
                source,
                length,
                4 if length <= 8192 else 2,
                timeout_s=TIMEOUT_S,
            )
        peak = statistics.median(run["peak_bytes"] for run in runs)
        row = {
            "tokens": length,
            "step_s": statistics.median(run["step_s"] for run in runs),
            "peak_mib": peak / 2**20,
            "before_mib": runs[0]["before"] / 2**20,
        }
        row["us_per_token"] = row["step_s"] / length * 1e6
        if found:
            more = (row["peak_mib"] - found[-1]["peak_mib"]) * 2**20
            row["bytes_per_further_token"] = more / (length - found[-1]["tokens"])
        print(json.dumps(row), flush=True)
        found.append(row)
    return found


# --- ranks ----------------------------------------------------------------------------------------
# --------------------


class Traffic(TorchDispatchMode):
    """Bytes that this rank receives in collectives, by kind, if these move no more than they
    must.
    """

    def __init__(self) -> None:
        super().__init__()
        self.received_bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, _, name = func._schema.name.partition("::")
        if space == "c10d":
            tensors = [item for arg in args for item in (arg if isinstance(arg, list) else [arg])]
            whole = max((item.nbytes for item in tensors if isinstance(item, Tensor)), default=0)
            passes = 2 if name == "allreduce_" else 1
            self.received_bytes[name.strip("_")] += (
                passes * whole * (dist.get_world_size() - 1) // dist.get_world_size()
            )
        return func(*args, **(kwargs or {}))


def held_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Memory behind the local parts of tensors, every storage once."""
    storages = {}
    for tensor in tensors:
        if isinstance(tensor, Tensor):
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            storage = local.detach().untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def count_step(world: World, source: ModelSource) -> dict[str, Any]:
    """What one rank holds at the end of a backward pass, and what it receives during the step."""
    model = build_toy_model(world, source, param_dtype="bfloat16", reshard_after_forward=True)
    parts = toy_run(world, model, ToySamples(), total_steps=1)
    held: dict[str, int] = {}

    def watched(parameters: Any) -> Tensor:
        held["gradients"] = held_bytes(p.grad for p in parameters)
        return local_square_sum(parameters)

    with Traffic() as traffic, patch.object(step, "local_square_sum", watched):
        fit(parts)
    held["parameters"] = held_bytes(model.parameters())
    held["optimizer"] = held_bytes(
        value for state in parts.optimizer.state.values() for value in state.values()
    )
    layers = [p for name, p in model.named_parameters() if ".layers." in name]
    return {
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "num_layer_parameters": sum(p.numel() for p in layers),
        "held_bytes": held,
        "received_bytes": dict(traffic.received_bytes),
    }


def measure_ranks(root: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Gathers are of bfloat16, the reduction is of float32; the last rank of each size is
    shown: it holds the most.
    """
    (root / "ranks").mkdir()
    source = write_model_config(root / "ranks", **RANKS_MODEL)
    found: list[dict[str, Any]] = []
    for num_ranks in arguments.ranks:
        ranks = run_ranks(count_step, num_ranks, source, timeout_s=TIMEOUT_S)
        most = max(ranks, key=lambda rank: sum(rank["held_bytes"].values()))
        held = sum(most["held_bytes"].values())
        share = (num_ranks - 1) / num_ranks
        gathered, reduced = (
            most["received_bytes"].get(kind, 0)
            for kind in ("allgather_base", "reduce_scatter_base")
        )
        row = {
            "ranks": num_ranks,
            "num_parameters": most["num_parameters"],
            **{f"{kind}_mib": size / 2**20 for kind, size in most["held_bytes"].items()},
            "held_mib": held / 2**20,
            "held_times_ranks": held
            * num_ranks
            / (found[0]["held_mib"] * 2**20 if found else held),
            "gathered_mib": gathered / 2**20,
            "gathered_formula_mib": 2 * most["num_parameters"] * 2 * share / 2**20,
            "reduced_mib": reduced / 2**20,
            "reduced_formula_mib": most["num_parameters"] * 4 * share / 2**20,
            "other_bytes": sum(most["received_bytes"].values()) - gathered - reduced,
        }
        print(json.dumps(row), flush=True)
        found.append(row)
    return found


# --- checkpoint -----------------------------------------------------------------------------------
# --------------------


def manager_of(world: World, run_dir: Path, source: ModelSource, parts: Any) -> CheckpointManager:
    saver = Saver(
        run_dir,
        parts.model,
        world=world,
        config=CheckpointConfig(
            CONTENTS, CONTENTS[:3], "bfloat16", async_save=False, save_timeout_s=300
        ),
        source=ExportSource(ModelFiles.read(Path(source.path)), None, (3,)),
        keep=1,
        lock=None,
        fingerprints={"data": "toy", "train_batch_size": "8", "model_config": "toy"},
    )
    return CheckpointManager(saver, state=saved_parts(parts), tell=lambda *event: None)


def seconds_of(action: Callable[[], Any]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def make_parts(world: World, source: ModelSource, steps: int, start: Position = START) -> Run:
    model, cadence = build_toy_model(world, source), Cadence(steps, save_freq=1, test_freq=-1)
    return toy_run(world, model, ToySamples(), total_steps=steps, cadence=cadence, start=start)


def train_and_save(
    world: World, run_dir: Path, source: ModelSource, steps: int
) -> tuple[int, list[float]]:
    """(parameters, seconds of each save) of a run that saves every step."""
    parts, seconds = make_parts(world, source, steps), []
    manager: Any = manager_of(world, run_dir, source, parts)
    save = manager.save
    manager.save = lambda *where, **arguments: seconds.append(
        seconds_of(lambda: save(*where, **arguments))
    )
    parts.checkpoints = manager
    fit(parts)
    return sum(p.numel() for p in parts.model.parameters()), seconds


def save_and_resume(world: World, root: Path, source: ModelSource, rounds: int) -> dict[str, Any]:
    """Seconds of every save but the first, of exports and of resumes; the files are in the page
    cache when read.
    """
    run_dir = root / "run"
    run_dir.mkdir()
    num_parameters, saves = train_and_save(world, run_dir, source, rounds + 1)
    checkpoint = choice.select(run_dir).chosen
    assert checkpoint is not None and checkpoint.manifest is not None
    manifest, proofs, loads, exports = checkpoint.manifest, [], [], []
    parts = make_parts(world, source, rounds + 1, start=manifest.position)
    manager = manager_of(world, run_dir, source, parts)
    for number in range(rounds):
        target = root / f"export{number}"
        proofs.append(seconds_of(lambda: verify_files(checkpoint.path, manifest)))
        loads.append(seconds_of(lambda: manager.load(checkpoint, contents=CONTENTS[:3])))
        exports.append(
            seconds_of(lambda to=target: export_from_shards(checkpoint.path, to, dtype="bfloat16"))
        )
        shutil.rmtree(target)
    return {
        "num_parameters": num_parameters,
        "checkpoint_mb": tree_bytes(checkpoint.path) / 1e6,
        "save_s": middle(saves[1:]),
        "export_s": middle(exports),
        "proof_s": middle(proofs),
        "load_s": middle(loads),
    }


def measure_checkpoint(root: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    found = []
    for name in arguments.sizes:
        directory = root / name
        (directory / "model").mkdir(parents=True)
        hidden, layers = SIZES[name]
        shape = {
            "hidden_size": hidden,
            "intermediate_size": 11 * hidden // 4,
            "num_hidden_layers": layers,
        }
        heads = {
            "num_attention_heads": hidden // 64,
            "num_key_value_heads": hidden // 128,
            "head_dim": 64,
        }
        source = write_model_config(
            directory / "model", vocab_size=4096, initializer_range=0.02, **shape, **heads
        )
        row = run_ranks(
            save_and_resume, 1, directory, source, arguments.rounds, timeout_s=TIMEOUT_S
        )[0]
        row["write_mb_per_s"] = row["checkpoint_mb"] / row["save_s"]["median"]
        row["disk_mb_per_s"] = write_bytes_per_s(directory) / 1e6
        shutil.rmtree(directory)
        print(json.dumps(row), flush=True)
        found.append(row)
    return found


# --- all ------------------------------------------------------------------------------------------
# --------------------

MEASURES = {
    "rows": measure_rows,
    "many": measure_many,
    "length": measure_length,
    "ranks": measure_ranks,
    "checkpoint": measure_checkpoint,
}
COLUMNS = {
    "rows": {
        "rows": "rows",
        "file_mb": "file MB",
        "mean_tokens": "tokens per row",
        "rows_per_s": "prepared rows/s",
        "prepare_peak_mib": "peak MiB of preparing",
        "prepare_growth_mib": "of that while preparing",
        "to_first_step_s": "s to the first step from the cache",
        "after_imports_s": "of that after imports",
        "data_s": "of that data",
        "start_peak_mib": "peak MiB of that start",
    },
    "length": {
        "tokens": "tokens",
        "step_s": "s per step",
        "us_per_token": "us per token",
        "peak_mib": "MiB above the start",
        "bytes_per_further_token": "bytes per further token",
    },
    "ranks": {
        "ranks": "ranks",
        "parameters_mib": "parameters MiB",
        "gradients_mib": "gradients MiB",
        "optimizer_mib": "optimizer MiB",
        "held_times_ranks": "sum x ranks / that of the first",
        "gathered_mib": "gathered MiB",
        "gathered_formula_mib": "2 P (W-1)/W",
        "reduced_mib": "reduced MiB",
        "reduced_formula_mib": "P (W-1)/W",
        "other_bytes": "other bytes",
    },
    "checkpoint": {
        "num_parameters": "parameters",
        "checkpoint_mb": "MB",
        "save_s": "save s",
        "write_mb_per_s": "MB/s",
        "disk_mb_per_s": "one plain file MB/s",
        "export_s": "export s",
        "proof_s": "proof s",
        "load_s": "load s",
    },
}


def cell(value: Any) -> str:
    if isinstance(value, dict):
        value = value["median"]
    if value is None:
        return ""
    return (
        str(value)
        if isinstance(value, int)
        else f"{value:.4g}"
        if abs(value) < 1000
        else f"{value:.0f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=list(MEASURES), default=list(MEASURES))
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--many", type=int, nargs="+", default=list(MANY))
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--ranks", type=int, nargs="+", default=list(RANKS))
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS / "scale.json")
    arguments = parser.parse_args()
    for name in arguments.only:
        with tempfile.TemporaryDirectory() as directory:
            rows = MEASURES[name](Path(directory), arguments)
        columns = COLUMNS["rows" if name == "many" else name]
        print(
            table(list(columns.values()), ([cell(row.get(key)) for key in columns] for row in rows))
        )
        result = json.loads(arguments.output.read_text()) if arguments.output.exists() else {}
        write_result("scale", result | {name: {**header(), "rows": rows}}, arguments.output)


if __name__ == "__main__":
    main()
