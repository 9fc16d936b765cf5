"""Faults put into healthy logs by a seed, and whether the report finds them: which finding, and
from which step.

python benchmarks/report_faults.py     # all families, faults and seeds, with the rates
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from report_families import FAMILIES, Curves

from trainer.tools.report.analyse import analyse
from trainer.tools.report.readers import read_run

Generator = np.random.Generator
LEAST_ONSET = 10
ONSET_SHARE = 0.02
"""An onset counts as right within this number of steps, this share of the run, or one logged point
of its metric.
"""


@dataclass(frozen=True)
class Fault:
    """`put` changes the curves of `roles` from the point `at` on. `ids`: prefixes of the findings
    that identify the fault.
    """

    name: str
    roles: str
    ids: str
    put: Callable[[Curves, int, Generator], None]
    kinds: tuple[str, ...] = ("sft",)
    places: tuple[float, float] = (0.3, 0.75)
    """Where in the run the fault may begin."""
    has_onset: bool = True
    least_points: int = 300

    @property
    def needs(self):
        return self.roles.split()


@dataclass(frozen=True)
class Outcome:
    family: str
    fault: str
    verdict: str
    is_found: bool
    is_first: bool
    """True if the first finding identifies the fault."""
    is_placed: bool | None
    """True if the first finding that identifies the fault has its onset; None if no finding
    identifies it.
    """
    told: tuple[str, ...]
    """Other findings with level warn or worse."""


def _since(curves, at):
    """Return the points since `at`, as a share of the remaining points; 0 before."""
    index = np.arange(len(curves.steps))
    return (index - at).clip(0) / max(len(index) - 1 - at, 1)


def _jitter(curves, rng, at=0):
    """Factors around 1, for the points from `at` on."""
    return np.exp(rng.normal(0, 0.04, len(curves.steps) - at))


# Each of these faults changes `curves` from the point `at` on, see `Fault.put`.


def _diverge(curves, at, rng):
    since = _since(curves, at)
    height = rng.uniform(0.8, 2.5)
    forms = (
        height * since,
        np.expm1(np.log1p(height) * np.minimum(2 * since, 1)),
        height * (since > 0),
    )
    curves.columns["loss"] *= 1 + forms[rng.integers(3)]


def _blow_up(curves, at, rng):
    """In the first points: a rate far too high."""
    width = rng.integers(2, 15)
    top = rng.uniform(1.6, 3.5) * curves.columns["loss"][:5].mean()
    up = ((np.arange(len(curves.steps)) - at) / width).clip(0, 1)
    loss = curves.columns["loss"]
    noise = loss / np.convolve(np.pad(loss, 5, mode="edge"), np.ones(11) / 11, mode="valid")
    after = np.linspace(top, rng.uniform(0.8, 1.0) * top, len(loss)) * noise
    curves.columns["loss"] = loss * (1 - up) + after * up
    curves.columns["lr"] *= 2e-3 / curves.columns["lr"].max()


def _explode(curves, at, rng):
    stop = at + rng.integers(1, 12)
    curves.scale("grad", np.exp(rng.uniform(np.log(40), np.log(500))), at, stop)


def _nan(curves, at, rng):
    for role in sorted({"loss", "grad"} & curves.columns.keys()):
        curves.columns[role][at : at + rng.integers(1, 6)] = np.nan


def _spike(curves, at, rng):
    stop = at + rng.integers(1, 4)
    height = rng.uniform(2.5, 8)
    curves.scale("loss", height, at, stop)
    curves.scale("grad", height**2, at, stop)


def _slow_down(curves, at, rng):
    factor = rng.uniform(1.8, 3)
    curves.scale("time", factor, at)
    curves.scale("tokens_per_s", factor**-1, at)


def _stall(curves, at, rng):
    later = np.arange(at, len(curves.steps))
    places = np.union1d([at], rng.choice(later, max(2, len(later) // 50), replace=False))
    saves = np.searchsorted(curves.steps, curves.evals)  # steps that may take longer are not judged
    places = np.setdiff1d(places, [*saves, *(saves + 1)])
    curves.columns["time"][places] *= rng.uniform(8, 15)


def _leak(curves, at, rng):
    growth = rng.uniform(0.15, 0.6) * curves.columns["rss"][0]
    curves.columns["rss"] += growth * _since(curves, at)


def _overfit(curves, at, rng):
    turn = curves.steps[at]
    after = ((curves.evals - turn) / (curves.evals[-1] - turn)).clip(0, 1)
    base = np.interp(np.minimum(curves.evals, turn), curves.evals, curves.columns["val_loss"])
    noise = 1 + rng.normal(0, 0.003, len(after))
    curves.columns["val_loss"] = (base + rng.uniform(0.3, 0.8) * after) * noise
    curves.columns["loss"] *= 1 - rng.uniform(0.3, 0.6) * _since(curves, at)


def _memorise(curves, at, rng):
    """The loss falls at each new epoch until the samples are known by heart."""
    epoch = (4 * _since(curves, at) + (np.arange(len(curves.steps)) >= at)).astype(int)
    curves.scale("loss", rng.uniform(0.25, 0.45) ** epoch)
    rise = 1 + 0.15 * np.interp(curves.evals, curves.steps, epoch)
    curves.scale("val_loss", rise)


def _stick(curves, at, rng):
    level = rng.uniform(1.8, 2.9)
    curves.columns["loss"] = level * _jitter(curves, rng)


def _zero_losses(curves, at, rng):
    curves.columns["loss"][at : at + rng.integers(12, 200)] = 0.0


def _vanish(curves, at, rng):
    curves.scale("grad", 10 ** rng.uniform(-5, -3), at)
    loss = curves.columns["loss"]
    loss[at:] = np.median(loss[at - 20 : at]) * _jitter(curves, rng, at)


def _raise_rate(curves, at, rng):
    stop = at + rng.integers(20, len(curves.steps))
    curves.scale("lr", rng.uniform(4, 12), at, stop)


def _collapse(role):
    """A result falls back to its start, or below, within a short time."""

    def put(curves, at, rng):
        values = curves.columns[role]
        n = len(values)
        start = int(np.searchsorted(curves.at(role), curves.steps[at]))
        since = (np.arange(n) - start).clip(0) / max(1.0, rng.uniform(0.01, 0.1) * n)
        reached = np.median(values[max(start - max(3, n // 40), 0) : start + 1])
        start_level = np.median(values[: max(3, n // 20)])
        fall = rng.uniform(0.9, 1.2) * max(reached - start_level, 0.25)
        level = np.where(np.arange(n) < start, values, reached + values - _smooth(values))
        curves.columns[role] = level - fall * np.minimum(since, 1)

    return put


def _smooth(values):
    width = max(3, len(values) // 20)
    padded = np.pad(values, (width // 2, width - 1 - width // 2), mode="edge")
    return np.convolve(padded, np.ones(width) / width, mode="valid")


def _decay_entropy(curves, at, rng):
    fall = np.log(rng.uniform(12, 50)) * np.minimum(_since(curves, at) * 2, 1)
    curves.scale("entropy", np.exp(-fall))


def _run_away(curves, at, rng):
    kl = curves.columns["kl"]
    top = rng.uniform(12, 40) / np.median(kl[at : at + 20])
    curves.columns["kl"] = kl * top ** np.minimum(_since(curves, at) * rng.uniform(1, 4), 1)


def _hit_cap(curves, at, rng):
    n = len(curves.steps) - at
    clipped = rng.uniform(0.35, 0.9, n)
    for role, values in (("clipped_ratio", clipped), ("max_length", 1024.0)):
        if role in curves.columns:
            curves.columns[role][at:] = values
    curves.scale("mean_length", rng.uniform(1.5, 2.2), at)


def _shift_length(curves, at, rng):
    factor = rng.uniform(1.5, 2) if rng.random() < 0.5 else rng.uniform(0.4, 0.6)
    for role in ("mean_length", "max_length", "min_length"):
        curves.scale(role, factor, at)


def _scatter(curves, at, rng):
    curves.scale("reward_std", rng.uniform(3, 5), at)


def _equal_rewards(curves, at, rng):
    for role in sorted({"adv_std", "reward_std"} & curves.columns.keys()):
        curves.columns[role][:] = np.abs(rng.normal(0, 1e-3, len(curves.steps)))


SFT = ("sft",)
RL = ("grpo",)
BOTH = ("sft", "grpo")
CONTROLLED = ("controller",)
FAULTS = (
    Fault("divergence", "loss", "loss_diverging", _diverge),
    Fault("rate too high from the start", "loss lr", "loss_diverging", _blow_up,
          places=(0.01, 0.04)),
    Fault("loss not a number", "loss", "loss_nonfinite", _nan, BOTH),
    Fault("spike", "loss", "loss_spike grad_high:explosion", _spike),
    Fault("throughput halves", "time", "time_growth:slowdown", _slow_down, BOTH),
    Fault("stalls", "time", "time_high:stalls", _stall, BOTH),
    Fault("leak", "rss", "memory:leak", _leak, BOTH, (0.0, 0.3), has_onset=False,
          least_points=600),
    Fault("overfitting", "val_loss", "overfit val_rising", _overfit),
    Fault("known by heart", "loss", "loss_final overfit", _memorise, SFT, (0.2, 0.3),
          has_onset=False),
    Fault("stuck loss", "loss", "loss_not_falling not_learning", _stick, places=(0.0, 0.0)),
    Fault("zero loss", "loss", "loss_zero", _zero_losses, ("sft", "controller")),
    Fault("gradient explosion", "grad", "grad_high", _explode, BOTH),
    Fault("gradient vanishes", "grad", "grad_vanish", _vanish),
    Fault("rate raised", "lr", "lr_schedule:raised", _raise_rate, BOTH),
    Fault("reward collapse", "reward", "reward_trend", _collapse("reward"), RL + CONTROLLED),
    Fault("accuracy collapse", "accuracy", "accuracy:collapse", _collapse("accuracy"), CONTROLLED),
    Fault("held-out collapse", "val_reward", "val_results", _collapse("val_reward"),
          RL + CONTROLLED),
    Fault("entropy collapse", "entropy", "entropy_collapse", _decay_entropy, RL),
    Fault("KL runs away", "kl", "kl", _run_away, RL, (0.3, 0.6)),
    Fault("length cap", "mean_length max_length", "clipped_ratio length_shift", _hit_cap, RL),
    Fault("lengths shift", "mean_length", "length_shift", _shift_length, RL),
    Fault("rewards scatter", "reward_std", "reward_trend:scatter", _scatter, RL),
    Fault("equal rewards", "adv_std", "adv_shape:std", _equal_rewards, RL, has_onset=False),
)  # fmt: skip
HEALTHY = "none"


UNUSED_NUMBER = 3
"""No family draws with this generator, so the other families keep the logs with which the committed
rates were measured.
"""


def faults_of(family):
    return tuple(
        fault
        for fault in FAULTS
        if family.kind in fault.kinds and family.keys.keys() >= set(fault.needs)
    )


def trial(family, fault, seed):
    """Inject the fault into a healthy log, write, read and judge it. Equal seeds give equal logs."""
    place = FAMILIES.index(family)
    number = place + (place >= UNUSED_NUMBER)
    rng = np.random.default_rng([seed, number, FAULTS.index(fault) if fault else len(FAULTS)])
    curves = family.healthy(rng, least_points=fault.least_points if fault else 300)
    onset = 0
    if fault is not None:
        at = int(rng.uniform(*fault.places) * len(curves.steps))
        onset = int(curves.steps[at])
        fault.put(curves, at, rng)
    with tempfile.TemporaryDirectory() as name:
        report = analyse(read_run(family.save(Path(name) / "run", curves)))
    serious = [finding for finding in report.findings if finding.level in ("warn", "fail")]
    ids = tuple(fault.ids.split()) if fault else ()
    named = [finding for finding in serious if finding.id.startswith(ids)]
    is_placed = None
    if fault is not None and fault.has_onset:
        interval = int(np.median(np.diff(curves.at(fault.needs[0]))))
        tolerance = max(LEAST_ONSET, round(ONSET_SHARE * int(curves.steps[-1])), interval)
        is_placed = bool(named) and abs(named[0].begin - onset) <= tolerance
    return Outcome(
        family=family.name,
        fault=fault.name if fault else HEALTHY,
        verdict=report.verdict,
        is_found=bool(named),
        is_first=bool(report.top) and report.top[0] in named,
        is_placed=is_placed,
        told=tuple(finding.id for finding in serious if finding not in named),
    )
