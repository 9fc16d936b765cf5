"""Rules that users write about metrics: `kl > 10 or completions/clipped_ratio > 0.3 for 3: snapshot, rollback`.

    rule       = condition ["for" STEPS] ":" action {"," action}
    condition  = all {"or" all}
    all        = term {"and" term}
    term       = "(" condition ")" | operand (">" | ">=" | "<" | "<=" | "==" | "!=") operand
    operand    = number | metric

A metric stands bare (`train/time(s)`, `loss@p99`) or, with blanks or other signs in its name, in quotes. `for` counts
steps in a row in which the whole condition holds.
"""

import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

ACTIONS = ("warn", "snapshot", "skip", "rollback", "stop")
COMPARISONS: Mapping[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
}
_WORDS = ("and", "or", "for")
_TOKEN = re.compile(
    r"""\s*(?:
    (?P<number>[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?(?![\w/@.]))
    | (?P<quoted>"[^"]*"|'[^']*')
    | (?P<name>[A-Za-z_][\w./@-]*(?:[(\[][^()\[\]\s<>=!:,]*[)\]][\w./@-]*)*)
    | (?P<comparison>>=|<=|==|!=|>|<)
    | (?P<sign>[():,])
    )""",
    re.VERBOSE,
)


class RuleError(ValueError):
    """A rule that cannot be read; the message quotes it and says the column and what to write."""


@dataclass(frozen=True)
class _Comparison:
    left: str | float
    comparison: str
    right: str | float

    def holds(self, values: Mapping[str, float]) -> bool:
        left = values.get(self.left) if isinstance(self.left, str) else self.left
        right = values.get(self.right) if isinstance(self.right, str) else self.right
        return left is not None and right is not None and COMPARISONS[self.comparison](left, right)

    def keys(self) -> Iterator[str]:
        yield from (side for side in (self.left, self.right) if isinstance(side, str))


@dataclass(frozen=True)
class _Combination:
    """Terms that must hold all (`and`), or of which one must (`or`)."""

    is_all: bool
    terms: tuple["_Condition", ...]

    def holds(self, values: Mapping[str, float]) -> bool:
        holding = (term.holds(values) for term in self.terms)
        return all(holding) if self.is_all else any(holding)

    def keys(self) -> Iterator[str]:
        for term in self.terms:
            yield from term.keys()


_Condition = _Comparison | _Combination


@dataclass(frozen=True)
class UserRule:
    """A condition on the metrics of one step, how many steps in a row it must hold, and what to do then.

    A metric that a step does not have makes its comparison false: `keys` lets the caller warn of one never seen.
    """

    text: str
    condition: _Condition
    num_steps: int
    actions: tuple[str, ...]
    keys: tuple[str, ...]

    def holds(self, values: Mapping[str, float]) -> bool:
        return self.condition.holds(values)

    @property
    def upper_limit(self) -> tuple[str, float] | None:
        """(metric, number) of a rule that is `metric > number` at one step; None for any other."""
        condition = self.condition
        if not isinstance(condition, _Comparison) or condition.comparison != ">" or self.num_steps != 1:
            return None
        left, right = condition.left, condition.right
        return (left, right) if isinstance(left, str) and isinstance(right, float) else None


@dataclass(frozen=True)
class _Token:
    kind: str
    """number, name, quoted, comparison, word, sign or end."""
    text: str
    column: int


def parse_rule(text: str) -> UserRule:
    """Raises `RuleError`."""
    return _Parser(text).rule()


class _Parser:
    """One method per line of the grammar; `_next` is the token that has not been taken yet."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = self._split()
        self._next = next(self._tokens)

    def rule(self) -> UserRule:
        condition = self._condition()
        num_steps = self._num_steps() if self._accept("for") else 1
        self._expect(":", "write ':' and the actions after the condition, e.g. ': snapshot, rollback'")
        actions = [self._action()]
        while self._accept(","):
            actions.append(self._action())
        if self._next.kind != "end":
            raise self._error("nothing may follow the actions; separate them by commas")
        if len(set(actions)) < len(actions):
            raise self._error("an action is named twice; leave one out")
        keys = tuple(dict.fromkeys(condition.keys()))
        return UserRule(self._text.strip(), condition, num_steps, tuple(actions), keys)

    def _condition(self) -> _Condition:
        return self._chain("or", lambda: self._chain("and", self._term))

    def _chain(self, word: str, part: Callable[[], _Condition]) -> _Condition:
        terms = [part()]
        while self._accept(word):
            terms.append(part())
        return terms[0] if len(terms) == 1 else _Combination(word == "and", tuple(terms))

    def _term(self) -> _Condition:
        if self._accept("("):
            condition = self._condition()
            self._expect(")", "close the parenthesis; 'for' stands once, behind the whole condition")
            return condition
        column = self._next.column
        left = self._operand()
        if self._next.kind != "comparison":
            raise self._error("write a comparison, e.g. 'kl > 10'; quote a metric whose name has other signs")
        comparison = self._take().text
        right = self._operand()
        if not isinstance(left, str) and not isinstance(right, str):
            raise self._error("compare a metric: two numbers never change", column)
        return _Comparison(left, comparison, right)

    def _operand(self) -> str | float:
        if self._next.kind == "number":
            return float(self._take().text)
        if self._next.kind == "name":
            return self._take().text
        if self._next.kind == "quoted":
            return self._take().text[1:-1]
        raise self._error("write the name of a metric or a number here")

    def _num_steps(self) -> int:
        if not self._next.text.isdigit() or int(self._next.text) < 1:
            raise self._error("write a whole number of steps, at least 1, after 'for'")
        return int(self._take().text)

    def _action(self) -> str:
        if self._next.text not in ACTIONS:
            raise self._error(f"write one of {', '.join(ACTIONS)}")
        return self._take().text

    def _accept(self, text: str) -> bool:
        if self._next.kind not in ("word", "sign") or self._next.text != text:
            return False
        self._take()
        return True

    def _expect(self, text: str, fix: str) -> None:
        if not self._accept(text):
            raise self._error(fix)

    def _take(self) -> _Token:
        taken, self._next = self._next, next(self._tokens)
        return taken

    def _split(self) -> Iterator[_Token]:
        place, end = 0, len(self._text.rstrip())
        while place < end:
            match = _TOKEN.match(self._text, place)
            if match is None:
                place += len(self._text[place:]) - len(self._text[place:].lstrip())
                raise self._error(
                    f"{self._text[place]!r} cannot stand here; a metric with such a sign needs quotes", place + 1
                )
            kind = str(match.lastgroup)
            text = match.group(kind)
            yield _Token("word" if kind == "name" and text in _WORDS else kind, text, match.start(kind) + 1)
            place = match.end()
        while True:
            yield _Token("end", "", end + 1)

    def _error(self, fix: str, column: int | None = None) -> RuleError:
        found = f"found {self._next.text!r}" if column is None and self._next.text else "at the end"
        place = f"column {self._next.column}, {found}" if column is None else f"column {column}"
        return RuleError(f"rule {self._text.strip()!r}, {place}: {fix}")
