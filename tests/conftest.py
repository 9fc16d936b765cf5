"""Shared fixtures. No test reaches the network."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", WANDB_MODE="offline", TOKENIZERS_PARALLELISM="true")
sys.path.insert(0, str(Path(__file__).parent))
import sweeps
from left_running import MARK, describe, left_running

os.environ[MARK] = str(os.getpid())
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # what tests start would inherit that nohup has it ignored

ENDED_WITHIN_S = 10.0
REPOSITORY = Path(__file__).resolve().parent.parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run every point of the long sweeps, not a fixed sample")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--full"):
        os.environ[sweeps.FULL] = "1"


def pytest_report_header() -> str:
    sample = f"a sample drawn by seed {sweeps.SEED} (all: --full)"
    return f"long sweeps: {'all' if sweeps.is_full() else sample}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left_running() -> Iterator[None]:
    """What tests started is gone soon after the last of them; if not, it is named and ended."""
    yield
    deadline = time.monotonic() + ENDED_WITHIN_S
    while (left := left_running()) and time.monotonic() < deadline:
        time.sleep(0.1)
    said = "\n".join(map(describe, left))
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    assert not left, f"tests left processes behind:\n{said}"


@pytest.fixture(scope="module", autouse=True)
def wandb_is_left_to_nobody() -> Iterator[None]:
    """Its service, and what it read of the environment, would go on into the next file of the process."""
    yield
    if "wandb" in sys.modules:
        sys.modules["wandb"].teardown()


@pytest.fixture(scope="session")
def repository() -> Path:
    return REPOSITORY
