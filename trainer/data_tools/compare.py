"""Token ids and masks row by row with those that another framework prepared: how often they differ, where and why."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedTokenizerBase

from trainer.data.preview import visible
from trainer.data.samples import Samples
from trainer.data.tokens import Encoded
from trainer.data_tools.differences import Difference, Setting, differences
from trainer.data_tools.frameworks import FRAMEWORKS
from trainer.data_tools.matching import match, moved

NUM_PLACES = 3
NUM_BEFORE = 12
"""Tokens shown in front of a difference."""
ONLY_HERE, ONLY_THERE, MOVED = "row missing there", "row missing here", "order differs"
APART = "each turn is a sample of its own here, the last one is compared"
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

    Of a conversation that is taken apart the last sample is compared, which holds all of it; of a text that `is_split`
    all are.
    """
    ids = [number for number in range(len(samples)) if is_split or samples.beside(number)[-1] == number]
    rows, where = [Encoded(*samples.sample(number)) for number in ids], [samples.location(number) for number in ids]
    pairs = match([row.input_ids for row in rows], [row.input_ids for row in dump])
    setting = Setting(
        tokenizer,
        frozenset(tokenizer.added_tokens_decoder),
        max_length_here=max_length,
        max_length_there=max(len(row.input_ids) for row in dump),
    )
    num_equal, rules = 0, defaultdict[str, list[str]](list)
    for here, there in pairs:
        found = differences(rows[here], dump[there], setting)
        place = f"{where[here]}, row {there + 1} there"
        num_equal += not found
        for rule, difference in reversed({item.rule: item for item in reversed(found)}.items()):
            is_told = len(rules[rule]) < NUM_PLACES
            words = in_words(rows[here], dump[there], difference, setting) if is_told else ""
            rules[rule].append(f"{place}, {words}")
        if len(samples.beside(ids[here])) > 1 and not is_split:
            rules[APART].append(place)
    for here, there in moved(pairs):
        rules[MOVED].append(f"{where[here]} is row {there + 1} there")
    for here in sorted(set(range(len(rows))) - {here for here, _ in pairs}):
        rules[ONLY_HERE].append(where[here])
    for there in sorted(set(range(len(dump))) - {there for _, there in pairs}):
        rules[ONLY_THERE].append(f"row {there + 1} there: {_excerpt(setting, dump[there].input_ids)}")
    told = {rule: {"rows": len(places), "places": places[:NUM_PLACES]} for rule, places in rules.items()}
    numbers = {"rows_here": len(rows), "rows_there": len(dump), "equal": num_equal}
    return {"framework": framework, **numbers, "rules": told}


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
