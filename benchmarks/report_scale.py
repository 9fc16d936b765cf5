"""How long does the report take over a million rows, page included, and how much memory?

    python benchmarks/report_scale.py

Writes a log of 25 metrics a row in our format and in ms-swift's, and reads, analyses and draws each
in a process of its own.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from measuring import REPOSITORY, header, table, write_result

SEED = 1
NUM_KEYS = 25
LIMIT_S = 60.0
LIMIT_BYTES = 2**31
"""Limit for reading, analysis and the page together, for a million rows."""
OWN_KEYS = ("train/loss", "train/lr", "train/lr(1e-3)", "train/grad_norm", "train/time(s)")
SWIFT_KEYS = (
    "loss",
    "learning_rate",
    "grad_norm",
    "kl",
    "reward",
    "reward_std",
    "completions/mean_length",
)
READ = """
import json, sys, time
from pathlib import Path
from trainer.tools.report.analyse import analyse
from trainer.tools.report.page import as_page
from trainer.tools.report.readers import read_run
before, cpu_before = time.perf_counter(), time.process_time()
log = read_run(Path(sys.argv[1]))
read_s = time.perf_counter() - before
page = as_page([(analyse(log), log)])
lines = Path("/proc/self/status").read_text().splitlines()
peak = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
print(json.dumps({
    "read_s": read_s,
    "wall_s": time.perf_counter() - before,
    "cpu_s": time.process_time() - cpu_before,
    "peak_bytes": peak,
    "page_bytes": len(page),
    "num_rows": log.num_rows,
    "num_unparsed": log.num_unparsed,
}))
"""


def own_rows(num_rows: int) -> Iterator[dict[str, Any]]:
    generator = random.Random(SEED)
    keys = [
        *OWN_KEYS,
        *(f"throughput/train/metric_{n}_per_s" for n in range(NUM_KEYS - len(OWN_KEYS))),
    ]
    for step in range(1, num_rows + 1):
        place = {"step": step, "attempt": 1, "kind": "train", "ts": 1.7e9 + step}
        yield place | {key: generator.random() for key in keys}


def swift_rows(num_rows: int) -> Iterator[dict[str, Any]]:
    """Four of the 25 are strings."""
    generator = random.Random(SEED)
    keys = [
        *SWIFT_KEYS,
        *(f"rewards/Reward{n}/mean" for n in range(NUM_KEYS - 4 - len(SWIFT_KEYS))),
    ]
    for step in range(1, num_rows + 1):
        minutes, seconds = divmod(step, 60)
        place = {
            "global_step/max_steps": f"{step}/{num_rows}",
            "percentage": f"{100 * step / num_rows:.2f}%",
            "elapsed_time": f"{minutes // 60}h {minutes % 60}m {seconds}s",
            "remaining_time": f"{(num_rows - step) // 3600}h 0m 0s",
        }
        yield {key: round(generator.random(), 8) for key in keys} | place


def write_rows(path: Path, rows: Iterator[dict[str, Any]]) -> None:
    with path.open("w") as file:
        file.writelines(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)


def read(path: Path) -> dict[str, Any]:
    words = [sys.executable, "-c", READ, str(path)]
    done = subprocess.run(words, cwd=REPOSITORY, check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument(
        "--output", type=Path, help="result file (default: benchmarks/results/report_scale.json)"
    )
    options = parser.parse_args()
    result: dict[str, Any] = {
        **header(),
        "limits": {"wall_s": LIMIT_S, "peak_bytes": LIMIT_BYTES},
        "logs": {},
    }
    with tempfile.TemporaryDirectory() as directory:
        for name, rows in (("metrics.jsonl", own_rows), ("logging.jsonl", swift_rows)):
            path = Path(directory) / name
            write_rows(path, rows(options.rows))
            result["logs"][name] = {"size_bytes": path.stat().st_size, **read(path)}
            path.unlink()
    columns = ["read_s", "cpu_s", "wall_s", "peak_bytes", "page_bytes"]
    lines = [
        [name, *(f"{log[column]:,.1f}" for column in columns)]
        for name, log in result["logs"].items()
    ]
    print(table(["log", *columns], lines))
    write_result("report_scale", result, options.output)


if __name__ == "__main__":
    main()
