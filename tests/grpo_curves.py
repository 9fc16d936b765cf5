"""The log of the analysed GRPO run (requirement text S2), rebuilt: 6000 steps, logged every 5,
seven bursts.
"""

import numpy as np
from numpy.typing import NDArray

LOG_EVERY = 5
NUM_POINTS = 1200
INTERVALS = (
    (2800, 2800),
    (2855, 2870),
    (3140, 3145),
    (3695, 3695),
    (4155, 4155),
    (4655, 4655),
    (5145, 5145),
)
"""First and last logged step of each burst (S2.21)."""
BURSTS: dict[str, dict[int, float]] = {
    "loss": {2800: 0.78, 3145: 0.45, 3695: 0.54, 4155: 0.31, 4655: 0.26, 5145: 0.20},
    "kl": {2800: 19.6, 3140: 16.2, 3145: 18.7, 3695: 13.6, 4155: 11.8, 4655: 8.9, 5145: 6.3},
    "grad_norm": {
        2800: 4.7e6,
        3140: 7.6e6,
        3145: 1.0e7,
        3695: 6.1e6,
        4155: 9.5e6,
        4655: 2.7e7,
        5145: 5.5e7,
    },
    "completions/mean_length": {2800: 331.0, 2855: 305.0, 2860: 392.0, 2865: 440.0, 2870: 481.0},
    "completions/clipped_ratio": {2800: 0.875, 2855: 0.9, 2860: 0.9, 2865: 0.9, 2870: 0.9},
    "rewards/Format/mean": {
        2855: 0.3,
        2860: 0.025,
        2865: 0.1,
        2870: 0.2,
        3140: 0.25,
        3145: 0.03,
        3695: 0.2,
    },
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


HISTORY_COLUMNS = (
    *("epoch", "loss", "reward_mean", "reward_std", "accuracy_mean", "accuracy_std"),
    *("latency_mean", "latency_std", "budget_violation_rate"),
)
"""Of `training_history.csv` and `validation_history.csv` (requirement text S1)."""


def controller_histories(seed: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(training, validation) of a run within S1's good bands: [epochs, columns], 30 to 60 epochs.

    The loss of GRPO changes its sign and swings less and less; rewards and accuracies rise with
    noise, violations fall below 5 %, the latency settles just below its budget of 250 ms. Runs
    differ in length, level, noise and speed.
    """
    rng = np.random.default_rng(seed)
    num_epochs = int(rng.integers(30, 61))
    epochs = np.arange(1, num_epochs + 1)
    progress = np.minimum((epochs - 1) / 29, 1.0) ** rng.uniform(0.8, 1.2)
    bias, swing, noise = rng.normal(0, 0.1), rng.uniform(0.1, 0.8), rng.uniform(0.5, 2.0)

    def table(spread: float) -> NDArray[np.float64]:
        jitter = spread * noise * rng.normal(0, 1, (5, num_epochs))
        columns = (
            epochs,
            bias + swing * (1.0 - 0.7 * progress) * rng.normal(0, 1, num_epochs),
            -0.6 + 1.0 * progress + 0.05 * jitter[0],
            0.25 + 0.02 * np.abs(jitter[1]),
            (0.03 + 0.27 * progress + 0.012 * jitter[2]).clip(0, 1),
            np.full(num_epochs, 0.05),
            300 - 55 * progress + 3 * jitter[3],
            np.full(num_epochs, 12.0),
            (0.42 * (1 - progress) + 0.03 + 0.01 * jitter[4]).clip(0, 1),
        )
        return np.stack(columns, axis=1)

    return table(1.0), table(0.7)
