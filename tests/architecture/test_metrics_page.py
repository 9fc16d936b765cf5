"""docs/metrics.md matches the table of metrics."""

import pytest
from metrics_page import page as written
from repository import REPOSITORY


@pytest.mark.covers("S0.34 S4.40")
def test_the_page_of_metrics_is_up_to_date():
    page = (REPOSITORY / "docs/metrics.md").read_text(encoding="utf-8")
    assert page == written(), "run: python tests/architecture/metrics_page.py"
