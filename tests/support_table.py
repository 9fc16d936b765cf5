"""What trains, and how far that is exact: tries a tiny model of every family and writes down what
came of it.

`python tests/support_table.py` goes on where benchmarks/results/support.json ends, `python
tests/support_table.py lfm2 zamba` tries these anew; both render the table of docs/models.md. The
families run in processes of their own with a time limit; what fails is
recorded with its reason. The product's own parts train each on one and two
ranks: all documents in one micro-batch and each alone, beside transformers' own eager forward pass,
document by document; then six steps on two ranks, in one go, and stopped and built anew from a
checkpoint; then transformers loads the export.
"""

import argparse
import json
import platform
import sys
import tempfile
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from families import FAMILIES, LEFT_OUT, VARIANTS
from family_runs import NUM_RANKS, TOTAL_STEPS, export_faults
from family_trials import PACKED, PER_DOCUMENT, REFUSED, first_step, resumed, save_model
from ranks import run_ranks
from result_file import write_result

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = REPOSITORY / "benchmarks" / "results" / "support.json"
PAGE = REPOSITORY / "docs" / "models.md"
BEGIN, END = "<!-- written by tests/support_table.py -->", "<!-- end of what it writes -->"
NAMES = (*FAMILIES, *VARIANTS)
LIMITS = {"loss error": 1e-6, "norm error": 1e-5, "gradient error": 1e-5}
PLACES = ("1 rank", f"{NUM_RANKS} ranks")
LOOPED = ", looped:"
TRIED_WITHIN_S, STARTED_WITHIN_S = 60.0, 60.0
TOGETHER = 11
"""Families in the same processes: to start these takes longer than to try one."""


def try_all(world: Any, root: Path, names: list[str]) -> list[dict[str, Any]]:
    """What is found of each family, or how it failed. Collective."""
    return [_caught(world, root / name, name) for name in names]


def _caught(world: Any, root: Path, name: str) -> dict[str, Any]:
    try:
        if world.size == 1:
            save_model(root / "model", name)
        found = first_step(world, root / "model", root / f"export-{world.size}")
        if world.size > 1 and found["how"] != REFUSED:
            found["resume faults"] = resumed(
                world, root / "model", root, is_packed=found["how"] == PACKED
            )
            checkpoint = root / "straight" / f"global_step_{TOTAL_STEPS}"
            found["export faults"] = export_faults(checkpoint) if world.is_main else []
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}".replace(str(root), "")[:600]}
    return found


def attempt(root: Path, names: list[str]) -> list[dict[str, Any]]:
    """The entries of families tried in the same processes."""
    limit_s = STARTED_WITHIN_S + TRIED_WITHIN_S * len(names)
    alone, together = (
        run_ranks(try_all, size, root, names, timeout_s=limit_s)[0] for size in (1, NUM_RANKS)
    )
    return [_entry(*pair) for pair in zip(alone, together, strict=True)]


def _entry(alone: dict[str, Any], together: dict[str, Any]) -> dict[str, Any]:
    for found in (alone, together):
        if "failed" in found or found["how"] == REFUSED:
            return {key: found[key] for key in ("how", "reason", "failed") if key in found}
    entry = {key: together[key] for key in ("how", "reason", "resume faults", "export faults")}
    for place, found in zip(PLACES, (alone, together), strict=True):
        entry[place] = {key: found[key] for key in (*LIMITS, "gradients missing")}
    return entry


def is_exact(entry: dict[str, Any], places: Iterable[str], *keys: str) -> bool:
    """Whether what was measured there is within the limits, and no parameter was without its
    gradient.
    """
    measured = [entry.get(place, {}) for place in places]
    return all(
        of_one.get("gradients missing") == [] and of_one[key] < LIMITS[key]
        for of_one in measured
        for key in keys
    )


def marks(entry: dict[str, Any]) -> dict[str, bool]:
    """What a family shows, by column."""
    return {
        "first step": is_exact(entry, PLACES[:1], "loss error", "gradient error"),
        "ranks and micro-batches": is_exact(entry, PLACES, "loss error", "norm error"),
        "resumed": entry.get("resume faults") == [],
        "export": entry.get("export faults") == [],
    }


def faults(entry: dict[str, Any]) -> list[str]:
    """Why a family is not all that the table promises. A refusal is as promised."""
    if "failed" in entry:
        return [f"failed: {entry['failed']}"]
    if entry["how"] == REFUSED:
        return []
    return [mark for mark, shown in marks(entry).items() if not shown]


def table(results: dict[str, Any]) -> str:
    """The part of docs/models.md between the markers."""
    entries = {name: results["families"][name] for name in sorted(results["families"])}
    columns = list(marks({}))
    families = {name.split()[0] for name in entries}
    hows = [entry.get("how") for entry in entries.values()]
    counts = ", ".join(f"{hows.count(how)} {how}" for how in (PACKED, PER_DOCUMENT, REFUSED))
    num_looped = sum(e.get("how") == PACKED and bool(e["reason"]) for e in entries.values())
    versions = results["versions"]
    lines = [
        f"{len(entries)} configurations of {len(families)} families: {counts} ({num_looped} with "
        f"loops). transformers {versions['transformers']}, torch {versions['torch']}.",
        "",
        f"| family | documents | {' | '.join(columns)} |",
        f"|---|---|{'---|' * len(columns)}",
    ]
    for name, entry in entries.items():
        reason = entry.get("reason", "")
        if reason:
            reason = f"{LOOPED if entry['how'] == PACKED else ':'} {reason}"
        cells = ["yes" if shown else "no" for shown in marks(entry).values()]
        if entry.get("how") == REFUSED:
            cells = ["" for _ in cells]
        lines.append(f"| {name} | {entry.get('how', 'failed')}{reason} | {' | '.join(cells)} |")
    lines += ["", "Left out of transformers' list of causal language models:", ""]
    lines += [f"- {reason}: {', '.join(names)}" for reason, names in LEFT_OUT.items()]
    return "\n".join(lines)


def page(results: dict[str, Any], old: str) -> str:
    """docs/models.md with the table of these results."""
    before, _, rest = old.partition(BEGIN)
    return f"{before}{BEGIN}\n{table(results)}\n{END}{rest.partition(END)[2]}"


def read_results() -> dict[str, Any]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {"families": {}}


def write_results(results: dict[str, Any]) -> None:
    results["families"] = {
        name: results["families"][name] for name in NAMES if name in results["families"]
    }
    write_result(RESULTS, results)


def main(argv: list[str]) -> int:
    """1 if a family shows less than the table promises."""
    parser = argparse.ArgumentParser(prog="python tests/support_table.py", allow_abbrev=False)
    parser.add_argument("names", nargs="*", choices=[[], *NAMES], metavar="FAMILY")
    arguments = parser.parse_args(argv)
    results = read_results()
    names = arguments.names or [name for name in NAMES if name not in results["families"]]
    for begin in range(0, len(names), TOGETHER):
        group = list(names[begin : begin + TOGETHER])
        with tempfile.TemporaryDirectory(prefix="families-") as root:
            entries = attempt(Path(root), group)
        results |= {
            "command": "python tests/support_table.py",
            "versions": {"python": platform.python_version()}
            | {p: version(p) for p in ("torch", "transformers")},
        }
        results["families"] |= dict(zip(group, entries, strict=True))
        write_results(results)
        for name, entry in zip(group, entries, strict=True):
            print(
                f"{name}: {entry.get('how')}: {', '.join(faults(entry)) or 'as promised'}",
                flush=True,
            )
    PAGE.write_text(page(results, PAGE.read_text()))
    return int(any(faults(entry) for entry in results["families"].values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
