"""TRL 1.16 prepares the same ids; every label that differs has a rule's name.

Needs VERL_PYTHON, an interpreter that has TRL too.
"""

import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest

from trainer.cli import data as command
from trainer.data_tools.frameworks import FRAMEWORKS
from trainer.quickstart import MODEL_DIR, TRAIN_FILE

pytestmark = [
    pytest.mark.verl,
    pytest.mark.skipif("VERL_PYTHON" not in os.environ, reason="VERL_PYTHON names no interpreter with TRL"),
]
GSM8K = Path(__file__).resolve().parents[3] / "shared/data/gsm8k/train.jsonl"
NUM_ROWS, NUM_TOOL_ROWS, NUM_FEW = 200, 200, 20
TOOLS = {"weather": ("city", "unit"), "search": ("query", "limit"), "convert": ("amount", "currency", "to")}
NEWLINES = ("newline in front of a turn supervised there", "trailing newline after the end token supervised there")
FILLED = "absent fields filled with null there"
SHORT, NEWLINE_CUT = 66, "newline after the last end token only here"
Rows = list[dict[str, Any]]


def quickstart() -> Rows:
    rows = map(json.loads, TRAIN_FILE.read_text().splitlines()[:NUM_ROWS])
    return [{"messages": row["messages"]} for row in rows]


def gsm8k() -> Rows:
    rows = map(json.loads, GSM8K.read_text().splitlines()[:NUM_ROWS]) if GSM8K.exists() else ()
    said = [("user", "question"), ("assistant", "answer")]
    return [{"messages": [{"role": role, "content": row[key]} for role, key in said]} for row in rows]


def tool_conversations() -> Rows:
    rng = random.Random(13)
    return [tool_conversation(rng) for _ in range(NUM_TOOL_ROWS)]


def tool_conversation(rng: random.Random) -> dict[str, Any]:
    """One to three requests, each with a call, its result and an answer; some calls leave arguments out."""
    names = rng.sample(sorted(TOOLS), 2)
    messages: Rows = [{"role": "system", "content": "Be brief."}] if rng.random() < 0.5 else []
    for turn in range(rng.randint(1, 3)):
        name = rng.choice(names)
        given = TOOLS[name][: rng.randint(1, len(TOOLS[name]))]
        call = {"name": name, "arguments": {key: f"{key} {rng.randint(1, 99)}" for key in given}}
        messages += [
            {"role": "user", "content": f"Request {turn}: {name} number {rng.randint(1, 10**6)}, please."},
            {"role": "assistant", "content": rng.choice(["", "A moment."]), "tool_calls": [{"function": call}]},
            {"role": "tool", "name": name, "content": json.dumps({"result": rng.randint(1, 999)})},
            {"role": "assistant", "content": f"It is {rng.randint(1, 999)}."},
        ]
    return {"messages": messages, "tools": [{"type": "function", "function": schema(name)} for name in names]}


def schema(name: str) -> dict[str, Any]:
    properties = {key: {"type": "string"} for key in TOOLS[name]}
    return {"name": name, "description": f"To {name}.", "parameters": {"type": "object", "properties": properties}}


def job(rows: Rows, template: str | None = None, *, is_filled: bool = False, **options: Any) -> dict[str, Any]:
    options = {"max_length": 2048, "assistant_only_loss": True, **options}
    return {"model": str(MODEL_DIR), "rows": rows, "template": template, "is_filled": is_filled, "options": options}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the rows of each job, as JOB.rows.jsonl, and what TRL made of them, as JOB.jsonl."""
    directory = tmp_path_factory.mktemp("trl")
    (directory / "dump_trl.py").write_text(FRAMEWORKS["trl"].script)
    tools = tool_conversations()
    jobs = {
        "quickstart": job(quickstart()),
        "gsm8k": job(gsm8k(), "qwen2_5"),
        "tools": job(tools),
        "filled": job(tools[:NUM_FEW], "qwen2_5", is_filled=True),
        "whole": job(quickstart()[:NUM_FEW], assistant_only_loss=False),
        "cut": job(quickstart()[:NUM_FEW], max_length=SHORT),
    }
    jobs = {name: found for name, found in jobs.items() if found["rows"]}
    (directory / "jobs.json").write_text(json.dumps(jobs))
    for name, found in jobs.items():
        lines = "".join(json.dumps(row) + "\n" for row in found["rows"])
        (directory / f"{name}.rows.jsonl").write_text(lines)
    script = Path(__file__).with_name("prepare_with_trl.py")
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(directory / "home"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [os.environ["VERL_PYTHON"], str(script), str(directory)],
        env=kept | offline,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return directory


def compared(prepared: Path, name: str, capsys: pytest.CaptureFixture[str], template: str | None = None) -> Any:
    """What `data compare` says, as (rows here, rows there, equal ones, rows by rule)."""
    rows = [f"data.train_files={prepared}/{name}.rows.jsonl", f"data.cache_dir={prepared}/cache"]
    own = [f"data.chat_template={prepared}/{template}.jinja"] if template else []
    code = command.main(["compare", "--with", "trl", f"{prepared}/{name}.jsonl", "--json", *rows, *own])
    tree = json.loads(capsys.readouterr().out)
    rules = {rule: found["rows"] for rule, found in tree["rules"].items()}
    assert code == (1 if rules else 0)
    return tree["rows_here"], tree["rows_there"], tree["equal"], rules


def test_conversations_equal_trls(prepared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compared(prepared, "quickstart", capsys) == (NUM_ROWS, NUM_ROWS, NUM_ROWS, {})
    assert compared(prepared, "tools", capsys) == (NUM_TOOL_ROWS, NUM_TOOL_ROWS, NUM_TOOL_ROWS, {})


def test_on_gsm8k_trl_trains_two_newlines_more(prepared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if not GSM8K.exists():
        pytest.skip("needs the GSM8K data")
    found = compared(prepared, "gsm8k", capsys, "qwen2_5")
    assert found == (NUM_ROWS, NUM_ROWS, 0, dict.fromkeys(NEWLINES, NUM_ROWS))


def test_arguments_that_trl_fills_with_null_are_named(prepared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = compared(prepared, "filled", capsys, "qwen2_5")
    assert found == (NUM_FEW, NUM_FEW, 0, dict.fromkeys((FILLED, *NEWLINES), NUM_FEW))


def test_trls_defaults_and_cuts_are_named(prepared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = compared(prepared, "whole", capsys)
    assert found == (NUM_FEW, NUM_FEW, 0, {"whole conversation supervised there": NUM_FEW})
    *_, equal, rules = compared(prepared, "cut", capsys)
    assert set(rules) == {f"truncated at {SHORT} there", NEWLINE_CUT}, "some rows lose their last newline alone"
    assert equal + sum(rules.values()) == NUM_FEW and equal
