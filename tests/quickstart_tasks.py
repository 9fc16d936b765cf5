"""The task families of the generated instruction set: each is one small Python function, written
for many parameters.

`{a}` and `{b}` in the texts are the parameters. `case` gives arguments and the expected value
without using the body, so that executing an answer against it is a real check.
"""

from collections.abc import Callable
from dataclasses import dataclass

Parameter = int | str
Case = Callable[..., tuple[tuple[object, ...], object]]

NUMBERS = range(2, 100)
NUMBERS_ONLY: list[tuple[Parameter, ...]] = [(a,) for a in NUMBERS]
PAIRS: list[tuple[Parameter, ...]] = [(a, b) for a in NUMBERS for b in NUMBERS if a < b]


@dataclass(frozen=True)
class Family:
    """`name(args)` is the function, `what` completes "a function that ...", `body` is its code
    without indentation.
    """

    name: str
    args: str
    what: str
    body: str
    case: Case
    parameters: list[tuple[Parameter, ...]]


def _number(name: str, args: str, what: str, body: str, case: Case) -> Family:
    return Family(name, args, what, body, case, NUMBERS_ONLY)


def _pair(name: str, args: str, what: str, body: str, case: Case) -> Family:
    return Family(name, args, what, body, case, PAIRS)


ARITHMETIC = (
    _number("add_{a}", "x", "returns x plus {a}", "return x + {a}", lambda a: ((5,), 5 + a)),
    _number(
        "subtract_{a}", "x", "returns x minus {a}", "return x - {a}", lambda a: ((30,), 30 - a)
    ),
    _number(
        "multiply_by_{a}",
        "x",
        "returns x times {a}",
        "return x * {a}",
        lambda a: ((4,), a + a + a + a),
    ),
    _number(
        "divide_by_{a}",
        "x",
        "divides x by {a} and rounds down",
        "return x // {a}",
        lambda a: ((7 * a + 1,), 7),
    ),
    _number(
        "remainder_by_{a}",
        "x",
        "returns the remainder of x divided by {a}",
        "return x % {a}",
        lambda a: ((3 * a + 1,), 1),
    ),
    _number(
        "power_of_{a}",
        "x",
        "raises {a} to the power of x",
        "return {a} ** x",
        lambda a: ((3,), a * a * a),
    ),
    _number(
        "square_plus_{a}",
        "x",
        "adds {a} to the square of x",
        "return x * x + {a}",
        lambda a: ((6,), 36 + a),
    ),
    _number(
        "percent_{a}",
        "x",
        "returns {a} percent of x, rounded down",
        "return x * {a} // 100",
        lambda a: ((200,), 2 * a),
    ),
    _number(
        "round_down_to_{a}",
        "x",
        "rounds x down to a multiple of {a}",
        "return x // {a} * {a}",
        lambda a: ((4 * a + 1,), 4 * a),
    ),
    _number(
        "distance_to_{a}",
        "x",
        "returns how far x is from {a}",
        "return abs(x - {a})",
        lambda a: ((a - 9,), 9),
    ),
    _number(
        "at_least_{a}",
        "x",
        "returns the larger of x and {a}",
        "return max(x, {a})",
        lambda a: ((1,), a),
    ),
    _number(
        "at_most_{a}",
        "x",
        "returns the smaller of x and {a}",
        "return min(x, {a})",
        lambda a: ((500,), a),
    ),
    _pair(
        "line_{a}_{b}",
        "x",
        "multiplies x by {a} and adds {b}",
        "return {a} * x + {b}",
        lambda a, b: ((2,), a + a + b),
    ),
    _pair(
        "price_{a}_{b}",
        "count",
        "returns the cost of count items at {a} dollars each plus {b} dollars for shipping",
        "total = count * {a}\nreturn total + {b}",
        lambda a, b: ((3,), a + a + a + b),
    ),
)
CONDITIONS = (
    _number(
        "is_multiple_of_{a}",
        "x",
        "checks if x is a multiple of {a}",
        "return x % {a} == 0",
        lambda a: ((5 * a,), True),
    ),
    _number(
        "is_above_{a}",
        "x",
        "checks if x is greater than {a}",
        "return x > {a}",
        lambda a: ((a,), False),
    ),
    _number(
        "is_below_{a}",
        "x",
        "checks if x is less than {a}",
        "return x < {a}",
        lambda a: ((a - 1,), True),
    ),
    _number(
        "passes_at_{a}",
        "score",
        'returns "pass" if score is at least {a} and "fail" if not',
        'if score >= {a}:\n    return "pass"\nreturn "fail"',
        lambda a: ((a,), "pass"),
    ),
    _number(
        "compare_to_{a}",
        "x",
        "returns 1 if x is above {a}, -1 if it is below and 0 if they are equal",
        "if x > {a}:\n    return 1\nif x < {a}:\n    return -1\nreturn 0",
        lambda a: ((a - 1,), -1),
    ),
    _pair(
        "is_between_{a}_{b}",
        "x",
        "checks if x is from {a} to {b}",
        "return {a} <= x <= {b}",
        lambda a, b: ((b,), True),
    ),
    _pair(
        "clamp_{a}_{b}",
        "x",
        "limits x to the range from {a} to {b}",
        "if x < {a}:\n    return {a}\nif x > {b}:\n    return {b}\nreturn x",
        lambda a, b: ((b + 5,), b),
    ),
    _pair(
        "choose_{a}_{b}",
        "flag",
        "returns {a} if flag is true and {b} if it is false",
        "if flag:\n    return {a}\nreturn {b}",
        lambda a, b: ((False,), b),
    ),
)
LISTS = (
    _number(
        "first_{a}",
        "items",
        "returns the first {a} items",
        "return items[:{a}]",
        lambda a: (("x" * 200,), "x" * a),
    ),
    _number(
        "last_{a}",
        "items",
        "returns the last {a} items",
        "return items[-{a}:]",
        lambda a: (("y" * 200,), "y" * a),
    ),
    _number(
        "skip_{a}",
        "items",
        "returns the items without the first {a}",
        "return items[{a}:]",
        lambda a: (("z" * (a + 2),), "zz"),
    ),
    _number(
        "add_{a}_to_all",
        "numbers",
        "adds {a} to every number",
        "return [x + {a} for x in numbers]",
        lambda a: (([1, 2],), [1 + a, 2 + a]),
    ),
    _number(
        "scale_by_{a}",
        "numbers",
        "multiplies every number by {a}",
        "return [x * {a} for x in numbers]",
        lambda a: (([1, 2],), [a, a + a]),
    ),
    _number(
        "keep_above_{a}",
        "numbers",
        "keeps the numbers greater than {a}",
        "return [x for x in numbers if x > {a}]",
        lambda a: (([a, a + 1, 150],), [a + 1, 150]),
    ),
    _number(
        "keep_below_{a}",
        "numbers",
        "keeps the numbers less than {a}",
        "return [x for x in numbers if x < {a}]",
        lambda a: (([a, a - 1, 1],), [a - 1, 1]),
    ),
    _number(
        "keep_multiples_of_{a}",
        "numbers",
        "keeps the multiples of {a}",
        "return [x for x in numbers if x % {a} == 0]",
        lambda a: (([a, a + 1, 6 * a],), [a, 6 * a]),
    ),
    _number(
        "remove_{a}",
        "numbers",
        "removes every {a} from the numbers",
        "return [x for x in numbers if x != {a}]",
        lambda a: (([a, 1, a],), [1]),
    ),
    _number(
        "count_{a}",
        "numbers",
        "counts how often {a} occurs",
        "return numbers.count({a})",
        lambda a: (([a, 1, a],), 2),
    ),
    _number(
        "count_above_{a}",
        "numbers",
        "counts the numbers greater than {a}",
        "count = 0\nfor x in numbers:\n    if x > {a}:\n        count += 1\nreturn count",
        lambda a: (([a + 1, a, 0, 150],), 2),
    ),
    _number(
        "sum_below_{a}",
        "numbers",
        "adds up the numbers less than {a}",
        "total = 0\nfor x in numbers:\n    if x < {a}:\n        total += x\nreturn total",
        lambda a: (([1, a, -3, 150],), -2),
    ),
    _number(
        "append_{a}",
        "numbers",
        "adds {a} to the end of the list",
        "return numbers + [{a}]",
        lambda a: (([1],), [1, a]),
    ),
    _number(
        "multiples_of_{a}",
        "count",
        "lists the first count multiples of {a}",
        "return [i * {a} for i in range(1, count + 1)]",
        lambda a: ((3,), [a, a + a, a + a + a]),
    ),
    _pair(
        "replace_{a}_by_{b}",
        "numbers",
        "replaces every {a} by {b}",
        "return [{b} if x == {a} else x for x in numbers]",
        lambda a, b: (([a, 1, b],), [b, 1, b]),
    ),
)
STRINGS = (
    _number(
        "repeat_{a}",
        "text",
        "repeats text {a} times",
        "return text * {a}",
        lambda a: (("o",), "o".ljust(a, "o")),
    ),
    _number(
        "is_longer_than_{a}",
        "text",
        "checks if text has more than {a} characters",
        "return len(text) > {a}",
        lambda a: (("",), False),
    ),
    _number(
        "starts_with_{a}",
        "text",
        'checks if text starts with "{a}"',
        'return text.startswith("{a}")',
        lambda a: ((f"{a}s",), True),
    ),
    _number(
        "ends_with_{a}",
        "text",
        'checks if text ends with "{a}"',
        'return text.endswith("{a}")',
        lambda a: ((f"my {a}",), True),
    ),
    _number(
        "has_{a}",
        "text",
        'checks if text contains "{a}"',
        'return "{a}" in text',
        lambda a: (("any",), False),
    ),
    _number(
        "count_{a}",
        "text",
        'counts how often the word "{a}" occurs in text',
        'return text.split().count("{a}")',
        lambda a: ((f"{a} or {a}",), 2),
    ),
    _number(
        "remove_{a}",
        "text",
        'removes "{a}" from text',
        'return text.replace("{a}", "")',
        lambda a: ((f"x{a}y",), "xy"),
    ),
    _number(
        "add_{a}",
        "items",
        'adds "{a}" to the end of the list',
        'return items + ["{a}"]',
        lambda a: ((["sun"],), ["sun", str(a)]),
    ),
    _number(
        "find_{a}",
        "items",
        'returns the position of "{a}" in the list',
        'return items.index("{a}")',
        lambda a: ((["sun", str(a)],), 1),
    ),
    _pair(
        "replace_{a}_by_{b}",
        "text",
        'replaces every "{a}" in text by "{b}"',
        'return text.replace("{a}", "{b}")',
        lambda a, b: ((f"{a} or {a}",), f"{b} or {b}"),
    ),
    _pair(
        "count_{a}_and_{b}",
        "text",
        'counts the words "{a}" and "{b}" in text',
        'words = text.split()\nreturn words.count("{a}") + words.count("{b}")',
        lambda a, b: ((f"{a} or {b} {a}",), 3),
    ),
)
FAMILIES: tuple[Family, ...] = ARITHMETIC + CONDITIONS + LISTS + STRINGS
