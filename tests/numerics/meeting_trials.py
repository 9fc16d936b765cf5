"""One combination of features: a run of the command and its resume, compared with the definition."""

import math
import shutil
from dataclasses import dataclass, field, replace

import whole_runs
from meeting_features import (
    BATCH_SIZE,
    DATA,
    FROZEN,
    LR,
    MAX_LENGTH,
    NUM_EPOCHS,
    NUM_STEPS,
    SAVE_FREQ,
    SOURCES,
    TEST_FREQ,
    ranks_of,
    words_of,
)
from plain_training import Definition, Document, load, train
from whole_equality import compare_runs

from trainer.data.batch_plan import Schedule, Share
from trainer.tracking import read_metrics

SEED = 1
LOOSE = {"float32": 1.0, "bfloat16": 3e2, "bfloat16 parameters": 1e5}
"""Random rounding of moments or parameters to 8 bits is not an error of the gradient. Resuming
stays bit-equal.
"""
LOOSE_BETWEEN = 1e2
"""Random rounding is equal on any number of ranks, except where the last digit of a sum decides."""
MEASURED = ("train/loss", "train/grad_norm")
LIMITS = {"loss": 1e-6, "objective": 1e-5, "grad_norm": 3e-5, "router_loss": 1e-5, "update": 1e-3}
"""Beside float64, which rounds nothing: the recurrence of qwen3_next alone takes 2e-5 of the
norm in float32. DFT's loss of a token, `exp(-nll) * nll`, has `nll - 1` times the relative error
of its nll, and the nll of these models is about 10.
"""


@dataclass
class Found:
    """The faults of a trial."""

    faults: list[str] = field(default_factory=list)

    def expect(self, is_good, fault):
        if not is_good:
            self.faults.append(fault)
        return is_good

    def limit(self, error, limit, where):
        self.expect(error <= limit, f"{where}: off by {error:.1e}, allowed {limit:.0e}")


def defined(row, places):
    """Return the run that the features describe."""
    repeats = SOURCES[row["sources"]]
    names = ["held", "second"] if row["sources"] == "two" else ["held"]
    shares = tuple(Share(len(DATA[name]), repeat) for name, repeat in repeats.items())
    schedule = Schedule(shares, BATCH_SIZE, SEED)
    total_steps = NUM_STEPS if row["length"] == "steps" else schedule.steps_until(NUM_EPOCHS)
    samples = documents(row, list(repeats))
    order = [schedule.rows(step) for step in range(1, total_steps + 1)]
    return Definition(
        model=places.model(row),
        adapter=places.adapter(row),
        frozen=FROZEN if row["trained"] == "some" else (),
        is_rounded=row["states"] == "bfloat16 parameters",
        steps=[[samples[number] for number in numbers] for numbers in order],
        validation=documents(row, names) if row["validation"] == "on" else [],
        test_freq=TEST_FREQ,
        lr=LR,
        loss=row["loss"],
        optimizer=row["optimizer"],
        schedule=row["schedule"],
    )


def documents(row, names):
    """Return the rows of these files, in the order of their ids."""
    is_named = row["sources"] == "two"
    return [
        Document(ids, mask, name if is_named else "") for name in names for ids, mask in DATA[name]
    ]


def limits_of(row, definition):
    """Return norms at which some update is clipped or skipped, well apart from the norms of this
    run.
    """
    if row["clipping"] == "never" and row["guard"] == "quiet":
        return {}
    norms = sorted(
        {rows["train/grad_norm"] for rows in train(definition).train.values()}, reverse=True
    )
    limits = {"clip": norms[-1] / 2} if row["clipping"] == "hit" else {}
    return limits | ({"skip": math.sqrt(norms[0] * norms[1])} if row["guard"] == "skips" else {})


def tried(row, places, run_dir):
    """Return the differences from the definition of the run, from the start and resumed at step 3."""
    found = Found()
    definition = defined(row, places)
    limits = limits_of(row, definition)
    definition = replace(
        definition, max_norm=limits.get("clip", math.inf), skip_above=limits.get("skip", math.inf)
    )
    words = words_of(row, places, limits=limits)
    num_ranks, num_later = ranks_of(row)
    whole_runs.train(run_dir, num_ranks, *words)
    expected = train(definition)
    total_steps = len(definition.steps)
    compare(found, row, definition, expected, run_dir, "from the start")

    later = run_dir.with_name("resumed")
    shutil.copytree(run_dir, later)
    for checkpoint in later.glob("global_step_*"):
        if checkpoint.name != f"global_step_{SAVE_FREQ}":
            shutil.rmtree(checkpoint)
    (later / "latest_checkpointed_iteration.txt").write_text(str(SAVE_FREQ))
    if num_later == 1:
        words += ["model.ulysses_sequence_parallel_size=1", "model.fsdp_config.fsdp_size=-1"]
        words += ["model.expert_parallel_size=1"]
        if row["micro-batches"] == "tokens":
            words.append(f"data.max_token_len_per_gpu={MAX_LENGTH}")
    output = whole_runs.train(later, num_later, *words)
    found.expect(f"continuing at step {SAVE_FREQ + 1}" in output, f"not resumed: {output}")
    compare(found, row, definition, expected, later, f"resumed on {num_later} ranks")
    if num_later == num_ranks:
        found.faults += compare_runs(run_dir, later, steps=total_steps).differences
    else:
        straight = {
            step: {key: values[key] for key in MEASURED}
            for step, values in logged(run_dir, "train").items()
        }
        compare_rows(found, logged(later, "train"), straight, LOOSE_BETWEEN, "other ranks")
    return found.faults


def compare(found, row, definition, expected, run_dir, where):
    """The metrics and trained parameters of a whole run."""
    states = row["states"]
    for kind, rows in (("train", expected.train), ("val", expected.val)):
        ours = logged(run_dir, kind)
        wanted = {step: values for step, values in rows.items() if values}
        found.expect(ours.keys() == wanted.keys(), f"{where}: {kind} rows of steps {sorted(ours)}")
        compare_rows(found, ours, wanted, LOOSE[states], where)
    after = exported(
        run_dir / f"global_step_{len(definition.steps)}" / "huggingface", definition, expected
    )
    odd = sorted(after.keys() ^ expected.after.keys())
    found.expect(not odd, f"{where}: exported with another name: {odd}")
    for name in after.keys() & expected.after.keys():
        moved = expected.after[name] - expected.before[name]
        error = (after[name] - expected.after[name]).norm() / moved.norm()
        found.limit(error.item(), LIMITS["update"] * LOOSE[states], f"{where}, {name}")


def logged(run_dir, kind):
    return {
        row["step"]: row for row in read_metrics(run_dir / "metrics.jsonl") if row["kind"] == kind
    }


def compare_rows(found, ours, wanted, loose, where):
    """Compare every number in `wanted`. Counts and the learning rate must be equal, except for
    counts that random rounding changes.
    """
    for step in ours.keys() & wanted.keys():
        for key, value in wanted[step].items():
            place = f"{where}, step {step}, {key}"
            if not found.expect(key in ours[step], f"{place} is missing"):
                continue
            error = abs(ours[step][key] - value) / max(abs(value), 1e-9)
            measure = next(
                (name for name in ("router_loss", "loss", "objective", "grad_norm") if name in key),
                None,
            )
            if measure is not None:
                is_first = step == 1 and "val" not in key
                found.limit(error, LIMITS[measure] * (1.0 if is_first else loose), place)
            elif loose == 1.0 or not ("accuracy" in key or "load" in key):
                found.expect(error < 1e-9, f"{place}: {ours[step][key]} is not {value}")


def exported(path, definition, expected):
    """Return the trained parameters as plain transformers or peft loads them."""
    model = load(path) if definition.adapter is None else load(definition.model, path)
    named = {
        name.removeprefix("base_model.model."): p.detach() for name, p in model.named_parameters()
    }
    return {name: named[name] for name in named.keys() & expected.after.keys()}
