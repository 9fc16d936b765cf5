"""The size of the code, in Python tokens. Comments, docstrings, imports and line breaks are free.

Packing lines does not save tokens, so a ceiling here never makes code denser.
"""

import ast
import io
import tokenize

from repository import REPOSITORY

MAX_TOKENS = {"trainer": 182_320, "tests": 230_000}
FREE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def num_tokens(source):
    free = free_lines(source)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return sum(token.type not in FREE and token.start[0] not in free for token in tokens)


def free_lines(source):
    """Lines of docstrings, of text that stands alone, and of imports."""
    lines = set()
    for node in ast.walk(ast.parse(source)):
        is_import = isinstance(node, ast.Import | ast.ImportFrom)
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_import or is_text:
            lines.update(range(node.lineno, node.end_lineno + 1))
    return lines


def test_the_code_stays_below_its_ceilings():
    for folder, ceiling in MAX_TOKENS.items():
        sources = [path.read_text(encoding="utf-8") for path in (REPOSITORY / folder).rglob("*.py")]
        size = sum(map(num_tokens, sources))
        assert size <= ceiling, f"{folder} has {size:,} tokens, at most {ceiling:,}"


def test_only_code_counts():
    source = '"""A docstring."""\nimport os\n\n# a comment\ndef f(x):\n    """Return x."""\n    return x\n'
    assert num_tokens(source) == len(["def", "f", "(", "x", ")", ":", "return", "x"])
