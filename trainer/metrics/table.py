"""The table: every metric that this trainer logs, in the order of a console line and of a
history's columns.
"""

from trainer.metrics.words import Metric, read_table

PHASES = ("data", "shard", "forward", "backward", "optimizer", "logging", "guard", "other")
"""What a step's time goes to: `time/train/<phase>_s`."""
TABLE = tuple(
    Metric(**{**row, "config": tuple(row["config"].split())})
    for row in read_table("metrics/table.tsv")
)
