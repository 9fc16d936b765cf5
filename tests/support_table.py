"""What trains, and how far that is exact: tries a tiny model of every family and writes down what came of it.

`python tests/support_table.py` goes on where benchmarks/results/support.json ends, `python tests/support_table.py lfm2
zamba` tries these anew, `--write` only renders the table of docs/models.md again. Each family runs in processes of its
own with a time limit; what fails is recorded with its reason. The product's own parts train it on one and two ranks:
all documents in one micro-batch and each alone, beside transformers' own eager forward pass, document by document; then
six steps on two ranks, in one go, and stopped and built anew from a checkpoint; then transformers loads the export. (A
whole run of the command, killed and started again, takes above 10 s a family: tests/distributed/test_families.py.)
"""

import argparse
import json
import platform
import shutil
import sys
import tempfile
import time
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

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = REPOSITORY / "benchmarks" / "results" / "support.json"
PAGE = REPOSITORY / "docs" / "models.md"
BEGIN, END = "<!-- written by tests/support_table.py -->", "<!-- end of what it writes -->"
NAMES = (*FAMILIES, *VARIANTS)
LIMITS = {"loss error": 1e-6, "norm error": 1e-5, "gradient error": 1e-5}
PLACES = ("1 rank", f"{NUM_RANKS} ranks")
TRIED_WITHIN_S = 120.0


def try_alone(world: Any, root: Path, name: str) -> dict[str, Any]:
    """What one rank finds."""
    save_model(root / "model", name)
    return first_step(world, root / "model", root / "export")


def try_together(world: Any, root: Path) -> dict[str, Any]:
    """What two ranks find. Collective."""
    found = first_step(world, root / "model", root / "export-together")
    if found["how"] == REFUSED:
        return found
    found["resume faults"] = resumed(world, root / "model", root, is_packed=found["how"] == PACKED)
    found["export faults"] = export_faults(root / "straight" / f"global_step_{TOTAL_STEPS}") if world.is_main else []
    return found


def attempt(root: Path, name: str) -> dict[str, Any]:
    """The entry of a family. What fails is under "failed"."""
    try:
        alone = run_ranks(try_alone, 1, root, name, timeout_s=TRIED_WITHIN_S)[0]
        together = run_ranks(try_together, NUM_RANKS, root, timeout_s=TRIED_WITHIN_S)[0]
    except Exception as error:
        return {"failed": str(error).replace(str(root), "")[-600:]}
    if alone["how"] == REFUSED:
        return {key: alone[key] for key in ("how", "reason")}
    measured = {"1 rank": errors(alone), f"{NUM_RANKS} ranks": errors(together)}
    return {key: together[key] for key in ("how", "reason", "resume faults", "export faults")} | measured


def errors(found: dict[str, Any]) -> dict[str, Any]:
    return {key: found[key] for key in (*LIMITS, "gradients missing") if key in found}


def is_exact(entry: dict[str, Any], places: Iterable[str], *keys: str) -> bool:
    """Whether what was measured there is within the limits, and no parameter was without its gradient."""
    measured = [entry.get(place, {}) for place in places]
    return all(
        of_one.get("gradients missing") == [] and of_one[key] < LIMITS[key] for of_one in measured for key in keys
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
    return [] if entry["how"] == REFUSED else [mark for mark, shown in marks(entry).items() if not shown]


def table(results: dict[str, Any]) -> str:
    """The part of docs/models.md between the markers."""
    entries = {name: results["families"][name] for name in sorted(results["families"])}
    columns = list(marks({}))
    hows = [entry.get("how") for entry in entries.values()]
    lines = [
        f"{len(entries)} configurations of {len({name.split()[0] for name in entries})} families: "
        + ", ".join(f"{hows.count(how)} {how}" for how in (PACKED, PER_DOCUMENT, REFUSED))
        + f". transformers {results['versions']['transformers']}, torch {results['versions']['torch']}.",
        "",
        f"| family | documents | {' | '.join(columns)} |",
        f"|---|---|{'---|' * len(columns)}",
    ]
    for name, entry in entries.items():
        reason = f": {entry['reason']}" if entry.get("reason") else ""
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
    results["families"] = {name: results["families"][name] for name in NAMES if name in results["families"]}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


def main(argv: list[str]) -> int:
    """1 if a family shows less than the table promises."""
    parser = argparse.ArgumentParser(prog="python tests/support_table.py", allow_abbrev=False)
    parser.add_argument("names", nargs="*", choices=[[], *NAMES], metavar="FAMILY")
    parser.add_argument("--write", action="store_true", help="render the page from the results that are there")
    arguments = parser.parse_args(argv)
    results = read_results()
    names = arguments.names or [name for name in NAMES if name not in results["families"]]
    for name in [] if arguments.write else names:
        begun = time.monotonic()
        root = Path(tempfile.mkdtemp(prefix="family-"))
        entry = attempt(root, name)
        shutil.rmtree(root)
        results |= {
            "command": "python tests/support_table.py",
            "versions": {"python": platform.python_version()} | {p: version(p) for p in ("torch", "transformers")},
        }
        results["families"][name] = entry
        write_results(results)
        said = ", ".join(faults(entry)) or "as promised"
        print(f"{name}: {entry.get('how')}: {said} ({time.monotonic() - begun:.0f} s)", flush=True)
    PAGE.write_text(page(results, PAGE.read_text()))
    return int(any(faults(entry) for entry in results["families"].values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
