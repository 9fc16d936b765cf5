"""The commands on the documentation pages, as a shell would receive them."""

import re
import shlex

from repository import REPOSITORY

PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
"""Every command block on these pages is executed, or states what it needs
(tests/e2e/test_pages.py).
"""
OURS = r"(?:bash run_sft\.sh|fsdp-sft)"
NEEDS = re.compile(r"#.*\[needs (.*)\]$", re.S)
"""The marker in a command's comment for something that CI lacks."""


def blocks_of(markdown, language):
    return re.findall(rf"^```{language}\n(.*?)^```", markdown, re.M | re.S)


def commands_in(block):
    """Return the lines with their comments."""
    command = ""
    for line in block.replace("\\\n", " ").splitlines():
        command += f"{line}\n"
        try:
            is_one = bool(shlex.split(command, comments=True))
        except ValueError:  # a quotation goes on in the next line
            continue
        if is_one:
            yield command.strip()
        command = ""
