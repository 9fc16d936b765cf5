"""Small models, samples and training runs for tests, built from the project's own parts."""

from unittest.mock import Mock

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from trainer.config import FsdpConfig, GuardConfig, ModelConfig, OptimConfig, TrainerConfig
from trainer.data.batch_plan import START, Limits, RankPlan, Schedule, Share
from trainer.data.loader import TrainLoader, ValidationBatches
from trainer.model import assemble, flops
from trainer.model.pretrained import ModelSource
from trainer.optim import OPTIMIZERS
from trainer.optim.clip import clipped_step
from trainer.optim.schedule import LrSchedule
from trainer.runtime.heartbeat import Heartbeat
from trainer.runtime.progress import LoopState
from trainer.runtime.signals import StopRequest
from trainer.train.fit import fit
from trainer.train.guard import Guard
from trainer.train.meter import Meter
from trainer.train.run import Run

VOCAB = 160
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


class OneSource:
    """Samples that come from one source."""

    names = ("toy",)
    lengths: np.ndarray
    num_loss_tokens: np.ndarray

    @property
    def shares(self):
        return (Share(len(self.lengths)),)

    @property
    def record(self):
        return []

    def __len__(self):
        return len(self.lengths)

    def source_of(self, ids):
        return np.zeros(len(ids), dtype=np.int64)

    def of_rows(self, rows):
        return rows

    def require_unchanged(self):
        """These samples have no file."""

    def counts(self, ids):
        return self.lengths[ids], self.num_loss_tokens[ids]


class ToySamples(OneSource):
    """Random conversations of 2 to 40 tokens. About half of the tokens are supervised, at least one
    per conversation.
    """

    def __init__(self, num_samples=24, seed=0, *, shares=()):
        """Make samples of one source, or of sources with these `shares`."""
        generator = np.random.default_rng(seed)
        self._samples = []
        for _ in range(num_samples):
            length = int(generator.integers(2, 41))
            mask = generator.random(length) < 0.5
            mask[-1] = True
            self._samples.append((generator.integers(0, VOCAB, length).astype(np.int32), mask))
        self.lengths = np.array([len(ids) for ids, _ in self._samples])
        self.num_loss_tokens = np.array([int(mask[1:].sum()) for _, mask in self._samples])
        self._shares = shares or (Share(num_samples),)
        self.names = tuple(f"source{number}" for number in range(len(self._shares)))
        self._ends = np.cumsum([share.num_rows for share in self._shares])

    @property
    def shares(self):
        return self._shares

    def source_of(self, ids):
        return np.searchsorted(self._ends, ids, side="right")

    def sample(self, index):
        return self._samples[index]


def write_model_config(path, model_type="qwen2", **changes):
    """A directory with only a config.json: 2 layers, hidden 64."""
    settings = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "vocab_size": VOCAB,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "initializer_range": 0.1,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    config = AutoConfig.for_model(model_type, **{**settings, **changes})
    config.save_pretrained(path)
    return ModelSource(str(path), random_weights=True)


def write_weights(path, dtype=torch.float32, **how):
    """Save random weights for the config.json of a directory; return the model. `how` is for
    `save_pretrained`.
    """
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=dtype)
    model.save_pretrained(path, **how)
    return model


def change_tensors(file, change):
    """Let `change` alter the tensors of a file."""
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


def _taken(cls, changes):
    """Take the fields of a dataclass out of `changes`."""
    return {name: changes.pop(name) for name in cls.__dataclass_fields__ if name in changes}


def model_config(**changes):
    fsdp = FsdpConfig(**({"param_dtype": "float32"} | _taken(FsdpConfig, changes)))
    return ModelConfig(
        **({"partial_pretrain": "toy", "random_weights": True, "fsdp_config": fsdp} | changes)
    )


def optim_config(**changes):
    return OptimConfig(**({"lr": 3e-3, "lr_warmup_steps_ratio": 0.2} | changes))


def build_toy_model(world, source, *, is_packed=True, **changes):
    config = model_config(**changes)
    model = assemble.on_meta(config, source, is_packed=is_packed)
    assemble.prepare(model, config, source, world=world, seed=7)
    return model


def build(world, source, *, max_length=64, seed=1, **changes):
    """The model that a run with these settings of `model` would train, checked."""
    design = assemble.design_model(model_config(**changes), source, max_length=max_length)
    return assemble.build_model(design, world=world, seed=seed)


def update(
    optimizer,
    norm,
    *,
    lr,
    max_norm=1e9,
    is_skipped=False,
    key=0,
):
    """One clipped step of every group at the rate `lr`."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    clipped_step(
        optimizer,
        total_norm=norm,
        is_skipped=torch.tensor(is_skipped),
        max_norm=max_norm,
        rounding_key=key,
    )


class Recorder:
    """A tracker that keeps the rows of training and validation."""

    def __init__(self):
        self.rows = []
        self.samples = {}

    def log(self, data, step, kind=None):
        if kind is None:
            self.rows.append((step, dict(data)))

    def log_rows(self, step, losses, location):
        self.samples[step] = losses

    def rewind(self, step):
        pass

    def column(self, key):
        return [data[key] for _, data in self.rows if key in data]


def no_checkpoints():
    """A manager that saves and requests nothing."""
    answers = {"is_save_due": False, "take_metrics": {}, "decide_rollback": None}
    return Mock(**{f"{name}.return_value": answer for name, answer in answers.items()})


def guard_config(**changes):
    """The defaults; `changes` are keys of both groups."""
    guard = GuardConfig(**_taken(GuardConfig, changes))
    return TrainerConfig(**changes, guard=guard)


def toy_run(
    world,
    model,
    samples,
    *,
    total_steps,
    batch_size=8,
    max_tokens=None,
    max_samples=None,
    start=START,
    skipped_steps=frozenset(),
    **changes,
):
    optim = optim_config(**changes.pop("optim", {}))
    limits = Limits(max_tokens, max_samples if model.is_packed else 1)
    plan = RankPlan(
        world.data_rank,
        world.num_data_ranks,
        limits,
        *flops.length_costs(model),
        share=(world.sequence_rank, world.sequence_size),
    )
    schedule = Schedule(samples.shares, batch_size, seed=3, start=start)
    settings = {
        "world": world,
        "model": model,
        "optimizer": OPTIMIZERS[optim.name](model, optim),
        "lr_schedule": LrSchedule.from_config(optim, peak_lr=3e-3, total_steps=total_steps),
        "loop": LoopState(),
        "batches": TrainLoader(
            samples,
            plan=plan,
            schedule=schedule,
            total_steps=total_steps,
            num_workers=0,
            skipped_steps=skipped_steps,
        ),
        "validation_batches": None,
        "tracking": Recorder(),
        "save_freq": -1,
        "test_freq": -1,
        "seed": 3,
        "hang_timeout_s": 60.0,
        "max_norm": optim.clip_grad,
        "stop": StopRequest(),
        "heartbeat": Heartbeat(),
        "guard": Guard(guard_config()),
        "meter": Meter(world, total_steps=total_steps, cost=flops.step_flops(model)),
        "location": str,
    }
    checkpoints = changes.pop("checkpoints", None) or no_checkpoints()
    run = Run(**{**settings, **changes})
    run.checkpoints = checkpoints
    return run


def short_run(world, source, *, total_steps, **changes):
    """A run that has trained and validated; `changes` are those of `toy_run` and of the model."""
    of_run = ("max_samples", "max_tokens", "optim")
    own = {name: changes.pop(name) for name in of_run if name in changes}
    model = build_toy_model(world, source, **changes)
    run = toy_run(world, model, ToySamples(), total_steps=total_steps, **own)
    run.validation_batches = ValidationBatches(
        ToySamples(5, seed=1), run.batches.plan, batch_size=4
    )
    assert fit(run) == 0
    return run


def whole(tensor):
    """A copy of the tensor, put together from all ranks. Collective."""
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.detach().clone()


def full_parameters(model):
    """{name: whole tensor}, collective."""
    return {name: whole(parameter) for name, parameter in model.named_parameters()}


def differing(ours, theirs):
    """Return the names of tensors that differ in a bit or that one side lacks."""
    both = ours.keys() & theirs.keys()
    unequal = {
        name
        for name in both
        if ours[name].dtype != theirs[name].dtype or not torch.equal(ours[name], theirs[name])
    }
    return sorted(unequal | (ours.keys() ^ theirs.keys()))


def plain_loss(model, samples, indices):
    """Summed cross-entropy of documents, one for each forward pass of transformers: float64."""
    total = torch.zeros((), dtype=torch.float64)
    for index in indices:
        ids, mask = (torch.from_numpy(array) for array in samples.sample(index))
        logits = model(input_ids=ids[None].long(), use_cache=False).logits[0, :-1]
        labels = torch.where(mask[1:], ids[1:].long(), -100)
        total = total + F.cross_entropy(logits, labels, reduction="sum").double()
    return total


def relative(ours, theirs):
    """The largest relative difference."""
    assert len(ours) == len(theirs) > 0
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))
