"""Every pair of features meets at least once: tiny runs of the real command beside plain training in float64.

`python tests/numerics/meetings.py` draws the rows by `--seed`, tries all of them and writes
benchmarks/results/meetings.json; `--only 3 17` tries those of these numbers and replaces their lines.
"""

import argparse
import fcntl
import json
import sys
import tempfile
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from command_ranks import CommandRanks
from covering import Row, all_pairs, covering_rows
from meeting_features import EXCLUDED, FEATURES, Places, refused_rows
from meeting_trials import Found, refused, tried
from transformers.utils import logging

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "meetings.json"
SEED = 1


def trials(seed: int) -> list[tuple[Row, str]]:
    """Rows with the reason for which they are refused; first those that train."""
    return [(row, "") for row in covering_rows(FEATURES, excluded=EXCLUDED, seed=seed)] + refused_rows()


def attempt(row: Row, reason: str, places: Places, run_dir: Path, ranks: CommandRanks) -> Found:
    try:
        return refused(row, reason, places, run_dir, ranks) if reason else tried(row, places, run_dir, ranks)
    except Exception:
        return Found([traceback.format_exc()])


def said(row: Row) -> str:
    """Where it differs from the first values, in a line."""
    return ", ".join(f"{name} {value}" for name, value in row.items() if value != FEATURES[name][0])


def record(seed: int, number: int, row: Row, found: Found, output: Path) -> None:
    """Put what was found into its line of the results."""
    with output.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        known = json.loads(file.read() or "{}")
        lines = known.get("rows", {}) if known.get("seed") == seed else {}
        differences = {kind: float(f"{error:.1e}") for kind, error in found.errors.items()}
        lines[str(number)] = {"row": said(row), "faults": found.faults[:5], "differences": differences}
        result = {
            "command": "python tests/numerics/meetings.py",
            "seed": seed,
            "pairs": len(all_pairs(FEATURES)),
            "faults": sum(len(line["faults"]) for line in lines.values()),
            "rows": {key: lines[key] for key in sorted(lines, key=int)},
        }
        file.truncate(0)
        file.write(json.dumps(result, indent=1) + "\n")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--only", type=int, nargs="+", default=[])
    parser.add_argument("--keep", type=Path, help="where runs stay, to be looked at")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args(argv)
    logging.disable_progress_bar()
    num_bad, rows = 0, trials(arguments.seed)
    with tempfile.TemporaryDirectory(prefix="meetings-") as temporary, CommandRanks() as ranks:
        root = arguments.keep or Path(temporary)
        root.mkdir(exist_ok=True)
        for number in arguments.only or range(len(rows)):
            begun, (row, reason) = time.monotonic(), rows[number]
            found = attempt(row, reason, Places(root), root / f"run_{number}", ranks)
            record(arguments.seed, number, row, found, arguments.output)
            num_bad += bool(found.faults)
            verdict = "FAULT" if found.faults else "good"
            worst = ", ".join(f"{kind} {error:.1e}" for kind, error in found.errors.items())
            print(f"{number} {verdict} {time.monotonic() - begun:.1f} s {worst}", flush=True)
            if found.faults:
                print("  " + "\n  ".join([said(row), *found.faults[:8]]), flush=True)
    print(f"seed {arguments.seed}: {len(rows)} rows, {num_bad} with faults")
    return 1 if num_bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
