"""Short rows prepared by this checkout, plain and packed, and by another one in turn: rows per
second, and CPU time of all processes.

    git worktree add --detach /tmp/other 4331398
    python benchmarks/prepare_pairs.py --other /tmp/other --rows 60000 --rounds 5

Each run is a fresh process with an empty cache, without imports and loading of the tokenizer. CPU
time counts threads and forked processes. Run it on an idle machine: neighbours change the rate of
both sides.
"""

import argparse
import gc
import inspect
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow as pa

WORKER = "--worker"
PACKED = {"gzip": ".gz", "zstd": ".zst"}


def cpu_s() -> float:
    return sum(
        sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )


def work(model: Path, train_file: Path, cache_dir: Path) -> None:
    """Prepare a file with the package that PYTHONPATH names, and print what it took."""
    from transformers import AutoTokenizer

    from trainer.data import chat, conversation, sample_writer, token_cache

    tokenizer = AutoTokenizer.from_pretrained(model)
    gc.freeze()  # as `python -m trainer` does after its imports
    own = {"wait": False} if "wait" in inspect.signature(token_cache.prepare).parameters else {}
    before, started = cpu_s(), time.perf_counter()
    dataset = token_cache.prepare(
        [train_file],
        tokenizer=tokenizer,
        tokenizer_digest=chat.tokenizer_digest(tokenizer),
        options=sample_writer.PrepareOptions(
            conversation.RowKeys("messages", "tools", None, None), 2048
        ),
        cache_dir=cache_dir,
        **own,
    )
    seconds, num_rows = time.perf_counter() - started, len(dataset)
    found = {
        "rows_per_s": num_rows / seconds,
        "cpu_us_per_row": (cpu_s() - before) / num_rows * 1e6,
    }
    print(json.dumps(found | {"fingerprint": dataset.summary.fingerprint}))


def run_one(repository: Path, train_file: Path) -> dict[str, Any]:
    root = train_file.parent
    with tempfile.TemporaryDirectory(dir=root) as cache_dir:
        words = [sys.executable, __file__, WORKER, str(root / "tiny"), str(train_file), cache_dir]
        environment = os.environ | {"PYTHONPATH": str(repository), "PYTHONSAFEPATH": "1"}
        done = subprocess.run(
            words, cwd=repository, env=environment, check=True, stdout=subprocess.PIPE, text=True
        )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    if sys.argv[1:2] == [WORKER]:
        return work(*map(Path, sys.argv[2:]))
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    from measuring import REPOSITORY, header, middle, write_result
    from scale import write_rows, write_tiny_model

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--other", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=60_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    other = arguments.other.resolve()
    sides = {
        "this": (REPOSITORY, ""),
        "other": (other, ""),
        "gz": (REPOSITORY, ".gz"),
        "zst": (REPOSITORY, ".zst"),
    }
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    with tempfile.TemporaryDirectory() as directory:
        write_tiny_model(Path(directory))
        plain = Path(directory, "rows.jsonl")
        write_rows(plain, arguments.rows, num_words=(1, 1))
        for packing in ("gzip", "zstd"):
            with pa.CompressedOutputStream(f"{plain}{PACKED[packing]}", packing) as packed:
                packed.write(plain.read_bytes())
        for number in range(arguments.rounds):
            for side, (repository, suffix) in (
                sides.items() if number % 2 == 0 else reversed(sides.items())
            ):
                runs[side].append(run_one(repository, Path(f"{plain}{suffix}")))
                print(side, json.dumps(runs[side][-1]), flush=True)
    assert len({run["fingerprint"] for found in runs.values() for run in found}) == 1, (
        "they made other samples"
    )
    keys = ("rows_per_s", "cpu_us_per_row")
    result = {
        side: {key: middle(run[key] for run in found) for key in keys}
        for side, found in runs.items()
    }
    for one, by in (("this", "other"), ("gz", "this"), ("zst", "this")):
        pairs = list(zip(runs[one], runs[by], strict=True))
        result[f"{one} by {by}"] = {key: middle(a[key] / b[key] for a, b in pairs) for key in keys}
    write_result(
        "prepare_pairs", {**header(), "rows": arguments.rows, "runs": result}, arguments.output
    )
    return None


if __name__ == "__main__":
    main()
