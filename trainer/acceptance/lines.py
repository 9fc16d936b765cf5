"""The lines of an acceptance: each asks for the evidence that it needs and judges it (floor 5).

A line is a function of the evidence and an entry in `LINES`, in the order in which they are judged.
"""

import math
import platform
import re
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from typing import TYPE_CHECKING

from trainer.acceptance import NUM_ROUNDINGS
from trainer.acceptance.evidence import NUM_COMPARED, Evidence
from trainer.launch.requirements import PYPROJECT, unmet_requirements
from trainer.planner.forecast import GIB
from trainer.planner.roofline import LAUNCH, card_called, predict
from trainer.resume_proof.killed_runs import KilledRun, RunFailedError

if TYPE_CHECKING:
    from trainer.resume_proof.bit_equality import Comparison

OK, WARN, FAIL, NOT_POSSIBLE = "ok", "warn", "fail", "not possible here"
KERNELS = {
    "attention": "packed attention, forward and backward, beside float64",
    "norm": "RMS norm, forward and backward, beside float64",
    "rotary": "rotary positions, forward and backward, beside float64",
    "head": "the chunked head's cross-entropy and its gradients, beside float64",
    "adamw": "fused AdamW beside float64",
    "clip": "gradient norm, clipping and a step left out, beside float64",
}
COMPARED = {"train/loss": 1e-6, "train/grad_norm": 1e-5}
"""And the largest relative difference between two ways of running the same batch in float32, as is promised; in
bfloat16 what rounding changes is the largest between that run and the same in float32.
"""
SLOW, FAR_SLOWER = 0.7, 0.5
"""Shares of what a card's table and the roofline say, below which a line warns."""
PACKAGES = ("torch", "transformers", "accelerate")
OUT_OF_MEMORY = re.compile(r"out of memory|OutOfMemory", re.IGNORECASE)


@dataclass(frozen=True)
class Judgement:
    """A verdict, why in words, and the numbers that it rests on."""

    verdict: str
    text: str
    numbers: dict[str, float | str] = field(default_factory=dict)


Judge = Callable[[Evidence], Judgement]


def judge_versions(evidence: Evidence) -> Judgement:
    found: dict[str, float | str] = {name: metadata.version(name) for name in PACKAGES}
    found["python"] = platform.python_version()
    unmet = unmet_requirements() if PYPROJECT.exists() else []
    text = ", ".join(f"{name} {version}" for name, version in found.items())
    return Judgement(WARN if unmet else OK, text + (f"; not met: {', '.join(unmet)}" if unmet else ""), found)


def judge_topology(evidence: Evidence) -> Judgement:
    probes = evidence.probes
    devices = sorted({f"{probe.device} {probe.memory_gib:.0f} GiB" for probe in probes})
    if not evidence.trial.is_on_gpu:
        return Judgement(NOT_POSSIBLE, f"{len(probes)} ranks met over gloo on one CPU: there are no cards to look at")
    first, number = probes[0], len(probes)
    numbers: dict[str, float | str] = {"ranks": number, "devices": ", ".join(devices)}
    numbers |= {"cuda": first.cuda, "nccl": first.nccl, "capability": first.capability}
    text = f"{number} x {', '.join(devices)}, CUDA {first.cuda}, NCCL {first.nccl}"
    apart = sorted({rank for rank, probe in enumerate(probes) if len(probe.peers) < len(probes) - 1})
    if len(devices) > 1:
        return Judgement(WARN, f"{text}: the slowest card sets the pace", numbers)
    if apart:
        return Judgement(WARN, f"{text}: cards {apart} do not reach all others directly", numbers)
    return Judgement(OK, f"{text}; every card reaches every other directly", numbers)


def judge_self_check(evidence: Evidence) -> Judgement:
    """As the run itself says it, on all ranks."""
    found = re.search(r"^self-check: (.*)$", _log(evidence.straight), re.MULTILINE)
    return Judgement(OK, found[1]) if found else Judgement(FAIL, "the run does not speak of its self-check")


def judge_kernel(evidence: Evidence, name: str) -> Judgement:
    for rank, probe in enumerate(evidence.probes):
        if name in probe.kernel_failures:
            return Judgement(FAIL, f"on rank {rank}: {probe.kernel_failures[name]}")
    share, rank = max((probe.kernel_errors[name], rank) for rank, probe in enumerate(evidence.probes))
    text = f"largest error {share:.2g} of what rounding may be, on rank {rank}"
    return Judgement(OK if share <= 1.0 else FAIL, text, {"share_of_tolerance": share})


def judge_matmul(evidence: Evidence) -> Judgement:
    probes = evidence.probes
    rank, slowest = min(enumerate(probes), key=lambda item: item[1].matmul_tflops)
    numbers: dict[str, float | str] = {"tflops": slowest.matmul_tflops, "dtype": slowest.matmul_dtype}
    text = f"{slowest.matmul_tflops:.3g} TFLOP/s in {slowest.matmul_dtype} on the slowest rank, {rank}"
    card = card_called(slowest.device)
    if card is None:
        return Judgement(NOT_POSSIBLE, f"{text}; nothing to compare with: no data of {slowest.device}", numbers)
    share = slowest.matmul_tflops / card.matmul_tflops
    text = f"{text}: {share:.0%} of what others measured on {card.name}"
    return Judgement(OK if share >= SLOW else WARN, text, {**numbers, "share": share})


def judge_collectives(evidence: Evidence) -> Judgement:
    """Of the slowest rank."""
    if evidence.trial.num_ranks == 1:
        return Judgement(NOT_POSSIBLE, "one rank exchanges nothing")
    probes = evidence.probes
    gather, scatter = (min(getattr(p, f"{kind}_gb_s") for p in probes) for kind in ("all_gather", "reduce_scatter"))
    numbers: dict[str, float | str] = {"all_gather_gb_s": gather, "reduce_scatter_gb_s": scatter}
    text = f"all-gather {gather:.3g} GB/s, reduce-scatter {scatter:.3g} GB/s a rank"
    card = card_called(probes[0].device)
    if card is None:
        why = "between processes of a CPU this says nothing of links between cards"
        why = why if not evidence.trial.is_on_gpu else f"no data of {probes[0].device}"
        return Judgement(NOT_POSSIBLE, f"{text}; nothing to compare with: {why}", numbers)
    share = min(gather, scatter) / card.link_gb_s
    text = f"{text}: {share:.0%} of what {card.name} on a board of eight should reach"
    return Judgement(OK if share >= SLOW else WARN, text, {**numbers, "share": share})


def judge_ranks(evidence: Evidence) -> Judgement:
    number = evidence.trial.num_ranks
    if number == 1:
        return Judgement(NOT_POSSIBLE, "there is one rank: give a number of ranks")
    return _same_numbers(evidence, lambda: evidence.one_rank, f"{number} ranks and one")


def judge_packing(evidence: Evidence) -> Judgement:
    if "documents run packed" not in _log(evidence.straight):
        return Judgement(NOT_POSSIBLE, "documents of this model run one by one in any case")
    return _same_numbers(evidence, lambda: evidence.one_by_one, "packed documents and documents one by one")


def judge_repeat(evidence: Evidence) -> Judgement:
    comparison = evidence.repeated
    if comparison.differences:
        return Judgement(FAIL, f"two equal runs differ, first at {comparison.differences[0]}")
    return Judgement(OK, f"two equal runs give the same bits: {_extent(comparison)}")


def judge_resume(evidence: Evidence) -> Judgement:
    if evidence.repeated.differences:
        return Judgement(NOT_POSSIBLE, "two equal runs differ already, so that a resumed one says nothing")
    found = evidence.resumed
    lost = [f"kill {kill}" for kill in found.kills if kill.has_lost_checkpoint]
    if wrong := [*lost, *found.comparison.differences]:
        return Judgement(FAIL, f"killed and resumed differs from straight, first at {wrong[0]}")
    kills = "; ".join(map(str, found.kills))
    return Judgement(OK, f"killed {kills}; equal in {_extent(found.comparison)}")


def judge_memory(evidence: Evidence) -> Judgement:
    """Of the fullest rank, beside a plan of full micro-batches: less is no fault."""
    run, plan = evidence.timed, evidence.plan
    planned = plan.plan.peak_bytes / GIB
    if not evidence.trial.is_on_gpu:
        resident = max(row["memory/cpu/rss_gib"] for row in run.rows())
        text = f"{planned:.2f} GiB of tensors planned, {resident:.2f} GiB resident with Python: a CPU has no allocator"
        return Judgement(NOT_POSSIBLE, f"{text} that counts", {"planned_gib": planned, "resident_gib": resident})
    reserved = max(row["memory/max_reserved_gib"] for row in run.rows())
    text = f"{reserved:.2f} GiB reserved, {plan.needed_gib:.2f} planned with CUDA's own, {planned:.2f} of them tensors"
    numbers: dict[str, float | str] = {"planned_gib": plan.needed_gib, "reserved_gib": reserved}
    return Judgement(OK if reserved <= plan.needed_gib else WARN, text, numbers)


def judge_speed(evidence: Evidence) -> Judgement:
    rows = evidence.timed.rows()[2:]
    rate = statistics.median(row["throughput/train/tokens_per_s"] for row in rows)
    numbers: dict[str, float | str] = {"tokens_per_s": rate}
    if mfu := [row["throughput/train/mfu"] for row in rows if "throughput/train/mfu" in row]:
        numbers["mfu"] = statistics.median(mfu)
    text = f"{rate:,.0f} tokens/s" + "".join(f", MFU {numbers[key]:.1%}" for key in ("mfu",) if key in numbers)
    card = card_called(evidence.probes[0].device)
    if card is None:
        return Judgement(NOT_POSSIBLE, f"{text}; the roofline has no data of {evidence.probes[0].device}", numbers)
    plan, sharing = evidence.plan.plan, evidence.config.model.ulysses_sequence_parallel_size
    predicted = predict(plan.operations, card, num_micro_batches=plan.workload.num_micro_batches)
    tokens = plan.workload.num_tokens * plan.workload.num_micro_batches * plan.num_ranks / sharing
    numbers |= {"predicted_tokens_per_s": tokens / predicted.step_s}
    share = rate * predicted.step_s / tokens
    text = (
        f"{text}: {share:.0%} of the {tokens / predicted.step_s:,.0f} predicted for {card.name} and full micro-batches"
    )
    launches_s = sum(seconds for (_, name), seconds in predicted.places.items() if name == LAUNCH)
    if launches_s > predicted.step_s / 2:
        why = "a model this small only waits for launches: accept your own, with model.partial_pretrain=..."
        return Judgement(NOT_POSSIBLE, f"{text}; {why}", numbers)
    return Judgement(OK if share >= FAR_SLOWER else WARN, text, {**numbers, "share": share})


LINES: dict[str, tuple[str, Judge]] = {
    "versions": ("of torch, transformers, accelerate and Python, against what is required", judge_versions),
    "topology": ("which cards there are, and whether they reach each other", judge_topology),
    **{name: (about, partial(judge_kernel, name=name)) for name, about in KERNELS.items()},
    "matmul": ("a large matrix product against the card's rate", judge_matmul),
    "collectives": ("bandwidth of all-gather and reduce-scatter against the card's", judge_collectives),
    "self-check": ("loss and gradient against transformers' own forward pass, in a run", judge_self_check),
    "ranks": ("one rank against N, step by step", judge_ranks),
    "packing": ("packed documents against one by one", judge_packing),
    "repeat": ("the same run twice, bit by bit", judge_repeat),
    "resume": ("killed and resumed against straight, bit by bit", judge_resume),
    "memory": ("planned against reserved", judge_memory),
    "speed": ("tokens/s and MFU against the roofline", judge_speed),
}


def _same_numbers(evidence: Evidence, run: Callable[[], KilledRun], what: str) -> Judgement:
    """Of the first steps, that the batch alone decides."""
    straight = evidence.straight
    try:
        found, allowed, dtype = _differences(straight, run()), COMPARED, "float32"
        if evidence.config.model.fsdp_config.param_dtype != dtype:
            rounding, dtype = _differences(straight, evidence.in_float32), "bfloat16"
            allowed = {key: max(least, NUM_ROUNDINGS * rounding[key]) for key, least in COMPARED.items()}
    except RunFailedError as error:
        if OUT_OF_MEMORY.search(str(error)):
            return Judgement(NOT_POSSIBLE, "the model does not fit one rank, or not in float32: accept a smaller one")
        raise
    is_equal = all(found[key] <= allowed[key] < 1 for key in COMPARED)  # what is no number is not
    loss, norm = (f"{found[key]:.1e} (allowed {allowed[key]:.0e})" for key in COMPARED)
    text = f"{what}: losses differ by {loss}, gradient norms by {norm} in {dtype}, relative, over {NUM_COMPARED} steps"
    return Judgement(OK if is_equal else FAIL, text, {"dtype": dtype, **found})


def _differences(left: KilledRun, right: KilledRun) -> dict[str, float]:
    """The largest relative ones of the first steps; not a number where one of them is none."""
    pairs = list(zip(left.rows()[:NUM_COMPARED], right.rows()[:NUM_COMPARED], strict=True))
    found = {key: [abs(one[key] - other[key]) / abs(one[key]) for one, other in pairs] for key in COMPARED}
    return {key: math.nan if any(map(math.isnan, values)) else max(values) for key, values in found.items()}


def _extent(comparison: "Comparison") -> str:
    return f"{comparison.num_steps} steps, {comparison.num_tensors} tensors, {comparison.num_validations} validations"


def _log(run: KilledRun) -> str:
    return run.log.read_text(errors="replace", encoding="utf-8")
