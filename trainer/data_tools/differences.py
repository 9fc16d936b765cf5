"""In what a row differs from its counterpart in another framework, each difference under the name of a rule."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher

import numpy as np
from transformers import PreTrainedTokenizerBase

from trainer.data_tools.dump import DumpRow

MAX_CELLS = 4_000_000
"""Of the table that an alignment fills; what is longer counts as one difference."""
OTHER_TEXT = "other text"


@dataclass(frozen=True)
class Difference:
    """`rule`: why, in words. Where: half-open ranges of tokens."""

    rule: str
    here: tuple[int, int]
    there: tuple[int, int]


@dataclass(frozen=True)
class Setting:
    """What rules ask for besides the two rows: lengths at which each side cuts, and what tokens mean."""

    tokenizer: PreTrainedTokenizerBase
    added_ids: frozenset[int]
    max_length_here: int
    max_length_there: int

    def text(self, ids: np.ndarray) -> str:
        return str(self.tokenizer.decode(ids.tolist(), clean_up_tokenization_spaces=False))


@dataclass(frozen=True)
class Change:
    """Tokens that stand in place of each other; either side may be empty."""

    here: tuple[int, int]
    there: tuple[int, int]
    ids_here: np.ndarray
    ids_there: np.ndarray
    is_end: bool
    """Nothing follows on either side."""
    starts_with_bos: bool
    """The row here does."""

    @property
    def sides(self) -> tuple[np.ndarray, np.ndarray]:
        return self.ids_here, self.ids_there


def differences(here: DumpRow, there: DumpRow, setting: Setting) -> list[Difference]:
    """None for equal ids and masks. The mask of a first token is not looked at: nothing predicts it."""
    blocks = _blocks(here.input_ids, there.input_ids)
    found = [_explained(change, setting, there) for change in _changes(here, there, blocks, setting)]
    at_here = np.concatenate([np.arange(a, a + size) for a, _, size in blocks])
    at_there = np.concatenate([np.arange(b, b + size) for _, b, size in blocks])
    return found + list(_mask_differences(here, there, at_here, at_there, setting))


Block = tuple[int, int, int]


def _blocks(here: np.ndarray, there: np.ndarray) -> list[Block]:
    """Equal stretches as (start here, start there, length), ascending; the last is empty and ends both."""
    size = min(len(here), len(there))
    is_other = here[:size] != there[:size]
    first = int(is_other.argmax()) if is_other.any() else size
    size -= first
    is_other = here[len(here) - size :][::-1] != there[len(there) - size :][::-1]
    last = int(is_other.argmax()) if is_other.any() else size
    middle_here, middle_there = here[first : len(here) - last].tolist(), there[first : len(there) - last].tolist()
    blocks = [(0, 0, first)]
    if len(middle_here) * len(middle_there) <= MAX_CELLS:
        matches = SequenceMatcher(None, middle_here, middle_there, autojunk=False).get_matching_blocks()
        blocks += [(first + a, first + b, length) for a, b, length in matches[:-1]]
    return [*blocks, (len(here) - last, len(there) - last, last), (len(here), len(there), 0)]


def _changes(here: DumpRow, there: DumpRow, blocks: list[Block], setting: Setting) -> Iterator[Change]:
    bos = setting.tokenizer.bos_token_id
    a, b = 0, 0
    for next_a, next_b, size in blocks:
        if (a, b) != (next_a, next_b):
            yield Change(
                (a, next_a),
                (b, next_b),
                here.input_ids[a:next_a],
                there.input_ids[b:next_b],
                is_end=next_a == len(here.input_ids) and next_b == len(there.input_ids),
                starts_with_bos=bos is not None and int(here.input_ids[0]) == bos,
            )
        a, b = next_a + size, next_b + size


def _explained(change: Change, setting: Setting, there: DumpRow) -> Difference:
    rule = next((name for ask in TOKEN_RULES if (name := ask(change, setting, there)) is not None), OTHER_TEXT)
    return Difference(rule, change.here, change.there)


def _bos(change: Change, setting: Setting, there: DumpRow) -> str | None:
    bos, is_first = setting.tokenizer.bos_token_id, change.here[0] <= 1 and change.there[0] <= 1
    only_here, only_there = change.ids_here.tolist(), change.ids_there.tolist()
    if bos is None or not is_first or [*only_here, *only_there] != [bos]:
        return None
    if only_here:
        return "BOS only here"
    return "BOS added twice there" if change.starts_with_bos else "BOS only there"


def _cut(change: Change, setting: Setting, there: DumpRow) -> str | None:
    if not len(change.ids_there) and len(there.input_ids) == setting.max_length_there:
        is_text = bool(setting.text(change.ids_here).strip())
        if change.is_end and is_text:
            return f"truncated at {setting.max_length_there} there"
        if change.here[0] == 0 and is_text:
            return f"cut on the left at {setting.max_length_there} there"
    if not len(change.ids_here) and change.is_end and change.here[1] == setting.max_length_here:
        return f"truncated at {setting.max_length_here} here"
    return None


def _end(change: Change, setting: Setting, there: DumpRow) -> str | None:
    if not change.is_end:
        return None
    text_here, ids_there = setting.text(change.ids_here), change.ids_there.tolist()
    if not text_here.strip() and len(ids_there) == 1 and ids_there[0] in setting.added_ids:
        return "end of sequence added there"
    if not text_here.strip() and not setting.text(change.ids_there).strip():
        return f"newline after the last end token only {'here' if text_here else 'there'}"
    return None


def _reasoning(change: Change, setting: Setting, there: DumpRow) -> str | None:
    here_has, there_has = ("think>" in setting.text(ids) for ids in change.sides)
    if here_has == there_has:
        return None
    return f"reasoning, or the tags around it, only {'here' if here_has else 'there'}"


def _system(change: Change, setting: Setting, there: DumpRow) -> str | None:
    here_has, there_has = ("system" in setting.text(ids) for ids in change.sides)
    if here_has == there_has or max(change.here[0], change.there[0]) > 2:
        return None
    return f"system prompt only {'here' if here_has else 'there'}"


def _nulls(change: Change, setting: Setting, there: DumpRow) -> str | None:
    here_has, there_has = ("null" in setting.text(ids) for ids in change.sides)
    return "absent fields filled with null there" if there_has and not here_has else None


def _same_text(change: Change, setting: Setting, there: DumpRow) -> str | None:
    is_same = setting.text(change.ids_here) == setting.text(change.ids_there)
    return "the same text cut into other tokens" if is_same else None


def _template(change: Change, setting: Setting, there: DumpRow) -> str | None:
    sides = [[token for token in ids.tolist() if token in setting.added_ids] for ids in change.sides]
    return "other chat template" if sides[0] != sides[1] else None


TokenRule = Callable[[Change, Setting, DumpRow], str | None]
TOKEN_RULES: tuple[TokenRule, ...] = (_bos, _cut, _end, _same_text, _reasoning, _system, _nulls, _template)
"""The first that knows a change of tokens names it."""


def _mask_differences(
    here: DumpRow, there: DumpRow, at_here: np.ndarray, at_there: np.ndarray, setting: Setting
) -> Iterator[Difference]:
    """`at_here`, `at_there`: where the tokens stand that are equal."""
    is_other = here.loss_mask[at_here] != there.loss_mask[at_there]
    is_other &= (at_here > 0) & (at_there > 0)
    if not is_other.any():
        return
    turns = _runs(here.loss_mask)
    rows = (0, len(here.input_ids)), (0, len(there.input_ids))
    if there.loss_mask[1:].all():
        yield Difference("whole conversation supervised there", *rows)
        return
    if not there.loss_mask[1:].any():
        yield Difference("nothing supervised there", *rows)
        return
    if len(turns) > 1 and np.array_equal(
        here.loss_mask[at_here] & (at_here >= turns[-1][0]), there.loss_mask[at_there]
    ):
        yield Difference("only the last turn supervised there", (turns[0][0], turns[-2][1]), (0, 0))
        return
    places = np.flatnonzero(is_other)
    is_first = np.diff(at_here[places], prepend=-2) != 1
    is_first |= np.diff(here.loss_mask[at_here[places]].astype(np.int8), prepend=2) != 0
    for run in np.split(places, np.flatnonzero(is_first)[1:]):
        first, end = int(at_here[run[0]]), int(at_here[run[-1]]) + 1
        rule = _mask_rule(here, first, end, turns, setting)
        yield Difference(rule, (first, end), (int(at_there[run[0]]), int(at_there[run[-1]]) + 1))


def _mask_rule(here: DumpRow, first: int, end: int, turns: list[tuple[int, int]], setting: Setting) -> str:
    """`first`, `end`: tokens supervised here alone or there alone. `turns`: what is supervised here."""
    starts, ends = {start for start, _ in turns}, {stop for _, stop in turns}
    if here.loss_mask[first]:
        if (first, end) in turns:
            return "a turn not supervised there"
        if end in ends and end - first == 1:
            return "end token not supervised there"
        return "beginning of a turn not supervised there" if first in starts else "part of a turn not supervised there"
    is_blank = not setting.text(here.input_ids[first:end]).strip()
    if first in ends and is_blank:
        return "trailing newline after the end token supervised there"
    if end in starts:
        return f"{'newline in front' if is_blank else 'header'} of a turn supervised there"
    return "text outside of trained turns supervised there"


def _runs(mask: np.ndarray) -> list[tuple[int, int]]:
    """Half-open ranges of what is set."""
    edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0))
    return [(int(first), int(end)) for first, end in edges.reshape(-1, 2)]
