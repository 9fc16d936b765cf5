"""Seconds of a step on a device whose rates are known: a prediction, no measurement (floor 5, imports no torch).

Each operation takes as long as its products or its bytes, whichever is more. Within a part of a step (a layer forward
or backward, the head) the device computes, the host launches, ranks exchange and copies go to and come from host memory
at the same time: FSDP fetches and gathers the next layer while one is computed, and reduces the one before. The longest
counts. Attention waits for the heads that ranks of one micro-batch exchange, and the host for gradients that it adds to
those of earlier micro-batches. At the start of a micro-batch and in the update nothing is hidden behind anything else.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, fields, replace
from math import inf
from operator import mul

from trainer.config import ConfigError
from trainer.monitor.throughput import PEAK_TFLOPS, known_as

MATMUL, MATMUL_FP32, ATTENTION = "matrix products", "matrix products in float32", "attention"
MEMORY, GATHER, REDUCE, ALL_REDUCE = "memory", "all-gather", "reduce-scatter", "all-reduce"
ALL_TO_ALL = "all-to-all of attention heads"
COLLECTIVES = {GATHER, REDUCE, ALL_REDUCE, ALL_TO_ALL}
FROM_HOST, TO_HOST = "copies from host memory", "copies to host memory"
AWAITED, ON_HOST = "copies that hold up the step", "work in host memory"
COPIES = {FROM_HOST, TO_HOST, AWAITED}
DEVICE, EXCHANGE, LAUNCH = "computing", "waiting for other ranks", "waiting for the host"
RANKS_PER_MACHINE = 8
ALONE = {"start", "update"}
"""Parts of a step in which nothing is exchanged behind computation."""


@dataclass(frozen=True)
class DeviceOperation:
    """`kind` says which of the device's rates bounds it, besides memory: a product's, attention's or a collective's.

    `size_bytes` are read and written, or of a copy to or from the host those copied, or of a collective those received
    (and sent). `ranks_on_machine`: of a collective between machines, how many of its ranks share one; 0 within a
    machine.
    """

    phase: tuple[int | str, ...]
    name: str
    kind: str
    flops: int
    size_bytes: int
    ranks_on_machine: int = 0

    @property
    def part(self) -> str:
        """Of the step: start, forward, head, backward or update."""
        return str(self.phase[1])


@dataclass(frozen=True)
class Card:
    """Rates of one device. TFLOP/s: dense bfloat16 of the data sheet (what MFU is a share of), and what products and
    attention reach of it; GB/s: memory, all links to cards of the same machine one way, its share of the network one
    way, its link to host memory one way, its share of what processors reach of that memory; microseconds the host takes
    to launch a kernel (0: no queue, it is part of every operation).
    """

    name: str
    tflops: float
    matmul_tflops: float
    attention_tflops: float
    float32_tflops: float
    memory_gb_s: float
    link_gb_s: float
    network_gb_s: float
    host_link_gb_s: float
    host_memory_gb_s: float
    memory_gib: float
    launch_us: float = 6.0
    is_queued: bool = True

    def rate(self, kind: str) -> float:
        """Floating-point operations a second."""
        known = {MATMUL: self.matmul_tflops, MATMUL_FP32: self.float32_tflops, ATTENTION: self.attention_tflops}
        return known.get(kind, inf) * 1e12

    def seconds(self, operation: DeviceOperation) -> float:
        """Of one operation, without its launch where that is queued."""
        if operation.kind in COLLECTIVES:
            between = min(self.link_gb_s, operation.ranks_on_machine * self.network_gb_s)
            return operation.size_bytes / 1e9 / (between if operation.ranks_on_machine else self.link_gb_s)
        if operation.kind in COPIES:
            return operation.size_bytes / 1e9 / self.host_link_gb_s
        if operation.kind == ON_HOST:
            return operation.size_bytes / 1e9 / self.host_memory_gb_s
        device_s = max(operation.flops / self.rate(operation.kind), operation.size_bytes / 1e9 / self.memory_gb_s)
        return device_s + (0.0 if self.is_queued else self.launch_us / 1e6)


_SHEETS = {
    "A100": (271.2, 195, 19.5, 2039, 300, 25, 32, 51.2, 80),
    "H100": (794.5, 346, 67, 3350, 450, 50, 64, 76.8, 79.11),
    "H200": (794.5, 346, 67, 4800, 450, 50, 64, 76.8, 141 * 1e9 / 2**30),
    "B200": (1745, 787, 75, 7700, 900, 50, 64, 89.6, 180 * 1e9 / 2**30),
}
"""The numbers of a `Card` behind its peak."""
_SHARES = (1, 1, 1, 0.9, 0.8, 0.8, 0.8, 0.8, 1)
"""Estimates: how much of the data sheets' bandwidths a kernel over large tensors reaches; NCCL, copies, hosts."""
CARDS = {name: Card(name, PEAK_TFLOPS[name], *map(mul, _SHARES, sheet)) for name, sheet in _SHEETS.items()}
"""SXM cards on boards of eight; what MFU is a share of stands in `PEAK_TFLOPS`. Data sheets: NVIDIA's of A100 80 GB,
H100, H200 and DGX B200 (dense; links in one direction; one network adapter a card, of 200 Gb/s with an A100, else 400;
PCIe 4 with an A100, else 5, of 16 lanes). Host memory is an eighth of that of two processors with eight channels each,
as in NVIDIA's DGX: DDR4-3200 (A100), DDR5-4800 (H100, H200), DDR5-5600 (B200). Products: the largest rates that others
measured (github.com/stas00/ml-engineering, compute/accelerator). Attention is FlashAttention 2's: 50 to 73 % of an A100
(arXiv 2307.08691; here 62.5 %) and 35 % of an H100 (arXiv 2407.08608), taken for those after it too. An H100's
memory is what torch finds of its 80 GB (github.com/vllm-project/vllm/issues/27508).
"""


DEFAULT_CARD = "H100"


def find_card(words: str) -> Card:
    """`H100`, or `H100,link_gb_s=20`: a known card, with any number replaced. Raises `ConfigError`."""
    name, *changes = words.split(",")
    if name not in CARDS:
        raise ConfigError(
            f"--card {name}: known are {', '.join(CARDS)}; any number of one can be replaced: H100,link_gb_s=20"
        )
    numbers = {field.name for field in fields(Card) if field.type in (float, "float")}
    found: dict[str, float] = {}
    for change in changes:
        key, _, value = change.partition("=")
        try:
            found[key] = float(value)
        except ValueError:
            found[key] = -1.0
        if key not in numbers or not found[key] > 0:
            raise ConfigError(
                f"--card {words}: {change!r} is not NUMBER=positive value; numbers are {', '.join(sorted(numbers))}"
            )
    return replace(CARDS[name], **found)  # type: ignore[arg-type]  # only its numbers


def local_card() -> Card | None:
    """That of this machine, or the default where there is none; None for a card that is not in the table."""
    import torch

    return card_called(torch.cuda.get_device_name()) if torch.cuda.is_available() else CARDS[DEFAULT_CARD]


def card_called(device_name: str) -> Card | None:
    """By torch's name of the device; None for one that is not in the table."""
    return CARDS.get(known_as(device_name) or "")


@dataclass(frozen=True)
class Prediction:
    """Seconds of a step by place, (part of the step, operation), together the whole."""

    places: dict[tuple[str, str], float]

    @property
    def step_s(self) -> float:
        return sum(self.places.values())

    def costliest(self, number: int = 5) -> list[tuple[str, float]]:
        ordered = sorted(self.places.items(), key=lambda item: -item[1])
        return [(f"{part}: {name}", seconds) for (part, name), seconds in ordered[:number]]


def predict(counts: Counter[DeviceOperation], card: Card, *, num_micro_batches: int) -> Prediction:
    """`counts` are those of a step of one or two micro-batches; the second stands for all later ones."""
    places: dict[tuple[str, str], float] = defaultdict(float)
    lanes: dict[tuple[int | str, ...], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    held_up = {operation.phase for operation in counts if operation.kind == AWAITED}
    for operation, number in counts.items():
        times, kind = number * repeats(operation, num_micro_batches), operation.kind
        lane, seconds = lanes[operation.phase], times * card.seconds(operation)
        if kind in (FROM_HOST, TO_HOST):
            lane[kind] += seconds
        elif kind in COLLECTIVES - {ALL_TO_ALL} and not (kind == REDUCE and operation.phase in held_up):
            lane[EXCHANGE] += seconds
        else:
            places[operation.part, operation.name] += seconds
            lane[DEVICE] += seconds
            lane[LAUNCH] += times * card.launch_us / 1e6 * card.is_queued
    for phase, lane in lanes.items():
        part, passed_s = str(phase[1]), lane[DEVICE]
        for name in (LAUNCH, EXCHANGE, FROM_HOST, TO_HOST):
            is_alone = part in ALONE and name != LAUNCH
            more_s = lane[name] if is_alone else max(0.0, lane[name] - passed_s)
            places[part, name] += more_s
            passed_s += more_s
    return Prediction(places)


def repeats(operation: DeviceOperation, num_micro_batches: int) -> int:
    """In a step of so many micro-batches. Replicas add up their gradients once."""
    is_later = operation.phase[:1] == (1,) and operation.kind != ALL_REDUCE
    return num_micro_batches - 1 if is_later else 1
