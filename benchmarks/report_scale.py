"""How long does the report take over a million rows, page included, and how much memory?

    python benchmarks/report_scale.py

Writes a log of 25 metrics a row in our format and in ms-swift's, and reads, analyses and draws each
in a process of its own. The measure of the reader is `json.loads` over the same lines.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from measuring import REPOSITORY, header, table, write_result

SEED = 1
NUM_KEYS = 25
LIMIT_S, LIMIT_BYTES = 60.0, 2**31
"""For reading, analysis and the page together, of a million rows."""
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
from trainer.report.analyse import analyse
from trainer.report.page import as_page
from trainer.report.readers import read_run
before, cpu_before = time.perf_counter(), time.process_time()
log = read_run(Path(sys.argv[1]))
read_s, read_cpu_s = time.perf_counter() - before, time.process_time() - cpu_before
page = as_page([(analyse(log), log)])
seconds, cpu_s = time.perf_counter() - before, time.process_time() - cpu_before
lines = Path("/proc/self/status").read_text().splitlines()
peak = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
sizes = sorted(len(series) for series in log.series.values())
sizes_of = {"num_rows": log.num_rows, "num_series": len(sizes), "longest_series": sizes[-1], "page_bytes": len(page)}
facts = {"read_s": read_s, "read_cpu_s": read_cpu_s, **sizes_of}
print(json.dumps({"wall_s": seconds, "cpu_s": cpu_s, "peak_bytes": peak, "num_unparsed": log.num_unparsed, **facts}))
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


def parse_s(path: Path) -> float:
    """CPU seconds that `json.loads` alone takes for all lines."""
    started = time.process_time()
    with path.open("rb") as file:
        for line in file:
            json.loads(line)
    return time.process_time() - started


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
            size_bytes = path.stat().st_size
            result["logs"][name] = {
                "size_bytes": size_bytes,
                "json_loads_cpu_s": parse_s(path),
                **read(path),
            }
            path.unlink()
    columns = [
        "log",
        "MB",
        "json.loads CPU s",
        "read s",
        "in all CPU s",
        "in all s",
        "peak MiB",
        "page kB",
    ]
    lines = [
        [
            name,
            f"{log['size_bytes'] / 1e6:.0f}",
            f"{log['json_loads_cpu_s']:.1f}",
            f"{log['read_s']:.1f}",
            f"{log['cpu_s']:.1f}",
            f"{log['wall_s']:.1f}",
            f"{log['peak_bytes'] / 2**20:.0f}",
            f"{log['page_bytes'] / 1e3:.0f}",
        ]
        for name, log in result["logs"].items()
    ]
    print(table(columns, lines))
    write_result("report_scale", result, options.output)


if __name__ == "__main__":
    main()
