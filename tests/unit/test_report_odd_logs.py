"""No log can crash the analysis: gaps, single points, infinities, keys of every framework at once."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from report_curves import OUR_CONFIG, SWIFT_CONFIG, checkpoints, sft_run
from sweeps import short_or_full

from trainer.cli.report import EXIT_CODES, PROFILES
from trainer.tools.report.analyse import analyse
from trainer.tools.report.result import LEVELS
from trainer.tools.report.run_log import LogEvent, RunLog, Series
from trainer.tools.report.vocabulary import ROLES

KEYS = sorted(
    {key for keys in ROLES.values() for key in keys}
    | {"odd <key>", "val/accuracy", "time/train/update_s"}
)
SOURCES = ("fsdp-sft", "ms-swift", "transformers", "verl", "csv", "jsonl")


def odd_series(rng):
    """Up to 300 points of any kind, of which up to a fifth are not finite."""
    n = int(rng.choice([0, 1, 2, 3, 9, 30, 120, 300]))
    steps = np.cumsum(rng.integers(1, 5, n)).astype(np.int64)
    noise = rng.normal(0, 1, n)
    kinds = (noise, np.exp(3 * noise), 0 * noise, 0 * noise + 1e300, np.sign(noise), 1 / noise)
    values = kinds[int(rng.integers(len(kinds)))]
    values[rng.random(n) < rng.choice([0, 0, 0.2, 1.0])] = rng.choice([np.nan, np.inf, -np.inf])
    return Series(steps, values)


def odd_log(seed):
    rng = np.random.default_rng(seed)
    chosen = rng.choice(KEYS, size=int(rng.integers(0, len(KEYS))), replace=False)
    config = [
        {},
        OUR_CONFIG,
        SWIFT_CONFIG,
        {"max_grad_norm": "none", "learning_rate": None, "warmup_ratio": "0.1"},
    ]
    return RunLog(
        path=Path("odd"),
        source=str(rng.choice(SOURCES)),
        series={str(key): odd_series(rng) for key in chosen},
        num_rows=300,
        config=config[int(rng.integers(len(config)))],
        events=(LogEvent(3, "error", "CUDA out of memory", "error"),) if rng.random() < 0.3 else (),
        checkpoints=checkpoints([1, 50]) if rng.random() < 0.3 else (),
        total_steps=int(rng.integers(1, 900)) if rng.random() < 0.5 else None,
        exit_code=int(rng.integers(0, 77)) if rng.random() < 0.5 else None,
    )


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("seed", short_or_full([8, 98, *range(0, 150, 5)], full=range(150)))
def test_an_odd_log_gets_a_report_under_any_profile(seed):
    log = odd_log(seed)
    for profile in ("auto", PROFILES[seed % 7 % len(PROFILES)]):
        check(analyse(log, profile=profile), seed)


def check(report, seed):
    assert report.verdict in EXIT_CODES and report.headline and report.closing, seed
    assert len(report.checklist) == 12
    ids = [finding.id for finding in report.findings]
    assert len(ids) == len(set(ids)), (seed, ids)
    ranks = [LEVELS.index(finding.level) for finding in report.findings]
    assert ranks == sorted(ranks)


@pytest.mark.parametrize(
    "facts",
    [
        {"span_s": math.nan},
        {"config": {"warmup_steps": "auto"}},
        {"config": {"warmup_ratio": "auto"}},
        {"config": {"save_steps": math.inf}},
    ],
    ids=str,
)
def test_facts_that_are_no_numbers_are_left_out(facts):
    report = analyse(replace(sft_run(0), **facts))
    assert report.verdict == "OK" and "time span" not in report.facts


@pytest.mark.parametrize("seed", [0, 5, 8])
def test_a_long_log_of_noise_alone_is_judged(seed):
    """The rises of this log end before the onset that was searched for."""
    num_steps = 40_000
    losses = Series(
        np.arange(1, num_steps + 1), abs(np.random.default_rng(seed).normal(2, 1, num_steps))
    )
    report = analyse(RunLog(Path("run"), "jsonl", {"train/loss": losses}, num_steps), profile="sft")
    assert report.verdict in EXIT_CODES
