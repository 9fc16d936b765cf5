"""Train three runs that differ only in the learning rate, and compare them.

python examples/three_rates.py [key=value ...]; by default with the quickstart's model and data.
Complete runs are not repeated: to add a run, add a rate and start the script again.
"""

import sys

from trainer.api import train
from trainer.cli.report import main as report

RATES = ("1e-4", "1e-3", "1e-2")
WORDS = (
    "data.train_max_samples=200",
    "data.train_batch_size=8",
    "trainer.project_name=examples",
    "trainer.total_training_steps=20",
    "trainer.test_freq=10",
    "trainer.save_freq=-1",
)


def main() -> int:
    runs = [
        train(*WORDS, f"optim.lr={rate}", f"trainer.experiment_name=rate_{rate}", *sys.argv[1:])
        for rate in RATES
    ]
    return report([str(run.directory) for run in runs])


if __name__ == "__main__":
    sys.exit(main())
