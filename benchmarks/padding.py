"""What do uneven lengths cost? Samples of 20 to 2,000 tokens against their tokens in equal lengths,
B against 2B.

    python benchmarks/padding.py --ranks 1 2 --rounds 5

The 5.4 M parameter model trains batches of random ids: B uneven samples, 2B (these and as many
more), and both again with their tokens in equal lengths. The four take turns, step by step, in one
process per rank of one thread. A sample of n tokens costs n + c n^2 by the model's shapes
(`trainer.model.flops`): what time does not follow from it is the price of unevenness, in padding or
in ranks that wait.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import numpy as np
import torch
from case import MODEL_CONFIG, SEED
from measuring import header, middle, table, write_result
from ranks import run_ranks
from toy import build_toy_model, toy_run, write_model_config

from trainer.batch import StepBatch
from trainer.data.batch_plan import Limits, split_batch
from trainer.data.loader import RankPlan, build_step
from trainer.loop.fit import fit
from trainer.model import flops
from trainer.model.packed_lm import ModelSource
from trainer.runtime.distributed import World, compute_dtype
from trainer.runtime.environment import keep_freed_memory

SHORTEST, LONGEST = 20, 2000
MAX_TOKENS = 8192
WARM_UP = 1
KINDS = ("uneven B", "uneven 2B", "equal B", "equal 2B")


class RandomSamples:
    """Random ids in samples of the given lengths, their second half supervised."""

    def __init__(self, lengths: np.ndarray) -> None:
        self.lengths = lengths
        self.num_loss_tokens = lengths - lengths // 2

    def sample(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        generator, length = np.random.default_rng((SEED, index)), self.lengths[index]
        ids = generator.integers(0, MODEL_CONFIG["vocab_size"], length).astype(np.int32)
        return ids, np.arange(length) >= length // 2


def draw(batch_size: int, rounds: int) -> list[np.ndarray]:
    """Lengths of the batches of each round, in the order of `KINDS`."""
    generator = np.random.default_rng(SEED)
    batches = []
    for _ in range(rounds):
        double = generator.integers(SHORTEST, LONGEST + 1, 2 * batch_size)
        uneven = [double[:batch_size], double]
        batches += [*uneven, *(evened(lengths) for lengths in uneven)]
    return batches


def evened(lengths: np.ndarray) -> np.ndarray:
    """As many samples with as many tokens, none longer than another by more than one."""
    share, left = divmod(int(lengths.sum()), len(lengths))
    return np.full(len(lengths), share) + (np.arange(len(lengths)) < left)


class Turns:
    """The batches of all kinds in turn; every second round backwards, so that no kind always
    follows the same one.
    """

    def __init__(self, world: World, lengths: list[np.ndarray], quadratic_cost: float) -> None:
        self._samples = RandomSamples(np.concatenate(lengths))
        self._ids = np.split(
            np.arange(sum(map(len, lengths))), np.cumsum([len(batch) for batch in lengths])[:-1]
        )
        self._plan = RankPlan(
            world.data_rank, world.num_data_ranks, Limits(MAX_TOKENS, None), quadratic_cost
        )
        rounds = np.arange(len(lengths)).reshape(-1, len(KINDS))
        rounds[1::2] = rounds[1::2, ::-1]
        self.order = [int(batch) for batch in rounds.ravel()]
        self.step = 0

    def __iter__(self) -> Iterator[StepBatch]:
        for step, batch in enumerate(self.order, start=1):
            yield build_step(self._samples, self._ids[batch], self._plan, step=step, epoch=0)


def train(
    world: World, source: ModelSource, lengths: list[np.ndarray], dtype: str
) -> list[dict[str, Any]]:
    """Seconds, tokens and cost of every batch, in the order in which they were drawn."""
    keep_freed_memory()
    model = build_toy_model(world, source, param_dtype=dtype)
    quadratic_cost = flops.length_costs(model)[0]
    batches = Turns(world, lengths, quadratic_cost)
    parts: Any = toy_run(
        world, model, RandomSamples(lengths[0]), total_steps=len(batches.order), batches=batches
    )
    fit(parts)
    rows = dict(zip(batches.order, parts.tracking.rows, strict=True))
    return [
        {"seconds": rows[index][1]["train/time(s)"], **shape(batch, world.size, quadratic_cost)}
        for index, batch in enumerate(lengths)
    ]


def shape(lengths: np.ndarray, num_ranks: int, quadratic_cost: float) -> dict[str, float]:
    """What a batch costs by the model's shapes, and how it is dealt to ranks."""
    costs = lengths + quadratic_cost * lengths.astype(np.float64) ** 2
    dealt = split_batch(
        lengths,
        num_data_ranks=num_ranks,
        limits=Limits(MAX_TOKENS, None),
        quadratic_cost=quadratic_cost,
    )
    loads = [
        costs[[index for micro_batch in rank for index in micro_batch]].sum() for rank in dealt
    ]
    return {
        "tokens": int(lengths.sum()),
        "cost": float(costs.sum()),
        "micro_batches": len(dealt[0]),
        "largest_share": float(max(loads) / np.mean(loads)),
    }


def compared(batches: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over rounds, of each kind and of ratios taken within a round."""
    rounds = [batches[first : first + len(KINDS)] for first in range(0, len(batches), len(KINDS))]
    kinds = {
        kind: {
            "tokens_per_s": middle(
                found[index]["tokens"] / found[index]["seconds"] for found in rounds
            ),
            **{
                key: statistics.median(found[index][key] for found in rounds)
                for key in ("seconds", "tokens", "micro_batches", "largest_share")
            },
        }
        for index, kind in enumerate(KINDS)
    }

    def ratio(key: str, over: int, under: int) -> list[float]:
        return [found[over][key] / found[under][key] for found in rounds]

    def relative(key: str, over: int, under: int) -> dict[str, float]:
        """Ratio of seconds over the ratio of what they should follow."""
        pairs = zip(ratio("seconds", over, under), ratio(key, over, under), strict=True)
        return middle(seconds / expected for seconds, expected in pairs)

    return {
        "kinds": kinds,
        "2B over B: seconds": middle(ratio("seconds", 1, 0)),
        "2B over B: tokens": middle(ratio("tokens", 1, 0)),
        "2B over B: seconds per token": relative("tokens", 1, 0),
        "uneven over equal: seconds per token": relative("tokens", 1, 3),
        "uneven over equal: cost by shapes": middle(ratio("cost", 1, 3)),
        "uneven over equal: seconds per cost": relative("cost", 1, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--batch", type=int, default=16, help="B")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--dtype", default="auto", help="auto: bfloat16 where the CPU multiplies it"
    )
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    lengths = draw(arguments.batch, WARM_UP + arguments.rounds)
    found = {}
    with tempfile.TemporaryDirectory() as directory:
        settings = {
            key: value
            for key, value in MODEL_CONFIG.items()
            if key not in ("model_type", "architectures")
        }
        source = write_model_config(Path(directory), **settings | {"head_dim": 64})
        for num_ranks in arguments.ranks:
            batches = run_ranks(
                train, num_ranks, source, lengths, arguments.dtype, timeout_s=400.0
            )[0]
            found[str(num_ranks)] = compared(batches[WARM_UP * len(KINDS) :])
            print(json.dumps({num_ranks: found[str(num_ranks)]}), flush=True)
    dtype = compute_dtype(arguments.dtype, torch.device("cpu"))
    print_tables(found)
    write_result(
        "padding",
        {**header(), "dtype": str(dtype).removeprefix("torch."), "ranks": found},
        arguments.output,
    )


def print_tables(found: dict[str, dict[str, Any]]) -> None:
    def cells(row: dict[str, Any]) -> list[str]:
        values = (
            row["seconds"],
            row["tokens_per_s"]["median"],
            row["tokens"],
            row["micro_batches"],
        )
        return [*(f"{value:.4g}" for value in values), f"{row['largest_share']:.3f}"]

    rows = [
        [ranks, kind, *cells(row)]
        for ranks, result in found.items()
        for kind, row in result["kinds"].items()
    ]
    print(
        table(
            [
                "ranks",
                "batch",
                "s per step",
                "tokens/s",
                "tokens",
                "micro-batches",
                "largest share",
            ],
            rows,
        )
    )
    names = [name for name in next(iter(found.values())) if name != "kinds"]
    print(
        table(
            ["ranks", *names],
            ([n, *(f"{r[name]['median']:.3f}" for name in names)] for n, r in found.items()),
        )
    )


if __name__ == "__main__":
    main()
