"""What a rank's start and batches cost with many prepared rows.

    python benchmarks/many_rows.py --rows 1000000 10000000

Files as preparation leaves them (16 tokens a row) are written directly; a fresh process opens them,
holds out 2 % of the rows, and builds the batches of some steps. Memory is what grows after the
imports: its own, and at its highest together with the pages of the files that it looked at, which
all ranks share and the kernel takes back.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import fields
from pathlib import Path
from typing import get_origin

import numpy as np
from measuring import header, peak_bytes, table, write_result

from trainer.data.batch_plan import Limits, Schedule
from trainer.data.loader import RankPlan, build_step
from trainer.data.row_encoder import ROW
from trainer.data.sample_writer import ROWS, TOKENS, Summary
from trainer.data.samples import Samples, open_dataset
from trainer.data.token_cache import write_checksums

LENGTH, BATCH_SIZE, NUM_STEPS = 16, 512, 50


def write_dataset(directory: Path, num_rows: int) -> None:
    """The second half of each row is supervised."""
    np.tile(
        np.arange(LENGTH, dtype="<i4") - 2**31 * (np.arange(LENGTH) >= LENGTH // 2), num_rows
    ).astype("<i4").tofile(directory / TOKENS)
    rows = np.zeros(num_rows, dtype=ROW)
    rows["line"] = np.arange(num_rows) + 1
    rows["num_tokens"], rows["num_loss_tokens"] = LENGTH, LENGTH // 2
    rows["end"] = rows["line"] * LENGTH
    rows.tofile(directory / ROWS)
    summary = {field.name: (get_origin(field.type) or field.type)() for field in fields(Summary)}  # type: ignore[operator]
    summary |= {"num_rows": num_rows, "num_samples": num_rows, "num_tokens": num_rows * LENGTH}
    summary |= {"num_loss_tokens": num_rows * LENGTH // 2, "fingerprint": "0" * 64}
    (directory / "summary.json").write_text(json.dumps(summary))
    write_checksums(directory)


def own_bytes() -> int:
    """Resident memory that is no file's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def start(directory: Path) -> dict[str, float]:
    """In a fresh process."""
    before, own_before, started = peak_bytes(), own_bytes(), time.perf_counter()
    dataset = open_dataset(directory, (Path("rows.jsonl"),))
    train, _ = dataset.whole("rows").split(0.02, seed=1, limit=None)
    samples, plan = Samples([train]), RankPlan(0, 1, Limits(8192, None), quadratic_cost=0.0)
    schedule = Schedule(samples.shares, BATCH_SIZE, seed=1)
    assert samples.fingerprint and train.num_tokens == len(samples) * LENGTH
    schedule.rows(1)
    opened = time.perf_counter()
    for step in range(1, NUM_STEPS + 1):
        build_step(samples, samples.of_rows(schedule.rows(step)), plan, step=step, epoch=0)
    return {
        "start_s": opened - started,
        "step_ms": (time.perf_counter() - opened) / NUM_STEPS * 1000,
        "own_mib": (own_bytes() - own_before) / 2**20,
        "with_files_mib": (peak_bytes() - before) / 2**20,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000_000, 10_000_000])
    parser.add_argument("--start", type=Path, metavar="DIRECTORY", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.start:
        print(json.dumps(start(arguments.start)))
        return
    found = []
    for num_rows in arguments.rows:
        with tempfile.TemporaryDirectory() as directory:
            write_dataset(Path(directory), num_rows)
            words = [sys.executable, __file__, "--start", directory]
            output = subprocess.run(words, check=True, capture_output=True, text=True).stdout
            found.append({"rows": num_rows} | json.loads(output))
            print(found[-1], flush=True)
    print(
        table(
            list(found[0]),
            ([f"{v:,.4g}" if isinstance(v, float) else v for v in row.values()] for row in found),
        )
    )
    write_result("many_rows", {**header(), "rows": found})


if __name__ == "__main__":
    main()
