"""The table: every metric that this trainer logs, in the order of a console line and of a history's columns."""

from trainer.metrics.words import Alias, Metric, read_table

PHASES = ("data", "shard", "forward", "backward", "optimizer", "logging", "guard", "other")
"""What a step's time goes to: `time/train/<phase>_s`."""
TABLE = tuple(Metric(**{**row, "config": tuple(row["config"].split())}) for row in read_table("metrics/table.tsv"))
ALIASES: dict[str, Alias] = {
    "train/lr": Alias("train/lr(1e-3)", "x 1e-3", "1", 1e-3),
    "time/train/h2d_s": Alias("time/train/shard_s", "as earlier versions called it", "s"),
    "actor/sft_loss": Alias("train/loss", "as ROLL calls it", "nat/token"),
    "system/tps": Alias("throughput/train/tokens_per_s", "as ROLL calls it", "1/s"),
    "system/samples": Alias("progress/samples", "as ROLL calls it", "sample"),
}
"""Names that other systems use for the same values: logged only where `trainer.roll_detail` asks for it."""
