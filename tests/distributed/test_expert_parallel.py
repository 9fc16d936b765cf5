"""Ranks that hold whole experts train, save and export the same as ranks that gather all experts."""

import pytest
from family_trials import save_model
from ranks import each, run_ranks
from toy import (
    EXPERTS,
    build_toy_model,
    differing,
    full_parameters,
    short_run,
    write_model_config,
)
from toy_runs import Recipe, begun, run

from trainer.config import ConfigError
from trainer.model import selfcheck
from trainer.model.experts import experts_of
from trainer.model.losses import LOSSES
from trainer.model.pretrained import ModelSource

RECIPE = Recipe(total_steps=4)
FAMILIES = ("qwen3_moe", "gpt_oss", "deepseek_v3", "mixtral")
"""Families with fused experts; transposed experts with biases; layers with and without experts;
experts stored separately.
"""
SETTINGS = {
    "defaults": {},
    "frozen experts": {"freeze": ["experts"]},
    "bfloat16 weights and compute": {"master_dtype": "bfloat16", "param_dtype": "bfloat16"},
    "muon": {"optim": {"name": "muon"}},
}


@pytest.fixture(scope="module")
def source(root):
    return write_model_config(root, "qwen3_moe", **EXPERTS)


def checked(world, root, master_dtype):
    """Return the differences from transformers' own forward and backward pass, by family."""
    found = {}
    for family in FAMILIES:
        source = ModelSource(str(root / family), random_weights=False)
        model = build_toy_model(world, source, random_weights=False, master_dtype=master_dtype)
        assert all("exchange" in vars(experts) for experts in experts_of(model))
        errors = selfcheck.compare(model, world.device, formula=LOSSES["cross_entropy"].formula)
        found[family] = (errors.loss, *errors.gradients.values(), errors.foresight)
    return found


@pytest.mark.parametrize("master_dtype", ["float32", "bfloat16"])
def test_loss_and_gradient_are_those_of_transformers(tmp_path, master_dtype):
    for family in FAMILIES:
        save_model(tmp_path / family, family)
    found = run_ranks(checked, 4, tmp_path, master_dtype, expert_size=2)[0]
    assert {family: max(errors) for family, errors in found.items() if max(errors) > 1e-5} == {}


def trained(world, source, **changes):
    """(losses, norms, whole parameters at the end) of three steps."""
    run = short_run(world, source, total_steps=3, **changes)
    rows = run.tracking
    return rows.column("train/loss"), rows.column("train/grad_norm"), full_parameters(run.model)


def test_any_optimizer_dtype_and_choice_of_parameters_is_trained_alike(source):
    theirs = run_ranks(each, 2, trained, source, SETTINGS)[0]
    ours = run_ranks(each, 2, trained, source, SETTINGS, expert_size=2)[0]
    for name, (losses, norms, parameters) in theirs.items():
        tolerance = 2e-2 if "bfloat16" in name else 1e-6
        assert ours[name][0] == pytest.approx(losses, rel=tolerance), name
        assert ours[name][1] == pytest.approx(norms, rel=10 * tolerance), name
        for key, tensor in parameters.items():
            difference = (ours[name][2][key] - tensor).float()
            assert difference.norm() <= 10 * tolerance * tensor.float().norm(), (name, key)


@pytest.mark.parametrize(
    ("first", "then"),
    [((2, 2), (2, 2)), ((1, 1), (2, 2)), ((4, 4), (4, 2)), ((4, 2), (2, 1))],
)
def test_a_checkpoint_does_not_depend_on_the_size(source, tmp_path, first, then):
    """`first` and `then`: the number of ranks, and the number of ranks that together hold all
    experts.
    """
    whole = tmp_path / "whole"
    resumed = tmp_path / "resumed"
    expected = run_ranks(run, first[0], whole, source, RECIPE, expert_size=first[1])[0]
    begun(whole, resumed, 2)
    found = run_ranks(run, then[0], resumed, source, RECIPE, expert_size=then[1])[0]
    assert found.start_step == 2
    later = {step: numbers for step, numbers in expected.losses.items() if step > 2}
    if first == then:
        assert found.losses == later
        assert not differing(found.parameters, expected.parameters)
        assert not differing(found.moments, expected.moments)
    for step, numbers in later.items():
        assert found.losses[step] == pytest.approx(numbers, rel=1e-5)


def refuses_five_experts(world, source):
    with pytest.raises(ConfigError, match="5 experts cannot be divided evenly"):
        build_toy_model(world, source)


def test_experts_that_cannot_be_dealt_evenly_are_refused(tmp_path):
    odd = write_model_config(tmp_path, "qwen3_moe", **EXPERTS | {"num_experts": 5})
    run_ranks(refuses_five_experts, 2, odd, expert_size=2)
