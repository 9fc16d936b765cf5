"""Users extend a run by adding an entry to a dictionary. This test adds a loss, an optimizer and a
stateful part that only this file defines.
"""

import pytest
import torch
from family_trials import heard
from ranks import run_ranks
from toy import ToySamples, differing, whole
from toy_runs import Recipe, StopsAfter, run
from toy_runs import source as source  # a fixture

from trainer.checkpoint import layout
from trainer.errors import EXIT_RESUMABLE
from trainer.model.losses import LOSSES, Loss, Term, cross_entropy
from trainer.model.weights import local
from trainer.optim import OPTIMIZERS
from trainer.optim.clip import Optimizer
from trainer.runtime.progress import ALL, OWN
from trainer.train.parts import Part
from trainer.train.run import PARTS

Z_WEIGHT = 0.01
CHOICES = (
    {"loss": "with_z"},
    {"optim": {"name": "heavy_ball"}},
    {"loss": "dft"},
    {"optim": {"name": "muon"}},
)


def z_loss(logits_CV, labels_C):
    """Squared logarithm of the softmax's denominator (PaLM, 2022, section 5)."""
    return logits_CV.logsumexp(dim=-1) ** 2


class HeavyBall(Optimizer):
    """Momentum as defined in textbooks."""

    def __init__(self, model, config):
        super().__init__(model.parameters(), {"lr": 0.0})
        for parameter in model.parameters():
            self.state[parameter] = {
                "momentum_buffer": torch.zeros_like(parameter, requires_grad=False)
            }

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                buffer = local(self.state[parameter]["momentum_buffer"])
                momentum = 0.9 * buffer + local(parameter.grad) / self.grad_scale
                buffer.copy_(torch.where(self.found_inf > 0, buffer, momentum))
                local(parameter).sub_(
                    torch.where(self.found_inf > 0, 0.0, momentum), alpha=group["lr"]
                )


def train(world, root, source, num_steps=99):
    """A run of each choice, in a directory of its own. Every second step has one sample, so a rank
    has no supervised position.
    """
    OPTIMIZERS["heavy_ball"] = HeavyBall
    LOSSES["with_z"] = Loss(cross_entropy, terms={"z": Term(z_loss, Z_WEIGHT)})
    recipe = Recipe(total_steps=4, save_freq=-1)
    samples = ToySamples(9)
    return [
        run(
            world,
            root / str(number),
            source,
            recipe,
            samples=samples,
            stop=StopsAfter(num_steps),
            **choice,
        )
        for number, choice in enumerate(CHOICES)
    ]


def test_losses_and_optimizers_of_ones_own_train_and_resume_bit_equal(source, tmp_path):
    straight = run_ranks(train, 2, tmp_path / "straight", source)[0]
    stopped, again = (
        run_ranks(train, 2, tmp_path / "parted", source, *steps)[0] for steps in ((2,), ())
    )
    assert [result.exit_code for result in stopped] == [EXIT_RESUMABLE] * len(CHOICES)
    for whole_run, resumed in zip(straight, again, strict=True):
        assert resumed.start_step == 2 and len(whole_run.losses) == 4
        assert resumed.losses == {step: whole_run.losses[step] for step in (3, 4)}
        assert differing(resumed.parameters, whole_run.parameters) == []
        assert differing(resumed.moments, whole_run.moments) == []
    assert len({whole_run.losses[4] for whole_run in straight}) == len(CHOICES)
    for _, row in straight[0].rows:
        trained = row["train/loss"] + Z_WEIGHT * row["train/objective/z"]
        assert row["train/objective"] == pytest.approx(trained, rel=1e-6)
        assert row["train/objective/z"] > 1


class WeightAverage(Part):
    """The average of this rank's shards over all steps so far. It changes with each step and must
    continue after a resume.
    """

    state_of = OWN

    def __init__(self, run):
        self._named = {name: self.taken(p) for name, p in run.model.named_parameters()}
        self.averages = {
            name: torch.zeros_like(tensor, requires_grad=False)
            for name, tensor in self._named.items()
        }

    def taken(self, parameter):
        return local(parameter)

    def after_update(self, batch, packet):
        for name, shard in self._named.items():
            self.averages[name].lerp_(shard.detach(), 0.5)
        return {}

    def state_dict(self):
        return self.averages

    def load_state_dict(self, state_dict):
        for name, average in self.averages.items():
            average.copy_(state_dict[name])


class Undeclared(WeightAverage):
    """A part with a separate state for each rank that does not declare this."""

    state_of = ALL


class Sharded(WeightAverage):
    """A part that averages DTensors and declares its state as sharded, with a number that is equal
    on all ranks.
    """

    state_of = ALL
    is_sharded = True

    def __init__(self, run):
        super().__init__(run)
        self.averages["num_steps"] = torch.zeros(())

    def taken(self, parameter):
        return parameter

    def after_update(self, batch, packet):
        self.averages["num_steps"] += 1
        return super().after_update(batch, packet)


class ShardedUndeclared(Sharded):
    is_sharded = False


class ShardedWithCount(Sharded):
    """A sharded part whose state contains a number instead of a tensor."""

    def state_dict(self):
        return self.averages | {"num_steps": 3}


class ShardedWithOwn(Sharded):
    """A part whose state contains a tensor that is neither sharded nor equal on all ranks."""

    def __init__(self, run):
        super().__init__(run)
        self.averages["num_steps"] += run.world.rank


def train_averaged(world, run_dir, source, num_steps=99, kind=WeightAverage, **settings):
    """(steps trained, the averages at the end as whole tensors where they are sharded, lines of
    the log).
    """
    made = []

    def make(run):
        made.append(kind(run))
        return made[0]

    PARTS["average"] = make
    recipe = Recipe(total_steps=4, **({"save_freq": -1} | settings))
    with heard() as lines:
        result = run(world, run_dir, source, recipe, stop=StopsAfter(num_steps))
    averages = {name: whole(average) for name, average in made[0].averages.items()}
    return sorted(result.losses), averages, lines


def test_a_part_of_ones_own_is_saved_and_goes_on_bit_equal(source, tmp_path):
    straight = run_ranks(train_averaged, 2, tmp_path / "straight", source)
    run_ranks(train_averaged, 2, tmp_path / "run", source, 2)
    resumed = run_ranks(train_averaged, 2, tmp_path / "run", source)
    for (steps, ours, lines), (_, theirs, _) in zip(resumed, straight, strict=True):
        assert steps == [3, 4] and differing(ours, theirs) == []
        assert not any("'average'" in line for line in lines)


@pytest.fixture(scope="module")
def sharded(source, root):
    """The averages after a run in one piece on two ranks."""
    return run_ranks(train_averaged, 2, root / "run", source, kind=Sharded)[0][1]


@pytest.mark.parametrize(
    ("before", "after", "is_async"), [(2, 2, True), (2, 1, False), (1, 2, False)]
)
def test_a_sharded_part_continues_on_any_number_of_ranks(
    source, tmp_path, sharded, before, after, is_async
):
    """Steps 3 and 4 change the averages, within rounding alike on another number of ranks."""
    settings = {"kind": Sharded, "async_save": is_async, "save_freq": 1}
    run_ranks(train_averaged, before, tmp_path / "run", source, 2, **settings)
    resumed = run_ranks(train_averaged, after, tmp_path / "run", source, **settings)
    for steps, averages, _ in resumed:
        assert steps == [3, 4] and averages.keys() == sharded.keys()
        assert averages["num_steps"] == 4
        for name, average in averages.items():
            if before == after == 2:
                assert torch.equal(average, sharded[name]), name
            torch.testing.assert_close(average, sharded[name], rtol=1e-3, atol=1e-5)


REFUSED = {
    Undeclared: "it differs between rank 0 and rank 1",
    ShardedWithOwn: "it differs between rank 0 and rank 1",
    ShardedUndeclared: "if a part holds sharded tensors",
    ShardedWithCount: "if a part holds sharded tensors",
}


def refusals(world, root, source):
    found = []
    for kind in REFUSED:
        with pytest.raises(Exception, match="part 'average' cannot be saved") as error:
            train_averaged(world, root / kind.__name__, source, 2, kind=kind)
        found.append(str(error.value))
    return found


def test_a_state_that_other_ranks_could_not_take_over_is_refused_at_the_save(source, tmp_path):
    for found in run_ranks(refusals, 2, tmp_path, source):
        for message, text in zip(found, REFUSED.values(), strict=True):
            assert text in message
    assert list(tmp_path.glob("*/global_step_*")) == []


@pytest.mark.parametrize(("num_ranks", "changes"), [(1, {}), (2, {"fsdp_size": 1})])
def test_a_part_of_each_rank_is_not_given_to_other_ranks(source, tmp_path, num_ranks, changes):
    run_ranks(train_averaged, 2, tmp_path / "run", source, 2)
    text = "one state of the part 'average' for each of its ranks"
    with pytest.raises(AssertionError, match=text):
        run_ranks(train_averaged, num_ranks, tmp_path / "run", source, **changes)
    (info,) = layout.checkpoints(tmp_path / "run")
    assert info.step == 2
