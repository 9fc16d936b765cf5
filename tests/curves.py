"""Loss and gradient curves from a seed, healthy and faulty, whose truth is known. numpy only.

`TUNED` families were used to develop the rules; `HELD_OUT` ones must only ever be measured.
"""

from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]
NUM_STEPS = 3000


@dataclass(frozen=True)
class Curve:
    """Loss (nats) and gradient norm of consecutive steps, from step 0."""

    loss: Values
    grad_norm: Values

    def values(self, step):
        """Return the values as a trainer passes them on."""
        return {
            "train/loss": float(self.loss[step]),
            "train/grad_norm": float(self.grad_norm[step]),
            "train/total_valid_token_count": 1000.0,
        }


def _level(num_steps, last=1.0):
    """A typical fall from 2.5."""
    return last + (2.5 - last) * np.exp(-np.arange(num_steps) / 300)


def _autoregressive(rng, num_steps, *, memory, sigma):
    noise = rng.normal(0, sigma, num_steps)
    found = np.zeros(num_steps)
    for step in range(1, num_steps):
        found[step] = memory * found[step - 1] + noise[step]
    return found


def _bimodal(rng, num_steps, share):
    factor = np.where(rng.random(num_steps) < share, 1.8, 1.0)
    return _level(num_steps) * factor * (1 + rng.normal(0, 0.05, num_steps))


def _stairs(rng, num_steps):
    epoch = np.arange(num_steps) // 600
    return 2.0 * 0.8**epoch * (1 + rng.normal(0, 0.05, num_steps))


def _memorised(rng, num_steps):
    return (0.005 + 2 * np.exp(-np.arange(num_steps) / 200)) * np.exp(rng.normal(0, 0.2, num_steps))


def _power_law(rng, num_steps):
    return 3 * (1 + np.arange(num_steps) / 50) ** -0.2 * rng.gamma(100, 1 / 100, num_steps)


def _garch(rng, num_steps):
    """Calm and noisy stretches: 6% noise on average."""
    noise = np.zeros(num_steps)
    variance = 0.004
    for step in range(num_steps):
        noise[step] = rng.normal(0, variance**0.5)
        variance = 0.0002 + 0.10 * noise[step] ** 2 + 0.85 * variance
    return _level(num_steps) * np.exp(noise)


def _restarts(rng, num_steps):
    """The learning rate restarts every 600 steps, and the loss rises by 8 % with it."""
    ripple = 1 + 0.04 * (1 + np.cos(np.pi * (np.arange(num_steps) % 600) / 600))
    return _level(num_steps) * ripple * (1 + rng.normal(0, 0.06, num_steps))


def _five_sources(rng, num_steps):
    """Batches of 32 samples, drawn from five sources with different losses."""
    levels = np.array([0.4, 0.8, 1.0, 1.4, 2.2])
    counts = rng.multinomial(32, [0.3, 0.25, 0.25, 0.15, 0.05], num_steps)
    noise = np.exp(rng.normal(0, 0.05, num_steps))
    return _level(num_steps) * (counts @ levels) / 32 * noise


def _wander(rng, num_steps):
    """The level falls with a slow random walk."""
    walk = np.cumsum(rng.normal(-0.0002, 0.002, num_steps))
    return 2.0 * np.exp(walk) * (1 + rng.normal(0, 0.05, num_steps))


LOSSES = {
    "gauss": lambda rng, n: _level(n) * (1 + rng.normal(0, 0.05, n)),
    "student": lambda rng, n: _level(n) * np.maximum(1 + 0.07 * rng.standard_t(4, n), 0.2),
    "lognormal": lambda rng, n: _level(n) * np.exp(rng.normal(0, 0.25, n)),
    "stairs": _stairs,
    "bimodal10": lambda rng, n: _bimodal(rng, n, 0.10),
    "bimodal2": lambda rng, n: _bimodal(rng, n, 0.02),
    "memorised": _memorised,
    "autoregressive": lambda rng, n: (
        _level(n) * np.exp(_autoregressive(rng, n, memory=0.9, sigma=0.03))
    ),
    # the held-out families
    "power_law": _power_law,
    "garch": _garch,
    "restarts": _restarts,
    "five_sources": _five_sources,
    "wander": _wander,
}
GRADS = {
    "normal": lambda rng, n: 2 * np.exp(rng.normal(0, 0.3, n)),
    "heavy": lambda rng, n: 2 * np.exp(0.3 * rng.standard_t(5, n) / (5 / 3) ** 0.5),
    "gamma": lambda rng, n: 0.5 * (1 + np.arange(n) / 1000) * rng.gamma(8, 1 / 8, n),
    "persistent": lambda rng, n: 3 * np.exp(_autoregressive(rng, n, memory=0.8, sigma=0.2)),
}
TUNED = tuple(product([*LOSSES][:8], ("normal", "heavy")))
HELD_OUT = tuple(product([*LOSSES][8:], ("gamma", "persistent")))
BIMODAL = ("bimodal10", "bimodal2")


def healthy(family, *, seed, num_steps=NUM_STEPS):
    """Return a curve of one family (loss, gradient). Equal seeds give equal curves."""
    loss, grad = family
    rng = np.random.default_rng([seed, list(LOSSES).index(loss), list(GRADS).index(grad)])
    return Curve(LOSSES[loss](rng, num_steps), GRADS[grad](rng, num_steps))


def _times(curve, loss, grad_norm):
    return replace(curve, loss=curve.loss * loss, grad_norm=curve.grad_norm * grad_norm)


def spike(curve, *, at, loss=1.0, grad=1.0):
    """Multiply one step."""
    is_hit = np.arange(len(curve.loss)) == at
    return _times(curve, np.where(is_hit, loss, 1.0), np.where(is_hit, grad, 1.0))


def decaying(curve, *, at):
    """A threefold rise at once that fades; the gradient rises with its third power, as for a
    spike.
    """
    since = np.arange(len(curve.loss)) - at
    rise = np.where(since >= 0, 1 + 2 * np.exp(-np.maximum(since, 0) / 50), 1.0)
    return _times(curve, rise, rise**3)


def drift(curve, *, at, rate):
    """The loss grows by a constant share per step, up to twentyfold."""
    since = np.maximum(np.arange(len(curve.loss)) - at, 0)
    rise = np.exp(np.minimum(np.log1p(rate) * since, np.log(20)))
    return replace(curve, loss=curve.loss * rise)


def level(curve, *, at):
    """The loss is 30% higher from one step on."""
    is_after = np.arange(len(curve.loss)) >= at
    return replace(curve, loss=curve.loss * np.where(is_after, 1.3, 1.0))
