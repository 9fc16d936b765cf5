"""Which storages live when, on real tensors small enough to count by hand."""

import torch

from trainer.tools.plan.live_storage import ACTIVATIONS, HEAD, LiveStorages, flash_backward_bytes


def test_living_storages_are_counted_once_and_only_while_they_live() -> None:
    live = LiveStorages()
    with live:
        live.enter(0, "a")
        first = torch.zeros(1000)
        view, second = first[10:], first + 1
        del first
        live.enter(0, "b")
        del view
        second.untyped_storage().resize_(400)
        third = torch.zeros(1000)
        live.mark([third], HEAD)
        del third
    assert dict(live.peaks()[0, "a"]) == {ACTIVATIONS: 8000}
    assert dict(live.peaks()[0, "b"]) == {ACTIVATIONS: 400, HEAD: 4000}
    assert live.peaks(elsewhere=frozenset({ACTIVATIONS}))[0, "b"].total() == 4000
    assert torch.UntypedStorage.resize_ is live._resize, "the watch is taken off again"


def test_flash_attention_takes_its_queries_gradient_in_fp32_and_shared_keys_apart() -> None:
    query, key = (
        torch.empty(100, 4, 16, dtype=torch.bfloat16),
        torch.empty(100, 2, 16, dtype=torch.bfloat16),
    )
    alone = 4 * (100 + 2 * 128) * 4 * (16 + 1)
    assert flash_backward_bytes(query, query, num_documents=2) == alone
    assert flash_backward_bytes(query, key, num_documents=2) == alone + 2 * 100 * 4 * 16 * 2
