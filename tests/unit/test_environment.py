"""What a rank asks of the allocators."""

import os

import pytest

from trainer.runtime.environment import grow_cuda_segments

NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@pytest.mark.parametrize("chosen", [None, *NAMES])
def test_cuda_segments_grow_unless_the_user_chose_otherwise(
    monkeypatch: pytest.MonkeyPatch, chosen: str | None
) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that what the function sets is taken back
        monkeypatch.delenv(name)
    if chosen is not None:
        monkeypatch.setenv(chosen, "max_split_size_mb:64")
    grow_cuda_segments()
    expected = {chosen: "max_split_size_mb:64"} if chosen else {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert {name: os.environ[name] for name in NAMES if name in os.environ} == expected
