"""Checks which models train, and how exactly: a tiny model of every family, and the table of
docs/models.md.

`python tests/support_table.py` tries the families without an entry in
benchmarks/results/support.json; `python tests/support_table.py lfm2 zamba` tries these again. Each
family is trained on one and on two ranks, with all documents in one micro-batch and with each
alone, and compared with transformers' eager forward pass, document by document. Six steps on two
ranks are compared with the same steps stopped and resumed. Then transformers loads the export.
"""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from families import FAMILIES, LEFT_OUT, VARIANTS
from family_runs import NUM_RANKS, TOTAL_STEPS, export_faults
from family_trials import PACKED, PER_DOCUMENT, REFUSED, first_step, resumed, save_model
from ranks import run_ranks
from result_table import ResultTable

LIMITS = {"loss error": 1e-6, "norm error": 1e-5, "gradient error": 1e-5}
PLACES = ("1 rank", f"{NUM_RANKS} ranks")
LOOPED = ", looped:"
TRIED_WITHIN_S = 60.0
STARTED_WITHIN_S = 60.0


def try_all(world, root, names):
    """Return the findings for each family, or how it failed. Collective."""
    return [_caught(world, root / name, name) for name in names]


def _caught(world, root, name):
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


def attempt(names):
    """Try families in the same processes; return their entries."""
    limit_s = STARTED_WITHIN_S + TRIED_WITHIN_S * len(names)
    with tempfile.TemporaryDirectory(prefix="families-") as directory:
        alone, together = (
            run_ranks(try_all, size, Path(directory), names, timeout_s=limit_s)[0]
            for size in (1, NUM_RANKS)
        )
    return [_entry(*pair) for pair in zip(alone, together, strict=True)]


def _entry(alone, together):
    for found in (alone, together):
        if "failed" in found or found["how"] == REFUSED:
            return {key: found[key] for key in ("how", "reason", "failed") if key in found}
    entry = {key: together[key] for key in ("how", "reason", "resume faults", "export faults")}
    for place, found in zip(PLACES, (alone, together), strict=True):
        entry[place] = {key: found[key] for key in (*LIMITS, "gradients missing")}
    return entry


def is_exact(entry, places, *keys):
    """Return whether the measurements are within the limits and every parameter had a gradient."""
    measured = [entry.get(place, {}) for place in places]
    return all(
        of_one.get("gradients missing") == [] and of_one[key] < LIMITS[key]
        for of_one in measured
        for key in keys
    )


def marks(entry):
    """Return the marks of a family, by column."""
    return {
        "first step": is_exact(entry, PLACES[:1], "loss error", "gradient error"),
        "ranks and micro-batches": is_exact(entry, PLACES, "loss error", "norm error"),
        "resumed": entry.get("resume faults") == [],
        "export": entry.get("export faults") == [],
    }


def faults(entry):
    """Return why a family does not fulfil the table's promises. A refusal is as promised."""
    if "failed" in entry:
        return [f"failed: {entry['failed']}"]
    if entry["how"] == REFUSED:
        return []
    return [mark for mark, shown in marks(entry).items() if not shown]


def table(results):
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
    return lines


TABLE = ResultTable(
    command="tests/support_table.py",
    results="support.json",
    key="families",
    names=(*FAMILIES, *VARIANTS),
    measure=attempt,
    faults=faults,
    lines=table,
    together=11,  # to start the processes takes longer than to try one family
)

if __name__ == "__main__":
    sys.exit(TABLE.main(sys.argv[1:]))
