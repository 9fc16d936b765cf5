"""No log may bring the analysis down: holes, single points, infinities, keys of every framework
at once.
"""

from pathlib import Path

import numpy as np
import pytest
from report_curves import OUR_CONFIG, SWIFT_CONFIG, checkpoints
from sweeps import short_or_full

from trainer.cli.report import EXIT_CODES, PROFILES
from trainer.tools.report.analyse import analyse
from trainer.tools.report.result import LEVELS, Report
from trainer.tools.report.run_log import LogEvent, RunLog, Series
from trainer.tools.report.vocabulary import ROLES

KEYS = sorted(
    {key for keys in ROLES.values() for key in keys}
    | {"odd <key>", "val/accuracy", "time/train/update_s"}
)
SOURCES = ("fsdp-sft", "ms-swift", "transformers", "verl", "csv", "jsonl")


def odd_series(rng: np.random.Generator) -> Series:
    """Up to 300 points of any kind; up to a fifth of them not numbers."""
    n = int(rng.choice([0, 1, 2, 3, 9, 30, 120, 300]))
    steps = np.cumsum(rng.integers(1, 5, n)).astype(np.int64)
    kinds = (
        lambda: rng.normal(0, 1, n),
        lambda: np.exp(rng.normal(0, 3, n)),
        lambda: np.zeros(n),
        lambda: np.full(n, 1e300),
        lambda: rng.integers(0, 2, n).astype(np.float64),
        lambda: rng.standard_cauchy(n),
    )
    values = kinds[int(rng.integers(len(kinds)))]()
    values[rng.random(n) < rng.choice([0, 0, 0.2, 1.0])] = rng.choice([np.nan, np.inf, -np.inf])
    return Series(steps, values)


def odd_log(seed: int) -> RunLog:
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
@pytest.mark.parametrize("seed", short_or_full(range(0, 150, 5), full=range(150)))
def test_an_odd_log_gets_a_report_under_every_profile(seed):
    log = odd_log(seed)
    for profile in PROFILES if seed % 10 == 0 else ("auto",):
        report = analyse(log, profile=profile)
        check(report, seed)


def check(report: Report, seed: int) -> None:
    assert report.verdict in EXIT_CODES and report.headline and report.closing, seed
    assert len(report.checklist) == 12
    ids = [finding.id for finding in report.findings]
    assert len(ids) == len(set(ids)), (seed, ids)
    assert [f.level for f in report.findings] == sorted(
        (f.level for f in report.findings), key=LEVELS.index
    )
    for finding in report.findings:
        assert finding.value is None or isinstance(finding.value, float), (seed, finding)
        assert finding.steps is None or all(type(step) is int for step in finding.steps), (
            seed,
            finding,
        )


@pytest.mark.parametrize("seed", [0, 5, 8])
def test_a_long_log_of_noise_alone_is_judged(seed):
    """Its rises end before the onset that was looked for."""
    num_steps = 40_000
    losses = Series(
        np.arange(1, num_steps + 1), abs(np.random.default_rng(seed).normal(2, 1, num_steps))
    )
    report = analyse(RunLog(Path("run"), "jsonl", {"train/loss": losses}, num_steps), profile="sft")
    assert report.verdict in EXIT_CODES
