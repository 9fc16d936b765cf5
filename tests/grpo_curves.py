"""Histories of a controller (requirement text S1)."""

import numpy as np

HISTORY_COLUMNS = (
    *("epoch", "loss", "reward_mean", "reward_std", "accuracy_mean", "accuracy_std"),
    *("latency_mean", "latency_std", "budget_violation_rate"),
)
"""The columns of `training_history.csv` and `validation_history.csv` (requirement text S1)."""


def controller_histories(seed):
    """(training, validation) of a run within S1's good bands: [epochs, columns], 30 to 60 epochs.

    The loss of GRPO changes its sign and swings less and less; rewards and accuracies rise with
    noise, violations fall below 5 %, the latency settles just below its budget of 250 ms. Runs
    differ in length, level, noise and speed.
    """
    rng = np.random.default_rng(seed)
    num_epochs = int(rng.integers(30, 61))
    epochs = np.arange(1, num_epochs + 1)
    progress = np.minimum((epochs - 1) / 29, 1.0) ** rng.uniform(0.8, 1.2)
    bias = rng.normal(0, 0.1)
    swing = rng.uniform(0.1, 0.8)
    noise = rng.uniform(0.5, 2.0)

    def table(spread):
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


def write_history(path, table):
    """Write `HISTORY_COLUMNS`. The first column is a whole number."""
    header = ",".join(HISTORY_COLUMNS)
    formats = ["%d", *["%.4f"] * (table.shape[1] - 1)]
    np.savetxt(path, table, fmt=formats, delimiter=",", header=header, comments="")
