"""What a rank asks of allocators and threads."""

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
    monkeypatch,
    set_up,
    names,
    usual,
    chosen,
):
    others = {name: value for name, value in os.environ.items() if name not in names}
    own = {} if chosen is None else {names[chosen]: "as I like"}
    environment = others | own
    monkeypatch.setattr(os, "environ", environment)
    set_up()
    assert environment == others | (own or usual)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [0, 1, 2, 8 * MB, 16 * MB]),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, [0, 1, 2, 8 * MB, 16 * MB]),
        ({"PYTORCH_ALLOC_CONF": "pinned_max_round_threshold_mb:1"}, [0, 1, 2, 5 * MB, 9 * MB]),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64, pinned_max_cached_size_mb: 8"},
            [0, 1, 2, 8 * MB, 9 * MB],
        ),
    ],
)
def test_page_locked_memory_comes_in_powers_of_two_up_to_the_limit_of_the_user(
    monkeypatch, settings, expected
):
    for name in SEGMENTS:
        monkeypatch.delenv(name, raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    assert [pinned_bytes(size) for size in (0, 1, 2, 5 * MB, 9 * MB)] == expected
