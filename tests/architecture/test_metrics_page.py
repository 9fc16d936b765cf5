"""docs/metrics.md says what the table of metrics says."""

from pathlib import Path

import pytest
from metrics_page import page as written

from trainer.metrics import METRICS


@pytest.mark.covers("S0.34", "S4.40")
def test_the_page_of_metrics_is_up_to_date(repository: Path) -> None:
    page = (repository / "docs/metrics.md").read_text(encoding="utf-8")
    assert page == written(), "run: python tests/architecture/metrics_page.py"
    for metric in METRICS.values():
        (row,) = [line for line in page.splitlines() if line.startswith(f"| `{metric.key}` |")]
        assert all(f"`{key}`" in row for key in metric.config)
        assert f"| {metric.every} |" in row and f"| {metric.over_ranks} |" in row
