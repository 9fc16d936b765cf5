"""Shared fixtures. No test reaches the network."""

import contextlib
import os
import signal
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

os.environ.update(
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    WANDB_MODE="offline",
    TOKENIZERS_PARALLELISM="true",
)
sys.path.insert(0, str(Path(__file__).parent))
import sweeps
from left_running import MARK, describe, left_running
from processes import wait_until

os.environ[MARK] = str(os.getpid())
# what tests start would inherit that nohup has it ignored
signal.signal(signal.SIGHUP, signal.SIG_DFL)

ENDED_WITHIN_S = 10.0
FAST = frozenset(
    [
        "architecture/test_config_keys.py",
        "architecture/test_floors.py",
        "distributed/test_fit.py",
        "numerics/test_head.py",
        "numerics/test_norm.py",
        "unit/test_batch_plan.py",
        "unit/test_checkpoint_layout.py",
        "unit/test_checkpoint_manifest.py",
        "unit/test_checkpoint_rollback.py",
        "unit/test_clock.py",
        "unit/test_config.py",
        "unit/test_data_chat.py",
        "unit/test_data_content.py",
        "unit/test_data_prepare.py",
        "unit/test_data_shapes.py",
        "unit/test_data_turns.py",
        "unit/test_detection.py",
        "unit/test_environment.py",
        "unit/test_export.py",
        "unit/test_guard.py",
        "unit/test_json_lines.py",
        "unit/test_meter.py",
        "unit/test_metrics_table.py",
        "unit/test_optim.py",
        "unit/test_packet.py",
        "unit/test_seeding.py",
        "unit/test_snapshot.py",
    ]
)
"""Files with the marker `fast`: no long campaigns, and only a few files with ranks."""


def pytest_addoption(parser):
    parser.addoption(
        "--full", action="store_true", help="run every point of the long sweeps, not a fixed sample"
    )


def pytest_configure(config):
    if config.getoption("--full"):
        os.environ[sweeps.FULL] = "1"


def pytest_report_header():
    sample = f"a sample drawn by seed {sweeps.SEED} (all: --full)"
    return f"long sweeps: {'all' if sweeps.is_full() else sample}"


def pytest_ignore_collect(collection_path, config):
    """Import no other file if only the fast tests run."""
    is_other = collection_path.suffix == ".py" and _name(collection_path) not in FAST
    return True if config.option.markexpr == "fast" and is_other else None


def _name(path):
    return path.relative_to(Path(__file__).parent).as_posix()


def pytest_collection_modifyitems(items):
    import torch

    for item in items:
        if _name(item.path) in FAST:
            item.add_marker("fast")

    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left_running():
    """Check that every process of the tests ends soon after the last test. Name and end the
    remaining ones.
    """
    yield
    wait_until(lambda: not left_running(), timeout_s=ENDED_WITHIN_S)
    left = left_running()
    said = "\n".join(map(describe, left))
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    assert not left, f"tests left processes behind:\n{said}"


@pytest.fixture(scope="module", autouse=True)
def wandb_is_left_to_nobody():
    """The service, and its copy of the environment, would otherwise persist into the next file of
    the process.
    """
    yield
    if "wandb" in sys.modules:
        sys.modules["wandb"].teardown()


@pytest.fixture(autouse=True)
def no_rank_is_left():
    """A process group of one rank, which commands make in this process, changes the environment."""
    yield
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A directory that the tests of a file share."""
    return tmp_path_factory.mktemp("shared")


@pytest.fixture
def memory_dir(tmp_path):
    """A new directory in memory where there is one; nothing here depends on the kind of disk."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(
        dir=shared if os.access(shared, os.W_OK) else tmp_path
    ) as name:
        yield Path(name)
