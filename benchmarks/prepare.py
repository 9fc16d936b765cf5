"""Chats prepared per second: this trainer against TRL's SFTTrainer, in alternation, a fresh process
each time.

    python benchmarks/prepare.py --train-file train.jsonl --rounds 5

Both take GSM8K as chats to token ids and labels: chat template with generation tags, loss on what
the assistant says, no more than 2,048 tokens. Ours is timed from the file on disk to the mapped,
synced cache, with a cache that is empty; TRL from a `Dataset` in memory to what its trainer holds,
with its disk cache switched off. Imports and loading the tokenizer are left out on both sides; the
wall time of the process counts them. The peak is that of the resident memory.
`benchmarks/peers/install.sh` makes the environment of the peer.
"""

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from case import Case, make_case
from measuring import (
    PEERS_VENV,
    REPOSITORY,
    header,
    middle,
    peak_bytes,
    peer_versions,
    run_command,
    table,
    write_result,
)
from transformers import AutoTokenizer

from trainer.config import RowKeys
from trainer.data.rows import PrepareOptions
from trainer.data.samples import TokenDataset, open_dataset
from trainer.data.token_cache import prepare
from trainer.data.tokens import tokenizer_digest

MAX_LENGTH = 2048
REPEATS = 10
WORKER = "--worker"
PEER = Path(__file__).resolve().parent / "peers" / "prepare.py"


@dataclass(frozen=True)
class Contender:
    """Our trainer, or (with options) the peer's script. `repeats`: how often the file repeats its
    rows.
    """

    name: str
    options: tuple[str, ...] | None = None
    repeats: int = 1


OURS = Contender("ours")
LONGER = Contender(f"ours, the file {REPEATS} times over", repeats=REPEATS)
PEERS = (
    Contender("trl", ("--max-length", str(MAX_LENGTH))),
    Contender("trl, 2 processes", ("--max-length", str(MAX_LENGTH), "--num-proc", "2")),
    Contender("trl, any length", ()),
)


def work(model: Path, train_file: Path, cache_dir: Path, output: Path) -> None:
    """Prepare a file in this process and write the measurements."""
    gc.freeze()  # as `python -m trainer` does after its imports
    tokenizer = AutoTokenizer.from_pretrained(model)
    started = time.perf_counter()
    dataset = prepare(
        [train_file],
        tokenizer=tokenizer,
        tokenizer_digest=tokenizer_digest(tokenizer),
        options=PrepareOptions(RowKeys("messages", "tools", None, None), max_length=MAX_LENGTH),
        cache_dir=cache_dir,
    )
    found = {
        "prepare_s": time.perf_counter() - started,
        "num_rows": len(dataset),
        "num_tokens": len(dataset.tokens),
        "fingerprint": dataset.summary.fingerprint,
        "directory": str(dataset.directory),
        "peak_bytes": peak_bytes(),
    }
    output.write_text(json.dumps(found))


def run_one(contender: Contender, case: Case, number: int) -> dict[str, Any]:
    """Return the findings of one process, with its wall time."""
    output = case.directory / f"{contender.name.replace(' ', '_')}-{number}.json"
    if contender.options is None:
        cache_dir = output.with_suffix(".cache")
        words = [sys.executable, str(Path(__file__).resolve()), WORKER, str(case.model)]
        words += [str(train_file(case, contender.repeats)), str(cache_dir), str(output)]
    else:
        words = [str(PEERS_VENV / "bin" / "python"), str(PEER), "--case", str(case.directory)]
        words += ["--output", str(output), *contender.options]
    wall_s, _ = run_command(words, cwd=REPOSITORY, log=output.with_suffix(".log"))
    found: dict[str, Any] = json.loads(output.read_text())
    rows_per_s = found["num_rows"] / found["prepare_s"]
    print(f"{contender.name}: {rows_per_s:.0f} rows/s, process {wall_s:.1f} s", flush=True)
    return found | {"rows_per_s": rows_per_s, "wall_s": wall_s}


def train_file(case: Case, repeats: int) -> Path:
    path = case.directory / f"train{repeats}.jsonl"
    if not path.exists():
        path.write_text(case.train_file.read_text() * repeats)
    return path


def measure(case: Case, rounds: int) -> dict[Contender, list[dict[str, Any]]]:
    contenders = (OURS, *PEERS, LONGER)
    runs: dict[Contender, list[dict[str, Any]]] = {contender: [] for contender in contenders}
    for number in range(rounds):
        for contender in contenders if number % 2 == 0 else reversed(contenders):
            runs[contender].append(run_one(contender, case, number))
    return runs


def num_different_rows(dataset: TokenDataset, peer: Path) -> int:
    """Return the rows whose token ids or labels differ in the file that the peer wrote."""
    theirs = np.load(peer)
    starts = theirs["offsets"][:-1]
    ends = theirs["offsets"][1:]
    num_different = abs(len(dataset) - len(ends))
    for index, (first, end) in enumerate(zip(starts, ends, strict=True)):
        if index < len(dataset):
            input_ids, loss_mask = dataset.sample(index)
            labels = np.where(loss_mask, input_ids, -100)
            is_same = np.array_equal(theirs["input_ids"][first:end], input_ids)
            num_different += not (is_same and np.array_equal(theirs["labels"][first:end], labels))
    return num_different


def summarize(runs: dict[Contender, list[dict[str, Any]]]) -> Iterable[dict[str, Any]]:
    ours = open_dataset(Path(runs[OURS][0]["directory"]), ())
    for contender, found in runs.items():
        row = {
            "contender": contender.name,
            "rows": found[0]["num_rows"],
            "rows_per_s": middle(run["rows_per_s"] for run in found),
            "prepare_s": middle(run["prepare_s"] for run in found),
            "process_s": middle(run["wall_s"] for run in found),
            "peak_mib": round(statistics.median(run["peak_bytes"] for run in found) / 2**20),
        }
        if contender.options is None:
            row["fingerprints"] = sorted({run["fingerprint"] for run in found})
        else:
            pairs = zip(runs[OURS], found, strict=True)
            row["ours is faster by"] = middle(a["rows_per_s"] / b["rows_per_s"] for a, b in pairs)
            row["different rows"] = num_different_rows(ours, Path(found[0]["samples"]))
        yield row


def cells(row: dict[str, Any]) -> dict[str, object]:
    """Return the columns of a row of the table."""
    rate = row["rows_per_s"]
    ratio = row.get("ours is faster by")
    return {
        "contender": row["contender"],
        "rows": row["rows"],
        "rows/s": f"{rate['median']:.0f} ({rate['min']:.0f} to {rate['max']:.0f})",
        "ours is faster by": (
            f"{ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})" if ratio else ""
        ),
        "s": f"{row['prepare_s']['median']:.2f}",
        "process s": f"{row['process_s']['median']:.1f}",
        "peak MiB": row["peak_mib"],
        "different rows": row.get("different rows", ""),
    }


def main() -> None:
    if sys.argv[1:2] == [WORKER]:
        return work(*map(Path, sys.argv[2:]))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--train-file", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        case = make_case(Path(directory, "case"), arguments.train_file)
        rows = list(summarize(measure(case, arguments.rounds)))
    shown = list(map(cells, rows))
    print(table(list(shown[0]), [list(map(str, row.values())) for row in shown]))
    peers = peer_versions("trl", "transformers", "datasets", "tokenizers")
    write_result(
        "prepare",
        {**header(), "peers": peers, "rounds": arguments.rounds, "rows": rows},
        arguments.output,
    )
    return None


if __name__ == "__main__":
    main()
