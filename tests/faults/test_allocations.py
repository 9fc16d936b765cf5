"""The short form of allocations.py: a run that lacks memory names the cause and harms nothing."""

from faults import allocations
from faults.allocations import RECIPE, Scene, unnamed
from faults.save_points import Survey
from processes import run_python
from ranks import run_ranks
from small_files import read_json
from sweeps import short_or_full
from toy_runs import run

from trainer.checkpoint import fsio

NUM_CASES = short_or_full(2, full=20)


def test_a_failed_allocation_is_named_and_harms_nothing(tmp_path):
    words = [allocations.__file__, "--cases", str(NUM_CASES), "--seed", "3", "--output"]
    done = run_python(*words, str(tmp_path / "result.json"), timeout_s=300)
    result = read_json(tmp_path / "result.json")
    assert done.returncode == 0, result["faults"]
    assert sum(result["counts"].values()) == NUM_CASES


def train_without_memory_to_delete(world, run_dir, scene):
    """Repeats allocation 1030 of seed 8: no memory to list the trash of the last rotation."""
    listed = fsio.list_dir

    def list_dir(path):
        if path.name.startswith(".trash_global_step_6"):
            raise MemoryError
        return listed(path)

    fsio.list_dir = list_dir
    return run(world, run_dir, scene.source, RECIPE).exit_code


def test_a_start_removes_what_the_last_rotation_of_a_finished_run_left(tmp_path):
    scene = Scene(tmp_path)
    run_dir = scene.copy_to(tmp_path / "run")
    assert run_ranks(train_without_memory_to_delete, 2, run_dir, scene) == [0, 0]
    (left,) = Survey.of(run_dir).leftovers
    assert left.startswith(".trash_global_step_6")
    assert scene.resume(run_dir) == []


def test_an_exit_of_the_c_library_names_the_cause_on_the_error_stream():
    """This happened in allocation 592 of seed 8."""
    assert unnamed("cannot allocate memory for thread-local data: ABORT\n") == []
    assert unnamed("") != []
