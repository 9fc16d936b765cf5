"""A name means one thing: no two public classes are called alike, a message names a command as it is called here."""

import ast
from collections import defaultdict
from collections.abc import Mapping

from test_floors import python_files


def doubled_classes(sources: Mapping[str, str]) -> list[str]:
    """Public classes whose name stands in more than one place, with their files."""
    places: dict[str, list[str]] = defaultdict(list)
    for path, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(path)
    return [f"{name}: {', '.join(paths)}" for name, paths in sorted(places.items()) if len(paths) > 1]


def test_a_class_name_means_one_thing() -> None:
    assert doubled_classes(python_files("trainer")) == []


def test_a_doubled_class_name_is_caught() -> None:
    sources = {
        "a.py": "class Run: ...\nclass _Own: ...",
        "b.py": "if True:\n    class Run: ...",
        "c.py": "class _Own: ...",
    }
    assert doubled_classes(sources) == ["Run: a.py, b.py"]


SCRIPT = "run_sft.sh"
PAGES = {"trainer/cli/metrics.py"}
"""Write pages of the checkout."""


def lines_with_the_script(source: str) -> list[int]:
    """Of texts that are no docstring: an installed package has no script."""
    tree = ast.parse(source)
    texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and SCRIPT in str(node.value) and id(node) not in texts
    ]


def test_messages_name_commands_by_call() -> None:
    own = "trainer/runtime/environment.py"  # has `call`, by which the others say it
    found = {path: lines_with_the_script(source) for path, source in python_files("trainer").items()}
    assert {path: lines for path, lines in found.items() if lines and path not in PAGES} == {own: found[own]}
    assert lines_with_the_script('"""run_sft.sh"""\nprint(f"bash run_sft.sh {1}")') == [2]
