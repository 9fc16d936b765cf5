"""The log of the analysed GRPO run (requirement text S2), rebuilt: 6000 steps, logged every 5, seven bursts."""

import numpy as np
from numpy.typing import NDArray

LOG_EVERY = 5
NUM_POINTS = 1200
INTERVALS = ((2800, 2800), (2855, 2870), (3140, 3145), (3695, 3695), (4155, 4155), (4655, 4655), (5145, 5145))
"""First and last logged step of each burst (S2.21)."""
BURSTS: dict[str, dict[int, float]] = {
    "loss": {2800: 0.78, 3145: 0.45, 3695: 0.54, 4155: 0.31, 4655: 0.26, 5145: 0.20},
    "kl": {2800: 19.6, 3140: 16.2, 3145: 18.7, 3695: 13.6, 4155: 11.8, 4655: 8.9, 5145: 6.3},
    "grad_norm": {2800: 4.7e6, 3140: 7.6e6, 3145: 1.0e7, 3695: 6.1e6, 4155: 9.5e6, 4655: 2.7e7, 5145: 5.5e7},
    "completions/mean_length": {2800: 331.0, 2855: 305.0, 2860: 392.0, 2865: 440.0, 2870: 481.0},
    "completions/clipped_ratio": {2800: 0.875, 2855: 0.9, 2860: 0.9, 2865: 0.9, 2870: 0.9},
    "rewards/Format/mean": {2855: 0.3, 2860: 0.025, 2865: 0.1, 2870: 0.2, 3140: 0.25, 3145: 0.03, 3695: 0.2},
}


def grpo_run(seed: int) -> dict[str, NDArray[np.float64]]:
    """Metric -> values at the steps 5, 10, ..., 6000."""
    rng = np.random.default_rng(seed)
    series = {
        "loss": rng.normal(0.0, 1e-3, NUM_POINTS),
        "kl": np.geomspace(0.02, 0.15, NUM_POINTS) * np.exp(rng.normal(0, 0.3, NUM_POINTS)),
        "grad_norm": 3.2e4 * np.exp(rng.uniform(-0.45, 0.45, NUM_POINTS)),
        "completions/mean_length": rng.uniform(190, 250, NUM_POINTS),
        "completions/clipped_ratio": np.zeros(NUM_POINTS),
        "rewards/Format/mean": rng.uniform(0.9, 1.0, NUM_POINTS),
    }
    for key, bursts in BURSTS.items():
        for step, value in bursts.items():
            series[key][step // LOG_EVERY - 1] = value
    return series
