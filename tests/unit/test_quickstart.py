"""The embedded quickstart: its samples run, its template renders tools, its files can be made again."""

import json
import os
import re
import shutil
import subprocess
import sys

from trainer.quickstart import MODEL_DIR, TRAIN_FILE


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
