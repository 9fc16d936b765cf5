"""Case 2, SIGKILL right before an operation of a real save: the old checkpoint or the new one,
never neither.

Here: of each phase a sample of the operations of rank 0 that change a name, order what is durable
or pass a word (every one with `pytest --full`), the two around the commit among them, and a sample
of all others on both ranks. `python tests/faults/failpoints.py` strikes at all of them.
"""

import json
import random
import shutil
from pathlib import Path

import pytest
from faults.announced import ACKS
from faults.failpoints import Matrix, Scene
from faults.save_points import Point, thinned
from sweeps import short_or_full, some
from toy_runs import TRACE

from trainer.checkpoint import layout

SEED = 1
NUM_SAMPLED = short_or_full(4, full=8)
NUM_OF_PHASE = 2


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return Scene(tmp_path_factory.mktemp("failpoints") / "scene")


@pytest.fixture(scope="module")
def sync(scene: Scene, tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(scene, tmp_path_factory.mktemp("sync") / "run", async_save=False)


def sample(points: list[Point]) -> list[Point]:
    return random.Random(SEED).sample(points, NUM_SAMPLED)


def kill_all(matrix: Matrix, points: list[Point], place: Path) -> None:
    """All cases, also after a fault; the latest is trained on to the end, with `--full` also
    the earliest.
    """
    in_order = sorted(points, key=lambda point: (point.is_after_commit, point.index))
    resumed, found = short_or_full(in_order[-1:], full=[in_order[0], in_order[-1]]), []
    for number, point in enumerate(points):
        found += matrix.kill(point, place / str(number), resumes=point in resumed)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("phase", ["open", "shards", "export", "commit", "publish", "rotate"])
def test_killed_before_an_operation_of_rank_0_that_others_see(sync, memory_dir, phase):
    points = [
        point for point in sync.points if point.is_key and point.rank == 0 and point.phase == phase
    ]
    assert len(points) >= 3
    sampled = some(points, NUM_OF_PHASE)
    kept = [
        point for point in points if point in sampled or point.is_commit or point.is_commit_sync
    ]
    kill_all(sync, kept, memory_dir)


def test_killed_before_any_other_operation_of_a_start_or_a_save(sync, memory_dir):
    kill_all(
        sync, sample([p for p in thinned(sync.points) if not p.is_key or p.rank > 0]), memory_dir
    )


def test_killed_in_a_save_behind_training(scene, memory_dir):
    matrix = Matrix(scene, memory_dir / "observed", async_save=True)
    points = [point for point in thinned(matrix.points) if point.save > 0]
    assert all(point.is_behind for point in points)
    kill_all(matrix, sample(points), memory_dir)


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def append(path: Path, text: str) -> None:
    path.write_text(path.read_text() + text)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        pytest.param(
            lambda run_dir: (run_dir / "global_step_4" / layout.DATA).unlink(),
            "global_step_4 (incomplete data.pt",
            id="a file is gone",
        ),
        pytest.param(
            lambda run_dir: flip_a_bit(run_dir / "global_step_4" / layout.optim_file(2, 1)),
            "global_step_4 (committed ) is not whole",
            id="a bit is flipped",
        ),
        pytest.param(
            lambda run_dir: shutil.rmtree(run_dir / "global_step_4"),
            "step 2 would be continued, not (4,)",
            id="the newest is gone",
        ),
        pytest.param(
            lambda run_dir: append(run_dir / ACKS, "6\n"),
            "step 6 was announced as saved, 4 would be continued",
            id="an announced one is gone",
        ),
        pytest.param(
            lambda run_dir: append(run_dir / TRACE, json.dumps({"step": 5}) + "\n"),
            "step 5 diverged",
            id="training diverged",
        ),
    ],
)
def test_what_a_kill_must_not_leave_is_noticed(sync, scene, tmp_path, damage, said):
    run_dir = scene.copy_to(tmp_path / "run")
    before_commit = next(point for point in sync.points if point.is_commit)
    assert sync.faults_in(run_dir, before_commit) == []
    (after_commit,) = sync.faults_in(run_dir, sync.points[sync.points.index(before_commit) + 1])
    assert after_commit == "step 4 would be continued, not (6,)"
    damage(run_dir)
    assert any(said in fault for fault in sync.faults_in(run_dir, before_commit))
