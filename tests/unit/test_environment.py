"""What a rank asks of allocators and threads."""

import os
from typing import Any

import pytest

from trainer.runtime.environment import grow_cuda_segments, let_waiting_threads_sleep

SEGMENTS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
WAITING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
CASES = [
    (grow_cuda_segments, SEGMENTS, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
    (let_waiting_threads_sleep, WAITING, {"GOMP_SPINCOUNT": "1000"}),
]


@pytest.mark.parametrize("index_chosen", [None, 0, 1])
@pytest.mark.parametrize(("function", "names", "usual"), CASES)
def test_allocator_and_threads_are_set_unless_the_user_chose_otherwise(
    monkeypatch: pytest.MonkeyPatch,
    function: Any,
    names: tuple[str, ...],
    usual: dict[str, str],
    index_chosen: int | None,
) -> None:
    for name in names:
        monkeypatch.setenv(name, "")  # so that what the function sets is taken back
        monkeypatch.delenv(name)
    expected = usual
    if index_chosen is not None:
        expected = {names[index_chosen]: "as I like"}
        monkeypatch.setenv(names[index_chosen], "as I like")
    function()
    assert {name: os.environ[name] for name in names if name in os.environ} == expected
