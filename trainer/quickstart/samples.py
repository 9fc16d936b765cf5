"""The generated instruction set: one chat per task, the same rows on every machine and Python version."""

import hashlib
from collections.abc import Iterable
from typing import Any

from trainer.quickstart.families import FAMILIES, Family, Parameter

SAMPLES_PER_FAMILY = 63
OPENERS = (
    "Write a Python function",
    "Write a short Python function",
    "Please write a function",
    "Define a Python function",
    "Implement a function",
    "I need a Python function",
)


def generate_samples() -> list[dict[str, Any]]:
    """Rows of `messages` (user, assistant) and `check`, an expression that is true after executing the answer.

    Choice and order follow from digests of the text, not from a random generator.
    """
    tasks = [(family, parameters) for family in FAMILIES for parameters in _chosen(family)]
    rows = [_row(family, *parameters) for family, parameters in tasks]
    return sorted(rows, key=lambda row: _digest(row["messages"][0]["content"]))


def _chosen(family: Family) -> Iterable[tuple[Parameter, ...]]:
    key = family.name + family.args
    return sorted(family.parameters, key=lambda parameters: _digest(f"{key}{parameters}"))[:SAMPLES_PER_FAMILY]


def _row(family: Family, a: Parameter, b: Parameter = "") -> dict[str, Any]:
    name, what, body = (text.format(a=a, b=b) for text in (family.name, family.what, family.body))
    signature = f"{name}({family.args})"
    opener = OPENERS[int(_digest(signature), 16) % len(OPENERS)]
    lines = [
        f"def {signature}:",
        f'    """{what[0].upper()}{what[1:]}."""',
        *(f"    {line}" for line in body.splitlines()),
    ]
    if '"' in what:
        lines[1] = f"    # {what[0].upper()}{what[1:]}."
    arguments, expected = family.case(a, b) if b != "" else family.case(a)
    return {
        "messages": [
            {"role": "user", "content": f"{opener} {signature} that {what}."},
            {"role": "assistant", "content": "\n".join(["```python", *lines, "```"])},
        ],
        "check": f"{name}({', '.join(map(repr, arguments))}) == {expected!r}",
    }


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
