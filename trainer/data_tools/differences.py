"""In what a row differs from its counterpart in another framework, each difference under the name of a rule."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher

import numpy as np
from transformers import PreTrainedTokenizerBase

from trainer.data.tokens import Encoded

MAX_CELLS = 4_000_000
"""Of the table that an alignment fills; what is longer counts as one difference."""
NUM_BETWEEN = 8
"""Equal tokens between changes that may be one."""
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


@dataclass(frozen=True, eq=False)
class TokenChange:
    """Tokens of two rows that stand in place of each other: half-open ranges, either may be empty."""

    row_here: np.ndarray
    row_there: np.ndarray
    at_here: tuple[int, int]
    at_there: tuple[int, int]

    @property
    def sides(self) -> tuple[np.ndarray, np.ndarray]:
        return self.row_here[slice(*self.at_here)], self.row_there[slice(*self.at_there)]

    @property
    def is_end(self) -> bool:
        return self.at_here[1] == len(self.row_here) and self.at_there[1] == len(self.row_there)


def differences(here: Encoded, there: Encoded, setting: Setting) -> list[Difference]:
    """None for equal ids and masks. The mask of a first token is not looked at: nothing predicts it."""
    blocks = _blocks(here.input_ids, there.input_ids)
    found = []
    for group in _groups(blocks):
        alone = [_explained(here, there, change, setting) for change in itertools.pairwise(group)]
        if any(item.rule == OTHER_TEXT for item in alone):  # what belongs together was torn apart by equal tokens
            alone = [_explained(here, there, (group[0], group[-1]), setting)]
        found += alone
    at_here = np.concatenate([np.arange(a, a + size) for a, _, size in blocks])
    at_there = np.concatenate([np.arange(b, b + size) for _, b, size in blocks])
    return found + list(_mask_differences(here, there, at_here, at_there, setting))


def num_alike(first: np.ndarray, second: np.ndarray) -> int:
    """Tokens from the beginning on."""
    size = min(len(first), len(second))
    is_other = first[:size] != second[:size]
    return int(is_other.argmax()) if is_other.any() else size


Block = tuple[int, int, int]
"""An equal stretch: (start here, start there, length)."""


def _blocks(here: np.ndarray, there: np.ndarray) -> list[Block]:
    """Ascending; the first begins both, the last is empty and ends both. What is inserted stands as late as it can."""
    first = num_alike(here, there)
    last = num_alike(here[first:][::-1], there[first:][::-1])
    middle_here, middle_there = here[first : len(here) - last].tolist(), there[first : len(there) - last].tolist()
    blocks = [(0, 0, first)]
    if len(middle_here) * len(middle_there) <= MAX_CELLS:
        matches = SequenceMatcher(None, middle_here, middle_there, autojunk=False).get_matching_blocks()
        blocks += [(first + a, first + b, length) for a, b, length in matches[:-1]]
    blocks += [(len(here) - last, len(there) - last, last), (len(here), len(there), 0)]
    for number in range(len(blocks) - 1):
        (a, b, size), (next_a, next_b, next_size) = blocks[number : number + 2]
        row, start, end = (there, b + size, next_b) if a + size == next_a else (here, a + size, next_a)
        if (a + size == next_a) != (b + size == next_b):
            slide = 0
            while slide < next_size and row[start + slide] == row[end + slide]:
                slide += 1
            blocks[number] = (a, b, size + slide)
            blocks[number + 1] = (next_a + slide, next_b + slide, next_size - slide)
    return blocks


def _groups(blocks: list[Block]) -> Iterator[list[Block]]:
    """Blocks with changes between them, where those inside are short."""
    group: list[Block] = []
    for block, following in itertools.pairwise(blocks):
        (a, b, size), (next_a, next_b, _) = block, following
        if (a + size, b + size) == (next_a, next_b):
            continue
        if group and (group[-1] != block or size > NUM_BETWEEN):
            yield group
            group = []
        group = group or [block]
        group.append(following)
    if group:
        yield group


def _explained(here: Encoded, there: Encoded, around: tuple[Block, Block], setting: Setting) -> Difference:
    """Why the tokens between two blocks differ."""
    (a, b, size), (end_a, end_b, _) = around
    change = TokenChange(here.input_ids, there.input_ids, (a + size, end_a), (b + size, end_b))
    rule = next((name for ask in TOKEN_RULES if (name := ask(change, setting)) is not None), OTHER_TEXT)
    return Difference(rule, change.at_here, change.at_there)


def _bos(change: TokenChange, setting: Setting) -> str | None:
    bos, (here, there) = setting.tokenizer.bos_token_id, change.sides
    if bos is None or max(change.at_here[0], change.at_there[0]) > 1 or [*here.tolist(), *there.tolist()] != [bos]:
        return None
    if len(here):
        return "BOS only here"
    return "BOS added twice there" if change.row_here[0] == bos else "BOS only there"


def _cut(change: TokenChange, setting: Setting) -> str | None:
    here, there = change.sides
    if not len(there) and len(change.row_there) == setting.max_length_there and setting.text(here).strip():
        if change.is_end:
            return f"truncated at {setting.max_length_there} there"
        if change.at_here[0] == 0:
            return f"cut on the left at {setting.max_length_there} there"
    if not len(here) and change.is_end and len(change.row_here) == setting.max_length_here:
        return f"truncated at {setting.max_length_here} here"
    return None


def _end(change: TokenChange, setting: Setting) -> str | None:
    here, there = change.sides
    if not change.is_end or setting.text(here).strip():
        return None
    if len(there) == 1 and int(there[0]) in setting.added_ids:
        return "end of sequence added there"
    if not setting.text(there).strip():
        return f"newline after the last end token only {'here' if len(here) else 'there'}"
    return None


def _same_text(change: TokenChange, setting: Setting) -> str | None:
    here, there = map(setting.text, change.sides)
    return "the same text cut into other tokens" if here == there else None


def _words(change: TokenChange, setting: Setting) -> str | None:
    """What only one side says."""
    is_early = max(change.at_here[0], change.at_there[0]) <= 2
    for word, is_asked, rule in (
        ("think>", True, "reasoning, or the tags around it, only {}"),
        ("system", is_early, "system prompt only {}"),
        ("null", True, "absent fields filled with null {}"),
    ):
        here, there = (word in setting.text(ids) for ids in change.sides)
        if is_asked and here != there and (word != "null" or there):
            return rule.format("here" if here else "there")
    return None


def _inside(change: TokenChange, setting: Setting) -> str | None:
    """A message that lost its end with others behind it."""
    if not len(change.sides[1]) and len(change.row_there) == setting.max_length_there:
        return f"messages cut to make {setting.max_length_there} tokens there"
    return None


def _template(change: TokenChange, setting: Setting) -> str | None:
    here, there = ([token for token in ids.tolist() if token in setting.added_ids] for ids in change.sides)
    if here != there:
        return "other chat template"
    before = setting.text(change.row_here[: change.at_here[0]])
    return "other system prompt" if "system" in before and "user" not in before else None


TokenRule = Callable[[TokenChange, Setting], str | None]
TOKEN_RULES: tuple[TokenRule, ...] = (_bos, _cut, _end, _same_text, _words, _inside, _template)
"""The first that knows a change of tokens names it."""


def _mask_differences(
    here: Encoded, there: Encoded, at_here: np.ndarray, at_there: np.ndarray, setting: Setting
) -> Iterator[Difference]:
    """`at_here`, `at_there`: where the tokens stand that are equal."""
    is_other = here.loss_mask[at_here] != there.loss_mask[at_there]
    is_other &= (at_here > 0) & (at_there > 0)
    if not is_other.any():
        return
    turns = _runs(here.loss_mask)
    if there.loss_mask[1:].all() or not there.loss_mask[1:].any():
        what = "whole conversation" if there.loss_mask[1:].all() else "nothing"
        yield Difference(f"{what} supervised there", (0, len(here.input_ids)), (0, len(there.input_ids)))
        return
    is_own = here.loss_mask[at_here]
    if len(turns) > 1 and np.array_equal(is_own & (at_here >= turns[-1][0]), is_own & there.loss_mask[at_there]):
        yield Difference("only the last turn supervised there", (turns[0][0], turns[-2][1]), (0, 0))
        is_other &= ~is_own
    places = np.flatnonzero(is_other)
    if not len(places):
        return
    is_first = np.diff(at_here[places], prepend=-2) != 1
    is_first |= np.diff(here.loss_mask[at_here[places]].astype(np.int8), prepend=2) != 0
    for run in np.split(places, np.flatnonzero(is_first)[1:]):
        first, end = int(at_here[run[0]]), int(at_here[run[-1]]) + 1
        rule = _mask_rule(here, first, end, turns, setting)
        yield Difference(rule, (first, end), (int(at_there[run[0]]), int(at_there[run[-1]]) + 1))


def _mask_rule(here: Encoded, first: int, end: int, turns: list[tuple[int, int]], setting: Setting) -> str:
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
