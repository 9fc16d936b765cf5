"""Whether a run fits and what it takes, before anything is rented: `bash run_sft.sh plan [N] [key=value ...]`.

Floor 5. Needs config.json of the model, no weights, no GPU and no data. Exit codes: 0 fits, 1 does not, 2 wrong usage
or configuration. torch is imported only once the configuration is known to be right.
"""

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from trainer.checkpoint.retention import KEEP_LESS, SPARE
from trainer.cli.arguments import Parser, add_words, as_command, read_words
from trainer.config import MAX_TOKENS, QUICKSTART, Config, ConfigError
from trainer.launch.ranks import Arguments, choose_num_ranks, count_gpus
from trainer.model.source import find_architecture
from trainer.planner.forecast import (
    DEFAULT_GPU_GIB,
    GIB,
    Change,
    Forecast,
    default_memory_gib,
    forecaster,
    smallest_change,
)
from trainer.planner.roofline import CARDS, DEFAULT_CARD, Card, find_card, local_card, predict
from trainer.run.compose import with_words
from trainer.runtime.text import readable

if TYPE_CHECKING:
    from trainer.planner.disk import DiskPlan
    from trainer.planner.memory_plan import MemoryPlan

EXIT_FITS, EXIT_DOES_NOT_FIT = 0, 1
NAME_WIDTH = 44


@as_command()
def main(argv: list[str]) -> int:
    options, asked, config = _parse(argv)
    if config.model.partial_pretrain != QUICKSTART:
        find_architecture(config.model.partial_pretrain)
    num_gpus = 0 if config.trainer.device == "cpu" else count_gpus()
    num_ranks = asked.num_ranks or choose_num_ranks(None, num_gpus=num_gpus)
    is_cuda = config.trainer.device != "cpu"
    card = find_card(options.card) if options.card else local_card() if is_cuda else None
    memory_gib = options.memory_gib or (
        card.memory_gib if options.card and card else default_memory_gib(config, num_ranks)
    )
    forecast = forecaster(config, memory_gib)
    if config.automatic:
        from trainer.planner.choose import best, candidate_lines, search

        rates = card or CARDS[DEFAULT_CARD] if is_cuda else None
        tried = search(config, num_ranks, rates, forecast)
        print("\n".join(candidate_lines(tried, rates)))
        config, found = with_words(config, best(tried).change.overrides), best(tried).forecast
        forecast = forecaster(config, memory_gib)
    else:
        found = forecast(Change(num_ranks))
    from trainer.planner.disk import plan_disk

    print("\n".join([*table(found, config), *disk_lines(plan_disk(config, found.plan), config)]))
    if card is not None and is_cuda:
        print("\n".join(time_lines(found.plan, card, config, options.price_per_gpu_hour)))
    if found.fits:
        print(f"fits: {found.needed_gib:.1f} of {memory_gib:.1f} GiB")
        return EXIT_FITS
    change = smallest_change(config, found.plan, forecast)
    print(f"does not fit: {found.needed_gib:.1f} of {memory_gib:.1f} GiB; {_advice(change, num_ranks, forecast)}")
    return EXIT_DOES_NOT_FIT


def _parse(argv: list[str]) -> tuple[Namespace, Arguments, Config]:
    """The options, what is to be started, its configuration. Raises `ConfigError`."""
    parser = Parser(
        "plan",
        usage="%(prog)s [N] [key=value ...] [--memory-gib X] [--card NAME] [--price-per-gpu-hour X]",
        description="Predict memory, disk and time of a run, and name the smallest change that fits.",
    )
    add_words(parser, ranks="ranks on all machines together")
    about = f"memory of one GPU in GiB (default: that of the local GPU, else {DEFAULT_GPU_GIB:.0f}); with "
    about += "trainer.device=cpu a rank's share of this machine's, if all were on it"
    parser.add_argument("--memory-gib", type=float, metavar="X", help=about)
    about = (
        f"predict for this card ({', '.join(CARDS)}; default: the local GPU, else {DEFAULT_CARD}); any number of it "
    )
    about += "can be replaced: H100,link_gb_s=20"
    parser.add_argument("--card", metavar="NAME", help=about)
    parser.add_argument("--price-per-gpu-hour", type=float, metavar="X", help="for the cost of the run")
    known = parser.parse_intermixed_args(argv)
    for name in ("memory_gib", "price_per_gpu_hour"):
        if (value := getattr(known, name)) is not None and not value > 0:
            raise ConfigError(f"--{name.replace('_', '-')} must be positive, got {value}")
    return known, *read_words(parser, known.words)


def table(forecast: Forecast, config: Config) -> Iterator[str]:
    """Bytes of one rank in GiB: the device's column, and the host's where that is other memory."""
    plan, is_cuda = forecast.plan, forecast.is_cuda
    measured = " and ".join(map(str, plan.num_measured_layers))
    trained = f", {plan.num_trained / 1e9:.3g} B trained" if plan.num_trained < plan.num_parameters else ""
    yield (
        f"{config.model.partial_pretrain}: {plan.num_parameters / 1e9:.3g} B parameters{trained}, {plan.num_layers} "
        f"layers (a step measured on {measured}), {plan.num_ranks} ranks"
    )
    load = plan.workload
    yield (
        f"micro-batch: up to {load.num_tokens:,} tokens, {len(load.seqlens)} documents of up to {max(load.seqlens):,}; "
        f"{load.num_micro_batches} a step at most"
    )
    yield (
        f"a rank receives {plan.gathered_bytes / GIB:.2f} GiB of parameters a step and sends "
        f"{plan.reduced_bytes / GIB:.2f} GiB of gradients"
        + (f", and {plan.heads_bytes / GIB:.2f} GiB of attention heads" if plan.heads_bytes else "")
    )
    copied_bytes, awaited_bytes = plan.copied_bytes
    if copied_bytes:
        waits = f", and waits for {awaited_bytes / GIB:.2f} GiB of them: fewer and longer micro-batches cost less "
        yield (
            f"a rank copies {copied_bytes / GIB:.2f} GiB to and from host memory a step"
            + (f"{waits}({MAX_TOKENS})" if awaited_bytes else "")
        )
    columns = ("GPU", "host") if is_cuda else ("CPU",)
    yield f"{'GiB per rank':{NAME_WIDTH}}" + "".join(f"{column:>8}" for column in columns)
    outside = "CUDA, NCCL, gaps between blocks (estimate)" if is_cuda else "Python and its libraries (estimate)"
    device = {name: num_bytes / GIB for name, num_bytes in plan.device_bytes.items()} | {outside: forecast.outside_gib}
    host = {name: num_bytes / GIB for name, num_bytes in plan.host_bytes.items()}
    if not is_cuda:
        device, host = device | host, {}
    for name in device | host:
        cells = [f"{held[name]:8.2f}" if name in held else " " * 8 for held in (device, host)]
        yield f"{name:{NAME_WIDTH}}{''.join(cells)}".rstrip()
    sums = [f"{sum(held.values()):8.2f}" for held in (device, host)[: len(columns)]]
    yield f"{'together':{NAME_WIDTH}}{''.join(sums)}"
    if is_cuda:
        num_ranks = forecast.num_ranks_per_machine
        yield f"host memory on a machine with {num_ranks} of these ranks: {num_ranks * forecast.host_gib:.2f} GiB"


def disk_lines(disk: "DiskPlan", config: Config) -> Iterator[str]:
    number, place = disk.num_checkpoints, config.trainer.default_local_dir
    kept = "all are kept" if number is None else f"{number} at most, with the one being written"
    tokens = "" if disk.token_bytes is None else f"; prepared tokens {readable(disk.token_bytes)} (estimate)"
    full = "" if disk.keep_full is None else f", the newest {disk.keep_full} of them with the optimizer's state"
    whole, exported, optimizer = map(readable, (disk.checkpoint_bytes, disk.export_bytes, disk.optimizer_bytes))
    parts = f"{exported} of it huggingface/, {optimizer} the optimizer's state"
    yield f"disk: a checkpoint takes {whole}, {parts}; {kept}{full}{tokens}"
    needed_bytes = disk.bytes_to_come(0)  # prepared tokens may lie on another disk
    if disk.free_bytes < needed_bytes * SPARE:
        yield (
            f"WARNING: {readable(needed_bytes)} are needed and {readable(disk.free_bytes)} free here for {place}: "
            f"free some space, or {KEEP_LESS}"
        )


def time_lines(plan: "MemoryPlan", card: "Card", config: Config, price: float | None) -> Iterator[str]:
    """All of it predicted from data sheets: what such cards reach at best."""
    sharing = config.model.ulysses_sequence_parallel_size  # ranks of one micro-batch
    number, num_ranks, flops = plan.workload.num_micro_batches, plan.num_ranks, plan.needed_flops
    predicted = predict(plan.operations, card, num_micro_batches=number)
    step_s, tokens = predicted.step_s, plan.workload.num_tokens * number * num_ranks // sharing
    share = "" if flops is None else f", MFU {flops * number / sharing / step_s / card.tflops / 1e12:.1%}"
    yield (
        f"predicted for {card.name}, not measured: {step_s:.3g} s a step of {tokens:,} tokens, "
        f"{tokens / step_s:,.0f} tokens/s{share}"
    )
    for name, seconds in predicted.costliest():
        yield f"{seconds / step_s:7.1%}  {name}"
    num_steps = config.trainer.total_training_steps
    what = "a billion tokens" if num_steps is None else f"{num_steps:,} steps"
    hours = (1e9 / tokens if num_steps is None else num_steps) * step_s / 3600
    cost = "" if price is None else f", cost {hours * num_ranks * price:,.2f}"
    yield f"{what}: {hours:,.2f} hours, {hours * num_ranks:,.1f} GPU hours{cost}, without validation and saves"


def _advice(change: Change | None, num_ranks: int, forecast: Callable[[Change], Forecast]) -> str:
    if change is None:
        return "nor does anything tried"
    ranks = [f"on {change.num_ranks} ranks"] if change.num_ranks != num_ranks else []
    return f"this does, with {forecast(change).needed_gib:.1f} GiB: {' '.join([*ranks, *change.overrides])}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
