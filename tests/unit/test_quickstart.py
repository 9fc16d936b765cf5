"""The embedded quickstart: its samples run, its template renders tools, its files can be made again."""

import json
import os
import re
import shutil
import subprocess
import sys

from transformers import AutoTokenizer

from trainer.quickstart import MODEL_DIR, TRAIN_FILE

TOOLS = [
    {
        "type": "function",
        "function": {"name": "area", "description": "d", "parameters": {"type": "object"}},
    }
]
CALL = {"type": "function", "function": {"name": "area", "arguments": {"w": 2}}}
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Area?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": "four"},
    {"role": "tool", "content": "five"},
    {"role": "assistant", "content": "It is 4."},
]


def _rows() -> list[dict]:
    return [json.loads(line) for line in TRAIN_FILE.read_text().splitlines()]


def test_every_answer_runs_and_passes_its_check():
    for row in _rows():
        answer = row["messages"][1]["content"]
        code = re.fullmatch(r"```python\n(.*)\n```", answer, re.DOTALL)
        assert code, answer
        namespace: dict = {}
        exec(code[1], namespace)
        assert eval(row["check"], namespace) is True, row


def test_the_files_are_what_is_made_with_another_hash_seed(repository, tmp_path):
    """The same tokens on every machine, as a resumed run needs them."""
    code = "import sys, pathlib, make_quickstart as m; m.make(pathlib.Path(sys.argv[1]))"
    shutil.copytree(
        MODEL_DIR,
        made := tmp_path / "model",
        ignore=shutil.ignore_patterns("tok*", "spec*", "vocab*", "*.txt"),
    )
    paths = os.pathsep.join([str(repository), str(repository / "tests")])
    command = [sys.executable, "-c", code, str(made)]
    subprocess.run(command, check=True, env={"PYTHONHASHSEED": "7", "PYTHONPATH": paths})
    again = {path.name: path.read_bytes() for path in made.iterdir()}
    embedded = {path.name: path.read_bytes() for path in MODEL_DIR.iterdir()}
    assert len(embedded) == 8 and sorted(again) == sorted(embedded)
    assert [name for name in embedded if again[name] != embedded[name]] == [], (
        "run: python tests/make_quickstart.py"
    )


def test_chat_template_renders_roles_tools_and_calls():
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    text = tokenizer.apply_chat_template(CHAT, tools=TOOLS, tokenize=False)
    call = '<tool_call>\n{"name": "area", "arguments": {"w": 2}}\n</tool_call>'
    replies = "<tool_response>\nfour\n</tool_response>\n<tool_response>\nfive\n</tool_response>"
    assert (
        text.startswith("<|im_start|>system\nBe brief.\n\n# Tools") and json.dumps(TOOLS[0]) in text
    )
    assert text.endswith(
        f"<|im_start|>user\nArea?<|im_end|>\n<|im_start|>assistant\n{call}\n{call}<|im_end|>\n"
        f"<|im_start|>user\n{replies}<|im_end|>\n<|im_start|>assistant\nIt is 4.<|im_end|>\n"
    )
    as_text = {"type": "function", "function": {"name": "area", "arguments": '{"w": 2}'}}
    chat = [
        *CHAT[:2],
        {"role": "assistant", "content": "", "tool_calls": [as_text, as_text]},
        *CHAT[3:],
    ]
    assert tokenizer.apply_chat_template(chat, tools=TOOLS, tokenize=False) == text
    prompt = tokenizer.apply_chat_template(CHAT[:2], tokenize=False, add_generation_prompt=True)
    assert prompt == (
        "<|im_start|>system\nBe "
        "brief.<|im_end|>\n<|im_start|>user\nArea?<|im_end|>\n<|im_start|>assistant\n"
    )
