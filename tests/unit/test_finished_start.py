"""A start with nothing to do: when the launcher answers for a finished run, and when the ranks must
check.
"""

import pytest
from checkpoint_fakes import save
from processes import run_python
from small_files import write_json

from trainer.checkpoint import finished
from trainer.checkpoint.layout import POINTER
from trainer.launch import mirroring
from trainer.tools.mirror import STATE
from trainer.train.start.compose import load_config
from trainer.train.start.preflight import already_complete, file_states, find_files

LAUNCH = """
import contextlib, sys
from trainer.launch import __main__ as launch, mirroring
mirroring.mirrored = lambda *args: contextlib.nullcontext()  # only of a run that trains
launch.supervise = lambda *args, **kwargs: 99  # ranks would start
for more in ([], ["trainer.total_epochs=7"]):
    print(launch.main(["2", *sys.argv[1:], *more]))
heavy = {"torch", "transformers", "wandb", "huggingface_hub"} & set(sys.modules)
assert not heavy, heavy
"""


@pytest.fixture
def words(tmp_path):
    """The overrides of a run that has ended at step 4, and its files in `run`."""
    (tmp_path / "model").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "model/config.json").write_text('{"model_type": "qwen2"}')
    (tmp_path / "model/tokenizer.json").write_text("{}")
    (tmp_path / "rows.jsonl").write_text("{}\n")
    words = [
        f"data.train_files={tmp_path}/*.jsonl",
        f"model.partial_pretrain={tmp_path}/model",
        "model.random_weights=true",
        "trainer.device=cpu",
        f"trainer.default_local_dir={tmp_path}/run",
        # not up to date: nobody asks it here
        "trainer.checkpoint.mirror=hf://buckets/org/model",
    ]
    save(tmp_path / "run", 2, 4)
    config = load_config(words)
    end = finished.Finished(
        ended_early=False,
        message="all done",
        config=config.resolved,
        data_files=file_states(find_files(config)),
    )
    finished.write(tmp_path / "run" / "global_step_4", end)
    return words


CHANGES = {
    "more rows": lambda root: (root / "rows.jsonl").write_text("{}\n{}\n"),
    "a damaged checkpoint": lambda root: (root / "run/global_step_4/data.pt").write_text(""),
    "a pointer moved back": lambda root: (root / "run" / POINTER).write_text("2"),
    "a run that has begun": lambda root: (root / "run/.train.lock").write_text("{}"),
    "a kill before the end": lambda root: (root / "run/global_step_4/finished.json").unlink(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_ranks_look_once_something_has_changed(words, tmp_path, change):
    assert already_complete(load_config(words)) == "all done"
    CHANGES[change](tmp_path)
    assert already_complete(load_config(words)) is None


def test_the_launcher_answers_without_ranks_and_without_libraries(words, tmp_path):
    """A longer run is not complete."""
    done = run_python("-c", LAUNCH, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["all done", "0", "99"]
    assert "start       2 ranks on CPU" in done.stderr, "the longer run starts its ranks"
    assert "lacks the latest checkpoints" in done.stderr  # .mirror.json names none


@pytest.mark.parametrize("steps", [[2], [2, 4], None])
def test_a_finished_run_says_again_that_its_mirror_lacks_the_last_checkpoint(
    steps, words, tmp_path, capsys
):
    """The advice was to continue the run, which only printed that it is complete."""
    write_json(tmp_path / "run" / STATE, {"steps": steps})
    mirroring.warn_if_behind(load_config(words))
    said = capsys.readouterr().err
    if steps == [2, 4]:
        assert said == ""
    else:
        assert "hf://buckets/org/model lacks the latest checkpoints" in said
        assert f"mirror {tmp_path}/run`" in said and "continue" not in said
    mirroring.warn_if_behind(load_config([*words, "trainer.checkpoint.mirror=null"]))
    assert capsys.readouterr().err == ""
