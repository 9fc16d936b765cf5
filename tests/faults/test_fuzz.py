"""The short form of fuzz.py: every input of the corpus, unchanged, cut, flipped and spliced."""

import logging
import random

import pytest
from faults.fuzz import CORPUS, MAX_INPUT_BYTES, make_targets, run_input
from processes import TookTooLongError
from sweeps import short_or_full

TARGETS, ANSWERED = make_targets()
NUM_MUTANTS = short_or_full(25, full=1000)
"""Number of changed inputs for each target."""
FRAGMENTS = (
    b"9" * 5000, b"-1", b"1e999", b"NaN", b"null", b"[" * 2000, b'{"a":' * 500, b"\xff\xfe", b"\0",
    b"\n", b"../../x", b"\xed\xa0\x80", b"true", b'""', b"&a [*a]", b"${oc.env:HOME}", b"1_000", b"0x10",
)  # fmt: skip


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def changed(data, chance):
    """Return the input with one to four places flipped, cut, doubled or replaced by a fragment."""
    mutant = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        start = chance.randint(0, len(mutant))
        end = min(len(mutant), start + chance.choice((0, 1, 4, 30)))
        replacement = chance.choice(FRAGMENTS) if chance.random() < 0.6 else mutant[start:end] * 2
        mutant[start:end] = replacement
        if mutant and chance.random() < 0.5:
            mutant[chance.randrange(len(mutant))] ^= 1 << chance.randrange(8)
    return bytes(mutant[:MAX_INPUT_BYTES])


@pytest.mark.parametrize("name", TARGETS)
def test_a_strange_input_is_answered_with_an_error_of_ours(name, tmp_path):
    seeds = [path.read_bytes() for path in sorted((CORPUS / name).iterdir())]
    chance = random.Random(name)
    mutants = [changed(chance.choice(seeds), chance) for _ in range(NUM_MUTANTS)]
    for data in (*seeds, b"", *mutants):
        try:
            run_input(TARGETS[name], ANSWERED, data, tmp_path)
        except (Exception, TookTooLongError) as error:
            kept = tmp_path / "fault"
            kept.write_bytes(data)
            raise AssertionError(f"{name}: {error!r}, input {data[:200]!r}") from error
