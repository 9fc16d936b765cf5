"""Whether a run fits, before anything is rented: `python -m trainer.cli.plan [N] [key=value ...]` (floor 5).

Needs config.json of the model, no weights, no GPU and no data. Exit codes: 0 fits, 1 does not, 2 wrong usage or
configuration. torch is imported only once the configuration is known to be right.
"""

import sys
from collections.abc import Callable, Iterator

from trainer.cli.arguments import Parser, answer
from trainer.config import QUICKSTART, Config, ConfigError
from trainer.launch.ranks import choose_num_ranks, count_gpus, parse_arguments
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
from trainer.run.compose import load_config

EXIT_FITS, EXIT_DOES_NOT_FIT = 0, 1
NAME_WIDTH = 44


def main(argv: list[str]) -> int:
    return answer(lambda: _plan(argv))


def _plan(argv: list[str]) -> int:
    words, memory_gib = _parse(argv)
    asked = parse_arguments(words)
    config = load_config(asked.overrides)
    if config.model.partial_pretrain != QUICKSTART:
        find_architecture(config.model.partial_pretrain)
    num_gpus = 0 if config.trainer.device == "cpu" else count_gpus()
    num_ranks = asked.num_ranks or choose_num_ranks(None, num_gpus=num_gpus)
    memory_gib = memory_gib or default_memory_gib(config, num_ranks)
    forecast = forecaster(asked.overrides, memory_gib)
    found = forecast(Change(num_ranks))
    print("\n".join(table(found, config)))
    if found.fits:
        print(f"fits: {found.needed_gib:.1f} of {memory_gib:.1f} GiB")
        return EXIT_FITS
    change = smallest_change(config, found.plan, forecast)
    print(f"does not fit: {found.needed_gib:.1f} of {memory_gib:.1f} GiB; {_advice(change, num_ranks, forecast)}")
    return EXIT_DOES_NOT_FIT


def _parse(argv: list[str]) -> tuple[list[str], float | None]:
    """(N and overrides, `--memory-gib`). Raises `ConfigError`."""
    parser = Parser(
        prog="python -m trainer.cli.plan",
        usage="%(prog)s [N] [key=value ...] [--memory-gib X]",
        description="Predict the peak memory of each rank, and name the smallest change that fits.",
        allow_abbrev=False,
    )
    about = "N: ranks on all machines together (default: the number of GPUs, else 2); then any key of conf/sft.yaml"
    parser.add_argument("words", nargs="*", metavar="N, key=value", help=about)
    about = f"memory of one GPU in GiB (default: that of the local GPU, else {DEFAULT_GPU_GIB:.0f}); with "
    about += "trainer.device=cpu a rank's share of this machine's"
    parser.add_argument("--memory-gib", type=float, metavar="X", help=about)
    known = parser.parse_intermixed_args(argv)
    if known.memory_gib is not None and not known.memory_gib > 0:
        raise ConfigError(f"--memory-gib must be positive, got {known.memory_gib}")
    return known.words, known.memory_gib


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
    )
    columns = ("GPU", "host") if is_cuda else ("CPU",)
    yield f"{'GiB per rank':{NAME_WIDTH}}" + "".join(f"{column:>8}" for column in columns)
    outside = "CUDA, NCCL, gaps between blocks (estimate)" if is_cuda else "Python and its libraries (estimate)"
    device = {name: size_bytes / GIB for name, size_bytes in plan.device_bytes.items()} | {
        outside: forecast.outside_gib
    }
    host = {name: size_bytes / GIB for name, size_bytes in plan.host_bytes.items()}
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


def _advice(change: Change | None, num_ranks: int, forecast: Callable[[Change], Forecast]) -> str:
    if change is None:
        return "nor does anything tried"
    ranks = [f"on {change.num_ranks} ranks"] if change.num_ranks != num_ranks else []
    return f"this does, with {forecast(change).needed_gib:.1f} GiB: {' '.join([*ranks, *change.overrides])}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
