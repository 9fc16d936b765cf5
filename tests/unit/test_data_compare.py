"""`data compare`: what another framework prepared otherwise is found, counted, and explained by a named rule."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizer_fixtures as fixtures
from prepared import run, write_rows

from trainer.cli.data import main
from trainer.config import RowKeys
from trainer.data.row_encoder import PrepareOptions
from trainer.data.samples import Samples
from trainer.data.tokens import Encoded
from trainer.data_tools.compare import compare, match, moved, read_dump
from trainer.data_tools.differences import Setting, differences
from trainer.data_tools.frameworks import FRAMEWORKS
from trainer.errors import DataError

NUM_ROWS = 6
TOKENIZER = fixtures.make_tokenizer(fixtures.CHATML)
END, NEWLINE = TOKENIZER.convert_tokens_to_ids("<|im_end|>"), TOKENIZER.encode("\n")[0]
Change = Callable[[list[int], list[bool]], tuple[list[int], list[bool]]]


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Samples:
    directory = tmp_path_factory.mktemp("compare")
    rows = [conversation(number) for number in range(NUM_ROWS)]
    options = PrepareOptions(RowKeys(), max_length=512)
    return Samples([run(write_rows(directory / "a.jsonl", *rows), options, cache=directory).whole("a")])


def conversation(number: int) -> dict[str, Any]:
    said = [f"first question {number}", f"answer {number} it is", f"and after {number * 7}?", f"that is {number + 99}"]
    roles = ("user", "assistant") * 2
    return {"messages": [{"role": role, "content": text} for role, text in zip(roles, said, strict=True)]}


def rules(samples: Samples, change: Change) -> dict[str, int]:
    """Rows by rule, where all rows there are changed alike."""
    dump = []
    for number in range(NUM_ROWS):
        ids, mask = change(*(part.tolist() for part in samples.sample(number)))
        dump.append(Encoded(np.array(ids, dtype=np.int32), np.array(mask)))
    return found(samples, dump)


def found(samples: Samples, dump: list[Encoded]) -> dict[str, int]:
    tree = compare(samples, dump, TOKENIZER, framework="trl", max_length=512)
    return {rule: entry["rows"] for rule, entry in tree["rules"].items()}


def ends(ids: list[int], mask: list[bool]) -> list[int]:
    """Where the end tokens of assistant turns stand."""
    return [index for index, token in enumerate(ids) if token == END and mask[index]]


def text_before(ids: list[int], mask: list[bool], text: str) -> tuple[list[int], list[bool]]:
    added = TOKENIZER.encode(text)
    return [*added, *ids], [False] * len(added) + mask


def with_labels_at(shift: int, value: bool) -> Change:
    def change(ids: list[int], mask: list[bool]) -> tuple[list[int], list[bool]]:
        changed = list(mask)
        for index in ends(ids, mask):
            changed[index + shift] = value
        return ids, changed

    return change


def without_first_turn(ids: list[int], mask: list[bool]) -> tuple[list[int], list[bool]]:
    last = max(index for index in range(1, len(ids)) if mask[index] and not mask[index - 1])
    return ids, [kept and index >= last for index, kept in enumerate(mask)]


def last_turn_and_newlines(ids: list[int], mask: list[bool]) -> tuple[list[int], list[bool]]:
    """What LLaMA-Factory trains with `mask_history: true`."""
    return with_labels_at(1, True)(*without_first_turn(ids, mask))


def cut_in_two_places(ids: list[int], mask: list[bool]) -> tuple[list[int], list[bool]]:
    """What LLaMA-Factory's `cutoff_len` leaves: the ends of the last question and of its answer are gone."""
    return [*ids[:24], *ids[-12:-6]], [*mask[:24], *mask[-12:-6]]


def as_other_template(ids: list[int], mask: list[bool]) -> tuple[list[int], list[bool]]:
    other = TOKENIZER.convert_tokens_to_ids("<|eot_id|>")
    return [other if token == END else token for token in ids], mask


CHANGES: dict[str, tuple[Change, str]] = {
    "equal": (lambda ids, mask: (ids, mask), ""),
    "first label": (lambda ids, mask: (ids, [True, *mask[1:]]), ""),
    "newline": (with_labels_at(1, True), "trailing newline after the end token supervised there"),
    "no end": (with_labels_at(0, False), "end token not supervised there"),
    "whole": (lambda ids, mask: (ids, [True] * len(ids)), "whole conversation supervised there"),
    "nothing": (lambda ids, mask: (ids, [False] * len(ids)), "nothing supervised there"),
    "last": (without_first_turn, "only the last turn supervised there"),
    "bos": (lambda ids, mask: text_before(ids, mask, "<s>"), "BOS only there"),
    "eos": (lambda ids, mask: ([*ids, END], [*mask, True]), "end of sequence added there"),
    "stripped": (lambda ids, mask: (ids[:-1], mask[:-1]), "newline after the last end token only here"),
    "cut": (lambda ids, mask: (ids[:20], mask[:20]), "truncated at 20 there"),
    "left": (lambda ids, mask: (ids[-20:], mask[-20:]), "cut on the left at 20 there"),
    "system": (
        lambda ids, mask: text_before(ids, mask, "<|im_start|>system\nBe kind.<|im_end|>\n"),
        "system prompt only there",
    ),
    "template": (as_other_template, "other chat template"),
    "text": (lambda ids, mask: ([*ids[:4], ids[4] + 1, *ids[5:]], mask), "other text"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_difference_has_its_rule(samples: Samples, name: str) -> None:
    change, rule = CHANGES[name]
    assert rules(samples, change) == ({rule: NUM_ROWS} if rule else {})


def test_what_llamafactory_and_axolotl_leave_out_is_named(samples: Samples) -> None:
    assert rules(samples, last_turn_and_newlines) == {
        "only the last turn supervised there": NUM_ROWS,
        "trailing newline after the end token supervised there": NUM_ROWS,
    }
    assert rules(samples, cut_in_two_places) == {
        "messages cut to make 30 tokens there": NUM_ROWS,
        "truncated at 30 there": NUM_ROWS,
    }
    rows = [Encoded(*samples.sample(number)) for number in range(NUM_ROWS)]
    longest = max(len(row.input_ids) for row in rows)
    shorter = [row for row in rows if len(row.input_ids) < longest]
    assert found(samples, shorter) == {"row missing there, longer than all there": NUM_ROWS - len(shorter)}


def test_words_that_another_framework_puts_into_a_system_prompt_are_named(samples: Samples) -> None:
    ids, mask = (part.tolist() for part in samples.sample(0))
    sides = []
    for words in ("Be brief.", "You are new.\n\nBe brief."):
        changed = text_before(ids, mask, f"<|im_start|>system\n{words}<|im_end|>\n")
        sides.append(Encoded(np.array(changed[0], dtype=np.int32), np.array(changed[1])))
    setting = Setting(TOKENIZER, frozenset(TOKENIZER.added_tokens_decoder), max_length_here=512, max_length_there=512)
    assert [item.rule for item in differences(*sides, setting)] == ["other system prompt"]


def test_several_differences_are_told_apart_and_shown(samples: Samples) -> None:
    ids, mask = samples.sample(2)
    extra = TOKENIZER.bos_token_id
    there = Encoded(np.array([extra, extra, *ids], dtype=np.int32), np.array([False, False, *mask[:-1], True]))
    rows = [Encoded(*samples.sample(number)) for number in range(NUM_ROWS)]
    tree = compare(samples, [*rows[:2], there, *rows[3:]], TOKENIZER, framework="trl", max_length=512)
    assert tree["equal"] == NUM_ROWS - 1
    [(rule, entry), _] = tree["rules"].items()
    assert rule == "other chat template", "two BOS where none was"
    assert entry["places"][0].endswith(
        f"a.jsonl:3, row 3 there, after '': nothing here; there token 0 is '<s>' ({extra}), not supervised"
    )


def apart(directory: Path, reasoning: str, template: str) -> Samples:
    rows = [conversation(number) for number in range(2)]
    for row in rows if reasoning else ():
        row["messages"][1]["reasoning_content"] = reasoning
    options = PrepareOptions(RowKeys(), max_length=512, turns="apart")
    data = run(write_rows(directory / "a.jsonl", *rows), options, cache=directory, template=template)
    return Samples([data.whole("a")])


def test_every_turn_that_is_a_sample_of_its_own_is_compared_and_named(tmp_path: Path) -> None:
    samples = apart(tmp_path, "", fixtures.CHATML)
    turns = [Encoded(*samples.sample(number)) for number in range(len(samples))]
    whole = []
    for first, last in (turns[:2], turns[2:]):
        mask = last.loss_mask.copy()
        mask[: len(first.loss_mask)] |= first.loss_mask
        whole.append(Encoded(last.input_ids, mask))
    assert found(samples, whole) == {}
    one, changed = turns[2], whole[1].loss_mask.copy()
    changed[np.flatnonzero(one.loss_mask)[-1]] = False
    tree = compare(
        samples, [whole[0], Encoded(whole[1].input_ids, changed)], TOKENIZER, framework="trl", max_length=512
    )
    assert tree["equal"] == 1 and list(tree["rules"]) == ["end token not supervised there"]
    [place] = tree["rules"]["end token not supervised there"]["places"]
    assert "a.jsonl:2, row 2 there, trained turn 1 of 2, after " in place and "'<|im_end|>'" in place


def test_a_turn_that_only_a_server_renders_so_is_named(tmp_path: Path) -> None:
    samples = apart(tmp_path, "so be it", fixtures.QWEN3)
    first, last = (Encoded(*samples.sample(number)) for number in (2, 3))
    equal = [Encoded(*samples.sample(1))]
    tree = compare(samples, [*equal, last], TOKENIZER, framework="trl", max_length=512)
    [(rule, entry)] = tree["rules"].items()
    assert (rule, entry["rows"], tree["equal"]) == ("earlier turn as a server renders it only here", 2, 0)
    assert "trained turn 1 of 2, after " in entry["places"][0] and "<think>'" in entry["places"][0]
    kept = Encoded(np.append(first.input_ids, last.input_ids), np.append(first.loss_mask & False, last.loss_mask))
    assert found(samples, [*equal, kept])["earlier turn not supervised there"] == 1


def test_rows_are_matched_whatever_their_order_and_whichever_is_missing(samples: Samples) -> None:
    rows = [Encoded(*samples.sample(number)) for number in range(NUM_ROWS)]
    assert found(samples, [rows[3], *rows[:3], *rows[4:]]) == {"order differs": 1}
    assert found(samples, rows[1:]) == {"row missing there": 1}
    assert found(samples, [*rows, rows[0]]) == {"row missing here": 1}
    changed = [Encoded(np.append(row.input_ids, NEWLINE + 1), np.append(row.loss_mask, False)) for row in rows]
    order = list(range(1, NUM_ROWS))
    random.Random(5).shuffle(order)
    here = [row.input_ids for row in rows]
    assert match(here, [changed[number].input_ids for number in order]) == sorted(
        (number, order.index(number)) for number in order
    ), "no row is equal and one is missing: stretches of its own tell a row"
    assert moved([(0, 2), (1, 0), (2, 1), (3, 3)]) == [(0, 2)]


def test_a_dump_that_is_none_is_refused_by_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = {"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}
    for bad, reason in (
        ({"labels": [1]}, "'input_ids' is not a list of integers"),
        ({"input_ids": [1, 2]}, "neither 'loss_mask' nor 'labels'"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "'loss_mask' has 1 values for 2 of 'input_ids'"),
        ({"input_ids": [1, 2, 3], "labels": [2, 3, -100]}, "'labels' has 2 at position 1, known are the id there"),
        ("{", "broken JSON: Expecting property name"),
    ):
        with pytest.raises(DataError, match=f"dump.jsonl:2: .*{reason}"):
            read_dump(write_rows(tmp_path / "dump.jsonl", good, bad))
    kept = read_dump(write_rows(tmp_path / "dump.jsonl", good, {"input_ids": [1, 2], "loss_mask": [0, 1]}))
    assert [row.loss_mask.tolist() for row in kept] == [[False, True, True], [False, True]]
    assert main(["compare", "--with", "trl", f"{tmp_path}/none.jsonl"]) == 65
    assert main(["compare", "--with", "trl"]) == main(["compare", "--with", "other", "dump.jsonl"]) == 2
    assert main(["compare", f"{tmp_path}/dump.jsonl"]) == 2
    capsys.readouterr()


def test_an_override_is_not_taken_for_the_dump(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--with", "trl", "data.max_length=64"]) == 2
    assert "--with NAME and DUMP are needed" in capsys.readouterr().err


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_the_dump_scripts_are_printed_and_are_python(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--dump-script", name]) == 0
    script = capsys.readouterr().out
    compile(script, name, "exec")
    assert json.dumps("labels") in script
