"""What surrounds the steps of a run on a GPU: saves behind training, validation; and the plan
of a step.
"""

from typing import Any

import pytest
from toy import EXPERTS

SAVES: dict[str, dict[str, Any]] = {
    "experts": {"model_type": "qwen3_moe", "changes": EXPERTS},
    "replicas, bfloat16": {"num_ranks": 32, "fsdp_size": 8, "kept": "bfloat16"},
    "lora": {"lora_rank": 8},
    "offload": {"offload": True},
}
ON_CARD = [name for name in SAVES if name != "offload"]
PLANS: dict[str, dict[str, Any]] = {
    "plain": {},
    "selective, documents shared": {"recompute": "selective", "sequence_size": 2},
    "inputs put away": {"recompute": "offload"},
}
SNAPSHOT = "trainer/checkpoint/snapshot.py:copy"
BYTES = {"float32": 4, "bfloat16": 2}
CARD = 3
"""The local rank that all cases run as."""


@pytest.fixture
def saves(fake_runs: Any) -> Any:
    """What each case did, when it is asked for."""
    return lambda name: fake_runs(kind="save", **SAVES[name])


@pytest.mark.parametrize("name", SAVES)
def test_a_save_reads_one_number_and_the_steps_and_validations_beside_it_none(saves, name):
    """Whether all is finite is known before a thread writes it: a copy in host memory, page-locked
    where it comes from a card.
    """
    ((where, count),) = saves(name)["reads"].items()
    assert "trainer/checkpoint/manager.py:_is_finite" in where and count == 2, "one of each save"
    assert [call for call in saves(name)["calls"] if call["name"] == "validation"]
    for written in saves(name)["written"]:
        assert written["fake"] == 0 and written["bytes"] > 0
        assert (written["unlocked"] == 0) == (name != "offload")


@pytest.mark.parametrize("name", ON_CARD)
def test_the_state_goes_to_page_locked_memory_beside_the_computation(saves, name):
    """Parameters and two moments, a step for each tensor; what is no copy of a snapshot is a
    batch or its sums.
    """
    save, case = saves(name), SAVES[name]
    copies = [copy for copy in save["copies"] if copy["where"].startswith(SNAPSHOT)]
    assert {(c["way"], c["how"], c["host"], c["stream"] > 0) for c in copies} == {
        ("cuda to cpu", "async", "pinned", True)
    }
    num_shards = case.get("fsdp_size", case.get("num_ranks", 8))
    element_bytes = BYTES[case.get("kept", "float32")]
    fractions = 8 * EXPERTS["num_experts"] * (name == "experts")
    state = (
        3 * element_bytes * save["num_trained"] // num_shards + 4 * save["num_tensors"] + fractions
    )
    assert sum(copy["bytes"] for copy in copies) == 2 * state, "two saves"
    others = [copy for copy in save["copies"] if copy not in copies]
    assert {(c["way"], c["how"]) for c in others} == {("cpu to cuda", "async")}
    batches = [copy["host"] for copy in others if "trainer/data/batch.py" in copy["where"]]
    assert batches == ["pinned"] * 6 * (2 * 2 + 3 * 3), (
        "micro-batches of two steps, and of a validation of 24 samples"
    )


@pytest.mark.parametrize("name", ON_CARD)
def test_the_thread_that_writes_stands_on_its_own_card_and_waits_for_the_copies(saves, name):
    in_thread = [call for call in saves(name)["calls"] if call["thread"] == "checkpoint"]
    ready = _copied(saves(name))
    seen = [(call["name"], call["device"], call["subject"]) for call in in_thread]
    kinds = ("set_device", "event.synchronize", "write")
    assert seen == [
        step for event in ready for step in zip(kinds, [CARD] * 3, (None, event, None), strict=True)
    ]


def _copied(save: dict[str, Any]) -> list[int]:
    """The events behind the copies of each save, on their stream."""
    calls = [call for call in save["calls"] if call["thread"] == "MainThread"]
    stream = next(call["stream"] for call in calls if call["name"] == "copy cuda to cpu")
    on_it = [call for call in calls if call["stream"] == stream]
    kinds = [call["name"] for call in on_it]
    copies, first = kinds.count("copy cuda to cpu") // 2, kinds.index("copy cuda to cpu")
    assert kinds[first - 1 :] == 2 * [
        "stream.wait_stream",
        *["copy cuda to cpu"] * copies,
        "event.record",
    ]
    assert all(call["subject"] == 0 for call in on_it if call["name"] == "stream.wait_stream"), (
        "for the computation"
    )
    return [call["subject"] for call in on_it if call["name"] == "event.record"]


@pytest.mark.parametrize("name", [name for name in ON_CARD if name != "replicas, bfloat16"])
def test_an_update_waits_for_the_copy_of_what_it_changes_and_a_copy_for_the_last_writer(
    saves, name
):
    calls = saves(name)["calls"]
    updates = [index for index, call in enumerate(calls) if call["name"] == "update"]
    for event in _copied(saves(name)):
        recorded = next(
            i
            for i, call in enumerate(calls)
            if call["name"] == "event.record" and call["subject"] == event
        )
        update = next(index for index in updates if index > recorded)
        waited = [
            call
            for call in calls[recorded:update]
            if call["name"] == "event.wait" and call["subject"] == event
        ]
        assert [(call["stream"], call["thread"]) for call in waited] == [(0, "MainThread")]
    wrote = [index for index, call in enumerate(calls) if call["name"] == "write"]
    copies = [index for index, call in enumerate(calls) if call["name"] == "copy cuda to cpu"]
    assert max(copies[: len(copies) // 2]) < wrote[0] < min(copies[len(copies) // 2 :]) < wrote[1]


def test_offloaded_state_is_copied_by_the_host_alone(saves):
    assert [copy for copy in saves("offload")["copies"] if "snapshot.py" in copy["where"]] == []
    checks = [copy for copy in saves("offload")["copies"] if "_is_finite" in copy["where"]]
    assert len(checks) == 2, "one number a save, not one for each tensor"


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_on_cpu_tensors_is_that_of_cuda_tensors(fake_runs, name):
    """In every phase, but for the batch itself."""
    case = PLANS[name]
    plan = fake_runs(kind="plan", **case)
    pretended, found = plan["pretended"], plan["found"]
    batch_bytes = 3 * 8 * 512 * case.get("sequence_size", 1)
    assert pretended.keys() == found.keys() and len(found) > 8
    for phase, held in pretended.items():
        for category in held.keys() | found[phase].keys():
            difference = held.get(category, 0) - found[phase].get(category, 0)
            assert abs(difference) <= batch_bytes * (category == "activations"), (phase, category)
