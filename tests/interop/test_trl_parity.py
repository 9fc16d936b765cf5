"""TRL 1.16 prepares the same token ids and labels, except for known differences, which this test
pins.

Needs VERL_PYTHON, an interpreter that also has TRL.
"""

import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
from small_files import read_lines, write_json, write_lines
from transformers import AutoTokenizer

from trainer.quickstart import MODEL_DIR, TRAIN_FILE
from trainer.train.start.compose import load_config
from trainer.train.start.inputs import prepare_data_alone

pytestmark = [
    pytest.mark.verl,
    pytest.mark.skipif(
        "VERL_PYTHON" not in os.environ, reason="VERL_PYTHON names no interpreter with TRL"
    ),
]
NUM_ROWS = 200
QWEN = "qwen2_5"
"""TRL's name of the Qwen2.5 chat template with generation tags around assistant turns."""
TOOLS = {
    "weather": ("city", "unit"),
    "search": ("query", "limit"),
    "convert": ("amount", "currency", "to"),
}
NOT_SUPERVISED = -100
Rows = list[dict[str, Any]]


def quickstart():
    rows = map(json.loads, TRAIN_FILE.read_text().splitlines()[:NUM_ROWS])
    return [{"messages": row["messages"]} for row in rows]


def tool_conversation(rng):
    """One to three requests, each with a call, its result and an answer. Some calls omit arguments."""
    names = rng.sample(sorted(TOOLS), 2)
    said = [("system", "Be brief.")] if rng.random() < 0.5 else []
    messages = [message(role, text) for role, text in said]
    for turn in range(rng.randint(1, 3)):
        name = rng.choice(names)
        given = TOOLS[name][: rng.randint(1, len(TOOLS[name]))]
        call = {"name": name, "arguments": {key: f"{key} {rng.randint(1, 99)}" for key in given}}
        text = f"Request {turn}: {name} number {rng.randint(1, 10**6)}, please."
        lead = ["", "Wait."]
        messages += [
            message("user", text),
            message("assistant", rng.choice(lead), tool_calls=[{"function": call}]),
            message("tool", f'{{"result": {rng.randint(1, 999)}}}', name=name),
            message("assistant", f"It is {rng.randint(1, 999)}."),
        ]
    tools = [{"type": "function", "function": schema(name)} for name in names]
    return {"messages": messages, "tools": tools}


def message(role, content, **more):
    return {"role": role, "content": content, **more}


def schema(name):
    properties = {key: {"type": "string"} for key in TOOLS[name]}
    parameters = {"type": "object", "properties": properties}
    return {"name": name, "description": f"To {name}.", "parameters": parameters}


@pytest.fixture(scope="module")
def prepared(root):
    """A directory with the rows of each job, as JOB.rows.jsonl, and what TRL made of them, as
    JOB.jsonl.
    """
    rng = random.Random(13)
    rows = {
        "quickstart": quickstart(),
        "tools": [tool_conversation(rng) for _ in range(NUM_ROWS)],
        QWEN: quickstart(),
    }
    jobs = {}
    for name, found in rows.items():
        jobs[name] = {
            "model": str(MODEL_DIR),
            "rows": found,
            "template": name if name == QWEN else None,
            "options": {"max_length": 2048, "assistant_only_loss": True},
        }
        write_lines(root / f"{name}.rows.jsonl", found)
    write_json(root / "jobs.json", jobs)
    script = Path(__file__).with_name("prepare_with_trl.py")
    kept = {
        key: value
        for key, value in os.environ.items()
        if key not in ("PYTHONPATH", "PYTHONSAFEPATH")
    }
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(root / "home"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [os.environ["VERL_PYTHON"], str(script), str(root)],
        env=kept | offline,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return root


Row = tuple[list[int], list[bool]]
"""One sample as one side prepared it: token ids, and a mask of the supervised ones."""


def rows_there(prepared, name):
    rows = read_lines(prepared / f"{name}.jsonl")
    return [
        (row["input_ids"], [label != NOT_SUPERVISED for label in row["labels"]]) for row in rows
    ]


def rows_here(prepared, name):
    words = [
        f"data.train_files={prepared}/{name}.rows.jsonl",
        f"data.cache_dir={prepared}/cache",
        "data.val_ratio=0",
    ]
    if name == QWEN:
        words.append(f"data.chat_template={prepared}/{QWEN}.jinja")
    samples = prepare_data_alone(load_config(words)).train
    encoded = (samples.sample(number) for number in range(len(samples)))
    return [(ids.tolist(), mask.tolist()) for ids, mask in encoded]


@pytest.mark.parametrize("name", ["quickstart", "tools"])
def test_conversations_equal_trls(prepared, name):
    here = rows_here(prepared, name)
    assert len(here) == sum(any(mask) for _, mask in here) == NUM_ROWS
    assert here == rows_there(prepared, name)


def test_with_the_template_of_qwen_trl_trains_two_newlines_more(prepared):
    here = rows_here(prepared, QWEN)
    there = rows_there(prepared, QWEN)
    assert len(here) == NUM_ROWS
    newline = AutoTokenizer.from_pretrained(MODEL_DIR).encode("\n", add_special_tokens=False)
    assert len(newline) == 1
    for (ids, own), (their_ids, other) in zip(here, there, strict=True):
        assert ids == their_ids
        different = [
            i for i, pair in enumerate(zip(own, other, strict=True)) if len(set(pair)) == 2
        ]
        supervised = [i for i, is_kept in enumerate(own) if is_kept]
        assert different == [supervised[0] - 1, supervised[-1] + 1]
        assert all(other[i] and ids[i] == newline[0] for i in different)
