"""One token cache of the quickstart for all runs, so that each run starts like a second run."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    return f"data.cache_dir={tmp_path_factory.mktemp('cache')}"
