"""Tests of a rank's settings of allocators and threads."""

import os

import pytest

from trainer.runtime.environment import grow_cuda_segments, let_waiting_threads_sleep, pinned_bytes

MB = 2**20
SEGMENTS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
WAITING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
CASES = [
    (grow_cuda_segments, SEGMENTS, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
    (let_waiting_threads_sleep, WAITING, {"GOMP_SPINCOUNT": "1000"}),
]


@pytest.mark.parametrize("chosen", [None, 0, 1])
@pytest.mark.parametrize(("set_up", "names", "usual"), CASES)
def test_allocator_and_threads_are_set_unless_the_user_chose(
    monkeypatch, set_up, names, usual, chosen
):
    others = {name: value for name, value in os.environ.items() if name not in names}
    own = {} if chosen is None else {names[chosen]: "as I like"}
    environment = others | own
    monkeypatch.setattr(os, "environ", environment)
    set_up()
    assert environment == others | (own or usual)


def test_page_locked_memory_comes_in_powers_of_two():
    sizes = {0: 0, 1: 1, 2: 2, 5 * MB: 8 * MB, 9 * MB: 16 * MB}
    assert {size: pinned_bytes(size) for size in sizes} == sizes
