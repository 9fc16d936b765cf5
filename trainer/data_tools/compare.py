"""Token ids and masks row by row with those that another framework prepared: how often they differ, where and why."""

import bisect
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from trainer.data.conversation import IDS_KEY, LABELS_KEY, MASK_KEY
from trainer.data.preview import visible
from trainer.data.readers import iter_rows
from trainer.data.rows import UnusableError, location
from trainer.data.samples import Samples
from trainer.data.token_rows import tokens_in
from trainer.data.tokens import Encoded
from trainer.data_tools.differences import Difference, Setting, differences, num_alike
from trainer.data_tools.frameworks import FRAMEWORKS
from trainer.errors import DataError

NUM_PLACES = 3
NUM_BEFORE = 12
"""Tokens shown in front of a difference."""
ONLY_HERE, ONLY_THERE, MOVED = "row missing there", "row missing here", "order differs"
LONG = "row missing there, longer than all there"
SERVED, LEFT_OUT = "earlier turn as a server renders it only here", "earlier turn not supervised there"
Tree = dict[str, Any]


def compare(
    samples: Samples,
    dump: list[Encoded],
    tokenizer: PreTrainedTokenizerBase,
    *,
    framework: str,
    max_length: int,
    is_split: bool = False,
) -> Tree:
    """Counts and first places by rule, for JSON. `max_length`: at which samples are cut here.

    A conversation that is taken apart is one row, and the turn is named in whose sample it differs first; of a text
    that `is_split` each sample is one.
    """
    last = [number for number in range(len(samples)) if is_split or samples.beside(number)[-1] == number]
    where = [samples.location(number) for number in last]
    beside = [[number] if is_split else samples.beside(number).tolist() for number in last]
    turns = [[Encoded(*samples.sample(number)) for number in numbers] for numbers in beside]
    rows = [_whole(parts) for parts in turns]
    pairs = match([row.input_ids for row in rows], [row.input_ids for row in dump])
    setting = Setting(
        tokenizer,
        frozenset(tokenizer.added_tokens_decoder),
        max_length_here=max_length,
        max_length_there=max(len(row.input_ids) for row in dump),
    )
    num_equal, rules = 0, defaultdict[str, list[str]](list)
    for here, there in pairs:
        parts, row, other = turns[here], rows[here], dump[there]
        found = [(_turn(parts, item), row, item) for item in differences(row, other, setting)]
        found += [(number, parts[number - 1], item) for number, item in _served_otherwise(parts, row, other)]
        place = f"{where[here]}, row {there + 1} there"
        num_equal += not found
        first = {entry[-1].rule: entry for entry in reversed(found)}
        for rule, (number, own, item) in reversed(first.items()):
            turn = f", trained turn {number} of {len(parts)}" if len(parts) > 1 else ""
            words = in_words(own, other, item, setting) if len(rules[rule]) < NUM_PLACES else ""
            rules[rule].append(f"{place}{turn}, {words}")
    for here, there in moved(pairs):
        rules[MOVED].append(f"{where[here]} is row {there + 1} there")
    for here in sorted(set(range(len(rows))) - {here for here, _ in pairs}):
        is_long = len(rows[here].input_ids) > setting.max_length_there
        rules[LONG if is_long else ONLY_HERE].append(where[here])
    for there in sorted(set(range(len(dump))) - {there for _, there in pairs}):
        rules[ONLY_THERE].append(f"row {there + 1} there: {_excerpt(setting, dump[there].input_ids)}")
    told = {rule: {"rows": len(places), "places": places[:NUM_PLACES]} for rule, places in rules.items()}
    numbers = {"rows_here": len(rows), "rows_there": len(dump), "equal": num_equal}
    return {"framework": framework, **numbers, "rules": told}


def _whole(turns: list[Encoded]) -> Encoded:
    """The last sample, which holds all messages, with what those supervise that it begins with."""
    input_ids, loss_mask = turns[-1].input_ids, turns[-1].loss_mask.copy()
    for turn in turns[:-1]:
        if num_alike(turn.input_ids, input_ids) == len(turn.input_ids):
            loss_mask[: len(turn.input_ids)] |= turn.loss_mask
    return Encoded(input_ids, loss_mask)


def _turn(turns: list[Encoded], difference: Difference) -> int:
    """The first, from 1, in whose sample it stands."""
    position, _ = difference.here
    return next((number for number, turn in enumerate(turns, 1) if position < len(turn.input_ids)), len(turns))


def _served_otherwise(turns: list[Encoded], whole: Encoded, there: Encoded) -> Iterator[tuple[int, Difference]]:
    """Turns, from 1, that are rendered otherwise once others follow, and are not in the row there as they are here."""
    for number, turn in enumerate(turns[:-1], start=1):
        size = len(turn.input_ids)
        if num_alike(turn.input_ids, whole.input_ids) == size:
            continue
        if (first := num_alike(turn.input_ids, there.input_ids)) < size:
            yield number, Difference(SERVED, (first, size), (first, len(there.input_ids)))
        elif len(missing := np.flatnonzero(turn.loss_mask & ~there.loss_mask[:size])):
            first = int(missing[0])
            yield number, Difference(LEFT_OUT, (first, size), (first, size))


def in_words(here: Encoded, there: Encoded, difference: Difference, setting: Setting) -> str:
    """The first differing token on both sides, and the text in front of it."""
    (a, end_a), (b, end_b) = difference.here, difference.there
    before = _excerpt(setting, here.input_ids[max(0, a - NUM_BEFORE) : a])
    sides = []
    for side, row, first, end in (("here", here, a, end_a), ("there", there, b, end_b)):
        if first == end:
            sides.append(f"nothing {side}")
        else:
            kept = "supervised" if row.loss_mask[first] else "not supervised"
            token = _excerpt(setting, row.input_ids[first : first + 1])
            sides.append(f"{side} token {first} is {token} ({int(row.input_ids[first])}), {kept}")
    return f"after {before}: {'; '.join(sides)}"


def _excerpt(setting: Setting, ids: Any) -> str:
    return repr(visible(setting.text(ids[:40])))


def as_lines(tree: Tree) -> Iterator[str]:
    """The tree as text for a terminal."""
    name = tree["framework"]
    yield f"{tree['rows_here']:,} rows here, {tree['rows_there']:,} of {name}; ids and mask equal: {tree['equal']:,}"
    for rule, found in sorted(tree["rules"].items(), key=lambda item: -item[1]["rows"]):
        fixes = FRAMEWORKS[name].fixes.items()
        fix = next((f" (alike with {fix})" for start, fix in fixes if rule.startswith(start)), "")
        yield f"{found['rows']:,} rows: {rule}{fix}"
        yield from (f"  {visible(place)}" for place in found["places"])


Pairs = list[tuple[int, int]]
STRETCH = 5
"""Tokens that are looked at together."""
FACTOR = np.uint64(6364136223846793005)
MIN_COMMON = 0.5
"""Share of the shorter row's tokens that rows without a stretch of their own must have in common."""


def match(here: Sequence[np.ndarray], there: Sequence[np.ndarray]) -> Pairs:
    """Which row here is which row there: by equal ids, else by stretches of tokens that no other row has. Pairs of row
    numbers, in the order of `here`; each row at most once.

    A shuffled dump, rows that one side lacks and rows that differ in all turns are matched alike.
    """
    pairs = _equal(here, there)
    for find in (_by_stretches, _in_order):
        taken_here, taken_there = {a for a, _ in pairs}, {b for _, b in pairs}
        rest_here = [number for number in range(len(here)) if number not in taken_here]
        rest_there = [number for number in range(len(there)) if number not in taken_there]
        if rest_here and rest_there:
            found = find([here[number] for number in rest_here], [there[number] for number in rest_there])
            pairs += [(rest_here[a], rest_there[b]) for a, b in found]
    return sorted(pairs)


def moved(pairs: Pairs) -> Pairs:
    """The fewest pairs without which the order is the same on both sides."""
    ends: list[int] = []
    ranks = []
    for _, there in pairs:
        rank = bisect.bisect_left(ends, there)
        ends[rank : rank + 1] = [there]
        ranks.append(rank)
    out, expected = [], len(ends) - 1
    for pair, rank in zip(reversed(pairs), reversed(ranks), strict=True):
        if rank == expected:
            expected -= 1
        else:
            out.append(pair)
    return out[::-1]


def _equal(here: Sequence[np.ndarray], there: Sequence[np.ndarray]) -> Pairs:
    waiting: dict[bytes, deque[int]] = defaultdict(deque)
    for number, ids in enumerate(there):
        waiting[ids.tobytes()].append(number)
    return [(number, waiting[key].popleft()) for number, ids in enumerate(here) if waiting.get(key := ids.tobytes())]


def _by_stretches(here: Sequence[np.ndarray], there: Sequence[np.ndarray]) -> Pairs:
    keys_here, rows_here = _stretches(here)
    keys_there, rows_there = _stretches(there)
    keys, first, counts = np.unique(keys_here, return_index=True, return_counts=True)
    keys, owners = keys[counts == 1], rows_here[first[counts == 1]]
    if not len(keys):
        return []
    found = np.searchsorted(keys, keys_there).clip(max=len(keys) - 1)
    is_known = keys[found] == keys_there
    codes, votes = np.unique(owners[found[is_known]] * len(there) + rows_there[is_known], return_counts=True)
    pairs: dict[int, int] = {}
    taken: set[int] = set()
    for code in codes[np.argsort(-votes, kind="stable")].tolist():
        a, b = divmod(code, len(there))
        if a not in pairs and b not in taken:
            pairs[a] = b
            taken.add(b)
    return list(pairs.items())


def _stretches(rows: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Hashes of the different stretches of each row, uint64, and their row numbers, int64."""
    keys = [_hashes(ids) for ids in rows]
    return np.concatenate(keys), np.repeat(np.arange(len(rows)), [len(found) for found in keys])


def _hashes(ids: np.ndarray) -> np.ndarray:
    num = max(0, len(ids) - STRETCH + 1)
    key = np.zeros(num, dtype=np.uint64)
    for offset in range(STRETCH):
        key = key * FACTOR + ids[offset : offset + num].astype(np.uint64) + np.uint64(1)
    return np.unique(key)


def _in_order(here: Sequence[np.ndarray], there: Sequence[np.ndarray]) -> Pairs:
    pairs = zip(range(len(here)), range(len(there)), strict=False)
    return [(a, b) for a, b in pairs if _common(here[a], there[b]) >= MIN_COMMON]


def _common(here: np.ndarray, there: np.ndarray) -> float:
    return (Counter(here.tolist()) & Counter(there.tolist())).total() / min(len(here), len(there))


MASK_KEYS = (LABELS_KEY, MASK_KEY, "assistant_masks", "completion_mask")
"""The first that a row has is taken: a framework's labels say what becomes of its masks."""


def read_dump(path: Path) -> list[Encoded]:
    """All rows, in memory. Raises `DataError` as `file:line: reason`."""
    rows = []
    for row in iter_rows(path, (IDS_KEY, *MASK_KEYS)):
        try:
            if row.problem is not None:
                raise row.problem
            rows.append(tokens_in(row.record, [key for key in MASK_KEYS if row.record.get(key) is not None][:1]))
        except UnusableError as error:
            raise DataError(f"{location(path, row.line)}: {error}; see data compare --dump-script") from error
    if not rows:
        raise DataError(f"'{path}' has no rows")
    return rows
