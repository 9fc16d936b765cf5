"""A real run from the perspective of the person who watches it."""

import pytest
import whole_runs
from runs import SMALL
from small_files import read_lines

from trainer.tracking import read_metrics
from trainer.tracking.metrics import METRICS, find

NEEDS_CUDA = ("memory/", "system/gpu_", "throughput/train/mfu")
NOT_ALWAYS = {
    "train/objective",
    "train/objective/<term>",
    "checkpoint/failed_in_a_row",
    "train/loss_by/<source>",
    "val/loss_by/<source>",
    "moe/router_loss",
    "moe/load_max_over_mean",
}
NUM_STEPS = 52
"""A step after the one that measures slow metrics."""


@pytest.fixture(scope="module")
def watched(root):
    """The run directory of a run with everything switched on."""
    run_dir = root / "watched"
    overrides = [
        *SMALL,
        "data.train_batch_size=2",
        f"trainer.total_training_steps={NUM_STEPS}",
        "trainer.save_freq=25",
        "trainer.test_freq=25",
        "trainer.trace=true",
        "trainer.deterministic=true",
        f"data.cache_dir={root}/cache",
    ]
    output = whole_runs.train(run_dir, 2, *overrides)
    assert "report      " in output and "cannot write the report" not in output
    return run_dir


@pytest.mark.covers("S0.29 S0.34 S4.40")
def test_a_run_logs_what_the_table_promises_and_nothing_else(watched):
    rows = read_metrics(watched / "metrics.jsonl")
    columns = {"step", "attempt", "kind", "ts", "nonfinite"}
    logged = {key for row in rows for key in row} - columns
    assert [key for key in sorted(logged) if find(key) is None] == []
    seen = {metric.key for key in logged if (metric := find(key)) is not None}
    promised = METRICS.keys() - NOT_ALWAYS
    missing = sorted(promised - seen)
    assert [key for key in missing if not key.startswith(NEEDS_CUDA)] == []
    assert [row["step"] for row in rows if row["kind"] == "train"] == list(range(1, NUM_STEPS + 1))


def test_a_run_leaves_report_events_heartbeats_and_traces(watched):
    assert "<html" in (watched / "report.html").read_text()[:300].lower()
    kinds = [line["kind"] for line in read_lines(watched / "events.jsonl")]
    assert kinds[0] == "start" and kinds[-1] == "end" and kinds.count("checkpoint") == 3
    for rank in (0, 1):
        assert (watched / "heartbeat" / f"rank_{rank}.json").is_file()
        assert '"forward"' in (watched / "trace" / f"rank_{rank}.json").read_text()
