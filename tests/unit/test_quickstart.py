"""The embedded quickstart: its samples run, its template renders tools, and its files can be
regenerated.
"""

import re

from small_files import read_lines

from trainer.quickstart import TRAIN_FILE


def test_every_answer_runs_and_passes_its_check():
    for row in read_lines(TRAIN_FILE):
        answer = row["messages"][1]["content"]
        code = re.fullmatch(r"```python\n(.*)\n```", answer, re.DOTALL)
        assert code, answer
        namespace = {}
        exec(code[1], namespace)
        assert eval(row["check"], namespace) is True, row
