"""Shared fixtures. No test reaches the network."""

import os
import signal
import sys
from pathlib import Path

import pytest

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", WANDB_MODE="offline", TOKENIZERS_PARALLELISM="true")
sys.path.insert(0, str(Path(__file__).parent))
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # what tests start would inherit that nohup has it ignored

REPOSITORY = Path(__file__).resolve().parent.parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session")
def repository() -> Path:
    return REPOSITORY
