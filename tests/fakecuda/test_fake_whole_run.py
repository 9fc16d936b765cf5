"""A whole run on a GPU, from its configuration through updates, saves and a validation to its exit
code.

`fake_whole_run.py` lists the stand-ins for other ranks and everything else that is replaced. All
other code is the trainer's.
"""

from collections import Counter

import pytest

RUNS = {
    "one rank": {"num_ranks": 1},
    "replicas": {"num_ranks": 32, "fsdp_size": 8},
    "documents shared, a rollback": {"sequence_size": 2, "trouble_at": 4},
}
EMBEDDINGS = 4096 * 128
LAYER = 201_344
NUM_LAYERS = 2
NUM_TENSORS = 26
"""The size of the quickstart's model with two layers: hidden 128, ffn 352, 4 heads and 4 key heads
of 32 with biases, tied.
"""
PARAMETERS = EMBEDDINGS + NUM_LAYERS * LAYER + 128
CARD = 3
SHARED = "documents shared, a rollback"


@pytest.fixture(params=RUNS)
def name(request):
    return request.param


@pytest.fixture
def run(name, fake_runs):
    """The record of the run."""
    return fake_runs(kind="run", **RUNS[name])


def num_shards(name):
    return RUNS[name].get("fsdp_size", RUNS[name].get("num_ranks", 8))


def num_steps(name):
    """After a rollback from the fourth step to the second, the third step is repeated, and the
    fourth is skipped.
    """
    return 6 if name == SHARED else 3


def noted(run, kind, phase):
    """Return the notes of all phases with this name."""
    return [entry for entry in run[kind] if entry["phase"].split()[0] == phase]


def test_a_run_ends_with_its_last_step_saved(name, run):
    assert run["exit_code"] == 0 and run["exported"] == PARAMETERS
    assert run["checkpoints"] == ([2, 5] if name == SHARED else [2, 3])
    rolled_back = ["guard/rule", "rollback"] if name == SHARED else []
    assert run["events"] == ["start", "checkpoint", *rolled_back, "checkpoint", "end"]


def test_a_step_waits_once_and_a_save_reads_one_number(name, run):
    """Losses of samples arrive together with the numbers of the step."""
    assert sum(call["name"] == "packet" for call in run["calls"]) == num_steps(name) + 1, (
        "the last of the validation"
    )
    reads = Counter[tuple[str, str]]()
    for text, number in run["reads"].items():
        phase, _, operation, _, place, *_ = text.split()
        if phase not in ("meet", "load"):
            assert operation == "aten._local_scalar_dense.default"
            reads[phase, place] += number
    assert reads == {("save", "trainer/checkpoint/manager.py:_is_finite"): 2}


def test_no_copy_blocks_from_the_first_step_to_the_last_save(name, run):
    for phase in ("train", "validate"):
        assert {(copy["way"], copy["how"]) for copy in noted(run, "copies", phase)} == {
            ("cpu to cuda", "async")
        }
        batches = [
            copy for copy in noted(run, "copies", phase) if "trainer/data/batch.py" in copy["where"]
        ]
        assert batches and {copy["host"] for copy in batches} == {"pinned"}
    small = [copy["bytes"] for copy in noted(run, "copies", "train") if copy["host"] == "pageable"]
    assert max(small) <= 256, "numbers of the host in the sum over ranks"
    saved = noted(run, "copies", "save")
    assert {(c["way"], c["how"], c["host"], c["stream"] > 0) for c in saved} == {
        ("cuda to cpu", "async", "pinned", True)
    }
    for number in (1, 2):
        size_bytes = sum(copy["bytes"] for copy in saved if copy["phase"] == f"save {number}")
        assert size_bytes == 12 * PARAMETERS // num_shards(name) + 4 * NUM_TENSORS, (
            "behind training and required alike"
        )


def test_ranks_add_up_one_vector_of_numbers_a_step_and_one_number_a_save(name, run):
    """test_fake_step.py covers the remaining communication of a step."""
    num_ranks = RUNS[name].get("num_ranks", 8)
    for phase, number in (("train", num_steps(name)), ("save", 2)):
        sums = [c for c in noted(run, "collectives", phase) if c["dtype"] == "float64"]
        assert [(c["kind"], c["ranks"]) for c in sums] == [("allreduce", num_ranks)] * number
    assert {c["numel"] for c in noted(run, "collectives", "save") if c["device"] == "cuda"} == {1}


def test_every_thread_stands_on_its_own_card_and_no_copy_is_written_before_it_is_there(run):
    """A separate thread writes the first save; the main thread writes the last one, with which the
    run ends.
    """
    # autograd's: torch's care
    calls = [call for call in run["calls"] if not call["thread"].startswith("Dummy")]
    threads = {call["thread"] for call in calls}
    assert threads == {"MainThread", "checkpoint", "gpu-sampler"}
    for thread in threads:
        own = [
            call
            for call in calls
            if call["thread"] == thread and not call["name"].startswith("phase")
        ]
        assert own[0]["name"] == "set_device" and {call["device"] for call in own} == {CARD}
    waits = [
        (index, call) for index, call in enumerate(calls) if call["name"] == "event.synchronize"
    ]
    assert [call["thread"] for _, call in waits] == ["checkpoint", "MainThread"]
    copies = [index for index, call in enumerate(calls) if call["name"] == "copy cuda to cpu"]
    (first, _), (last, _) = waits
    assert (
        max(copies[: len(copies) // 2])
        < first
        < min(copies[len(copies) // 2 :])
        <= max(copies)
        < last
    )
    for index, call in waits:
        recorded = [
            c
            for c in calls[:index]
            if c["name"] == "event.record" and c["subject"] == call["subject"]
        ]
        assert len(recorded) == 1 and recorded[0]["stream"] > 0, (
            "behind the copies, on their stream"
        )


def test_a_snapshot_follows_its_step_and_the_next_update_follows_the_snapshot(run):
    calls = [call for call in run["calls"] if call["thread"] == "MainThread"]
    stream = next(call["stream"] for call in calls if call["name"] == "copy cuda to cpu")
    on_it = [call for call in calls if call["stream"] == stream]
    kinds = [call["name"] for call in on_it]
    num_copies = kinds.count("copy cuda to cpu") // 2
    first = kinds.index("copy cuda to cpu")
    copies = ["copy cuda to cpu"] * num_copies
    assert kinds[first - 1 :] == 2 * ["stream.wait_stream", *copies, "event.record"]
    waited_for = {call["subject"] for call in on_it if call["name"] == "stream.wait_stream"}
    assert waited_for == {0}, "the stream of the computation"
    recorded = next(call for call in on_it if call["name"] == "event.record")
    later = calls[calls.index(recorded) :]
    before_update = later[: [call["name"] for call in later].index("update")]
    waits = [call for call in before_update if call["name"] == "event.wait"]
    streams = [call["stream"] for call in waits if call["subject"] == recorded["subject"]]
    assert streams == [0], "the computation waits for the copies"


def test_a_rollback_puts_what_was_saved_on_the_card(fake_runs):
    """Each save has the state of this GPU's generator. Ranks that share documents have written
    their shards.
    """
    run = fake_runs(kind="run", **RUNS[SHARED])
    copies = noted(run, "copies", "rollback")
    assert {copy["way"] for copy in copies} == {"cpu to cuda"}
    assert sum(copy["bytes"] for copy in copies) == 12 * PARAMETERS // 8 + 4 * NUM_TENSORS
    assert [call["subject"] for call in run["calls"] if call["name"] == "set_rng_state"] == [CARD]
    assert {call["subject"] for call in run["calls"] if call["name"] == "get_rng_state"} == {CARD}
