"""Promises 2 and 3 on ranks: a checkpoint of W ranks loads on V ranks, complete, verified, and from
the right directory.
"""

from types import SimpleNamespace

import pytest
import torch
from ranks import each, run_ranks
from small_files import flip, read_json
from toy import ToySamples, build_toy_model, differing, guard_config, optim_config, toy_run
from toy_runs import Recipe, begun, checkpoint_manager, run, save_now
from toy_runs import source as source  # a fixture
from transformers import AutoModelForCausalLM

from trainer.checkpoint import layout
from trainer.checkpoint.manifest import MANIFEST, verify_files
from trainer.config import GuardRule
from trainer.errors import CannotWriteError
from trainer.optim.schedule import LrSchedule
from trainer.train.guard import Guard
from trainer.train.run import RateState


@pytest.fixture(scope="module")
def straight(source, root):
    """An uninterrupted run on two ranks that keeps its checkpoints of steps 2, 4 and 6."""
    run_dir = root / "run"
    return run_dir, run_ranks(run, 2, run_dir, source, Recipe())[0]


@pytest.fixture
def run_dir(straight, tmp_path):
    """The directory of the same run after its second step."""
    return begun(straight[0], tmp_path / "run", 2)


@pytest.mark.covers("S3.16 S3.17 S3.18 S3.19 S3.20 S3.21 S3.22 S3.23 S3.52")
def test_layout_manifest_and_export(straight, source):
    run_dir, result = straight
    step_dir = run_dir / "global_step_6"
    ours = {path.name for path in step_dir.iterdir() if not path.name.startswith(".")}
    ranks = [
        f"{kind}_world_size_2_rank_{r}.pt"
        for kind in ("model", "optim", "extra_state")
        for r in (0, 1)
    ]
    assert ours == {*ranks, "data.pt", "fsdp_config.json", MANIFEST, "huggingface", "finished.json"}
    assert (run_dir / layout.POINTER).read_text() == "6"
    settings = read_json(step_dir / "fsdp_config.json")
    assert settings == {"FSDP_version": 2, "world_size": 2}
    info = layout.inspect(step_dir)
    assert verify_files(step_dir, info.manifest) == []
    assert layout.leftovers(run_dir) == []
    exported = AutoModelForCausalLM.from_pretrained(step_dir / "huggingface", dtype=torch.float32)
    assert not differing(dict(exported.named_parameters()), result.parameters)
    generation = read_json(step_dir / "huggingface" / "generation_config.json")
    assert generation["eos_token_id"] == 3


def test_damaged_newest_falls_back_and_stays_aside(straight, source, tmp_path):
    run_dir = begun(straight[0], tmp_path / "run", 6)
    flip(run_dir / "global_step_6" / layout.optim_file(2, 1))
    again = run_ranks(run, 2, run_dir, source, Recipe())[0]
    assert again.start_step == 4
    assert not differing(again.parameters, straight[1].parameters)
    assert [path.name for path in run_dir.glob(".corrupt*")] == [".corrupt_global_step_6.0"]


def test_all_damaged_is_an_error_and_never_step_0(source, run_dir):
    flip(run_dir / "global_step_2" / layout.model_file(2, 0))
    with pytest.raises(AssertionError, match="is damaged"):
        run_ranks(run, 2, run_dir, source, Recipe())


def test_a_changed_schedule_is_named(caplog):
    schedule = LrSchedule.from_config(optim_config(), peak_lr=2e-5, total_steps=20)
    part = RateState(schedule, SimpleNamespace(step=12))
    saved = part.state_dict()
    assert saved["last_epoch"] == 12
    part.load_state_dict(saved | {"last_epoch": 3})
    assert caplog.text == ""
    part.load_state_dict(saved | {"peak_lr": 1e-5, "total_steps": 12})
    assert "peak_lr: 1e-05 -> 2e-05, total_steps: 12 -> 20" in caplog.text


def save_poisoned(world, source, run_dir, where):
    run_dir.mkdir(exist_ok=True)
    model = build_toy_model(world, source)
    parts = toy_run(world, model, ToySamples(), total_steps=6)
    if world.rank == 1:
        parameter = next(iter(model.parameters()))
        poisoned = (
            parameter if where == "parameter" else parts.optimizer.state[parameter]["exp_avg_sq"]
        )
        poisoned.to_local().data[0] = float("nan")
    try:
        checkpoints = checkpoint_manager(world, run_dir, source, parts, Recipe())
        save_now(checkpoints, parts, is_required=True)
    except CannotWriteError as error:
        return str(error)
    return ""


def test_a_poisoned_state_is_never_committed(source, tmp_path):
    variants = {
        where: {"run_dir": tmp_path / where, "where": where} for where in ("parameter", "moment")
    }
    for errors in run_ranks(each, 2, save_poisoned, source, variants):
        assert all("not finite" in error for error in errors.values())
    assert not [*tmp_path.glob("*/global_step_*")]


@pytest.mark.covers("S3.30")
def test_other_data_is_refused_by_name_and_accepted_when_allowed(source, run_dir):
    with pytest.raises(AssertionError, match=r"data: toy 0 -> toy 1 +<- refused"):
        run_ranks(run, 2, run_dir, source, Recipe(seed=1))
    again = run_ranks(run, 2, run_dir, source, Recipe(seed=1, resume_allow=("data",)))[0]
    assert again.start_step == 2 and set(again.losses) == {3, 4, 5, 6}


def test_an_accepted_batch_size_goes_on_in_the_same_order(source, run_dir):
    changed = Recipe(batch_size=4, resume_allow=("train_batch_size",))
    again = run_ranks(run, 2, run_dir, source, changed)[0]
    assert again.start_step == 2
    manifest = layout.inspect(run_dir / "global_step_6").manifest
    assert (manifest.epoch, manifest.samples_consumed) == (1, 8), "16 + 4 x 4 of 24 samples"


def run_with_trouble(world, run_dir, source, recipe):
    rule = GuardRule(metric="progress/step", above=recipe.total_steps - 0.5, action="rollback")
    return run(world, run_dir, source, recipe, guard=Guard(guard_config(rules=[rule])))


def test_no_rollback_returns_to_another_batch_size(source, run_dir):
    """The position in such a checkpoint refers to different steps."""
    allowed = ("train_batch_size",)
    changed = Recipe(total_steps=18, save_freq=-1, batch_size=4, resume_allow=allowed)
    (found,) = run_ranks(run_with_trouble, 1, run_dir, source, changed)
    assert [step for step, _ in found.rows] == list(range(3, 19))
