"""A name means one thing: no two public classes of the tree are called alike."""

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
