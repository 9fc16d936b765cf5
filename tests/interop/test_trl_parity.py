"""TRL 1.16 prepares the same token ids and labels.

Needs VERL_PYTHON, an interpreter that has TRL too.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from trainer.quickstart import MODEL_DIR, TRAIN_FILE
from trainer.train.start.compose import load_config
from trainer.train.start.inputs import prepare_data_alone

pytestmark = [
    pytest.mark.verl,
    pytest.mark.skipif(
        "VERL_PYTHON" not in os.environ, reason="VERL_PYTHON names no interpreter with TRL"
    ),
]
NUM_ROWS, NUM_TOOL_ROWS = 200, 200
TOOLS = {
    "weather": ("city", "unit"),
    "search": ("query", "limit"),
    "convert": ("amount", "currency", "to"),
}
NOT_SUPERVISED = -100
Rows = list[dict[str, Any]]


def quickstart() -> Rows:
    rows = map(json.loads, TRAIN_FILE.read_text().splitlines()[:NUM_ROWS])
    return [{"messages": row["messages"]} for row in rows]


def job(rows: Rows) -> dict[str, Any]:
    options = {"max_length": 2048, "assistant_only_loss": True}
    return {"model": str(MODEL_DIR), "rows": rows, "options": options}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the rows of each job, as JOB.rows.jsonl, and what TRL made of them, as
    JOB.jsonl.
    """
    directory = tmp_path_factory.mktemp("trl")
    jobs = {"quickstart": job(quickstart())}
    (directory / "jobs.json").write_text(json.dumps(jobs))
    for name, found in jobs.items():
        lines = "".join(json.dumps(row) + "\n" for row in found["rows"])
        (directory / f"{name}.rows.jsonl").write_text(lines)
    script = Path(__file__).with_name("prepare_with_trl.py")
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(directory / "home"), "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **offline}
    for name in ("PYTHONPATH", "PYTHONSAFEPATH"):
        environment.pop(name, None)
    done = subprocess.run(
        [os.environ["VERL_PYTHON"], str(script), str(directory)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return directory


Row = tuple[list[int], list[bool]]
"""One sample as one side prepared it: token ids, and which of them are supervised."""


def rows_there(prepared: Path, name: str) -> list[Row]:
    rows = map(json.loads, (prepared / f"{name}.jsonl").read_text().splitlines())
    return [
        (row["input_ids"], [label != NOT_SUPERVISED for label in row["labels"]]) for row in rows
    ]


def rows_here(prepared: Path, name: str) -> list[Row]:
    words = [
        f"data.train_files={prepared}/{name}.rows.jsonl",
        f"data.cache_dir={prepared}/cache",
        "data.val_ratio=0",
    ]
    samples = prepare_data_alone(load_config(words)).train
    encoded = (samples.sample(number) for number in range(len(samples)))
    return [(ids.tolist(), mask.tolist()) for ids, mask in encoded]


def test_conversations_equal_trls(prepared):
    here, there = rows_here(prepared, "quickstart"), rows_there(prepared, "quickstart")
    assert len(here) == NUM_ROWS and sum(any(mask) for _, mask in here) == NUM_ROWS
    assert here == there
