"""Trials of a tiny model of a family: its first step compared with plain transformers, its export,
and a killed run.
"""

import copy
import logging
from contextlib import contextmanager

import torch
from exports import export_model
from families import family_settings
from torch.nn.utils import get_total_norm
from toy import ToySamples, build, differing, plain_loss
from toy_runs import Recipe, StopsAfter, run
from transformers import AutoConfig, AutoModelForCausalLM

from trainer.checkpoint.export import ExportSource
from trainer.checkpoint.model_files import ModelFiles
from trainer.config import ConfigError
from trainer.data.loader import pack
from trainer.model.pretrained import ModelSource

PACKED = "packed"
PER_DOCUMENT = "per document"
REFUSED = "refused"
ERRORS = ("loss error", "norm error", "gradient error")
SAMPLES = ToySamples()
MAX_LENGTH = int(max(SAMPLES.lengths))
DOCUMENTS = [index for index, length in enumerate(SAMPLES.lengths) if 5 <= length <= 25][:3]
NUM_TOKENS = int(SAMPLES.num_loss_tokens[DOCUMENTS].sum())


def family_config(name, **changes):
    """The configuration of the tiny model of a family or variant."""
    config = AutoConfig.for_model(name.split()[0], **family_settings(name, **changes))
    for key in vars(config):
        if key.endswith(("pdrop", "dropout", "dropout_prob", "dropout_p", "layerdrop", "noise")):
            setattr(config, key, 0.0)
    return config


def save_model(path, name, **changes):
    """A random model of the family or variant in which no parameter has the value that a
    missing one would get.
    """
    config = family_config(name, **changes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    parameters = {id(parameter) for parameter in model.parameters()}
    with torch.no_grad():
        for key, tensor in {
            id(t): (k, t) for k, t in model.state_dict(keep_vars=True).items()
        }.values():
            # other buffers are tables that follow from the configuration
            if id(tensor) in parameters or "bias" in key:
                tensor.add_(torch.randn_like(tensor) * 0.1)
    model.save_pretrained(path)


def plain_step(path):
    """Return (mean loss, gradients) of transformers' eager model. It is reset for each document,
    because dynamic RoPE remembers lengths.
    """
    new = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    loss = torch.zeros((), dtype=torch.float64)
    grads = {}
    for index in DOCUMENTS:
        model = copy.deepcopy(new)
        part = plain_loss(model, SAMPLES, [index]) / NUM_TOKENS
        part.backward()
        loss += part.detach()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                grads[name] = grads.get(name, 0) + parameter.grad
    return loss.item(), grads


def dealt(world, *, together):
    """The documents of this rank's micro-batches: as many on every rank, none in those of a
    rank that has none left.
    """
    first, second, third = DOCUMENTS
    if world.size == 1:
        return [[first, second, third]] if together else [[first], [second], [third]]
    if together:
        return [[[first, second], []], [[], [third]]][world.rank]
    return [[[first], [second]], [[third], []]][world.rank]


def our_step(world, model, *, together):
    """(mean loss, gradients) of the model that the trainer built. Collective."""
    model.train()
    model.zero_grad()
    loss = torch.zeros((), dtype=torch.float64)
    for members in dealt(world, together=together):
        part = model(pack(SAMPLES, members)).loss_sum / NUM_TOKENS
        part.backward()
        loss += part.detach()
    torch.distributed.all_reduce(loss)
    return loss.item(), {
        n: p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None
    }


@contextmanager
def heard():
    """Collect the messages that the trainer logs."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("trainer")
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def first_step(world, path, export_dir):
    """How the family is trained, and how far the first step of any dealing is from plain
    transformers'. Collective.
    """
    source = ModelSource(str(path))
    with heard() as lines:
        try:
            model = build(world, source, max_length=MAX_LENGTH)
        except ConfigError as error:
            first_line, *_ = str(error).splitlines()
            return {"how": REFUSED, "reason": first_line.replace(str(path), "MODEL")}
    said = next(line for line in lines if "documents are packed" in line or "one by one" in line)
    plain_loss, plain_grads = plain_step(path)
    norm = get_total_norm(plain_grads.values())
    measured = []
    for together in (True, False) if model.is_packed else (False,):
        loss, grads = our_step(world, model, together=together)
        nothing = torch.zeros(())
        differences = [
            (grad - plain_grads.get(name, nothing)).norm() / norm for name, grad in grads.items()
        ]
        loss_error = abs(loss - plain_loss) / plain_loss
        norm_error = abs(float(get_total_norm(grads.values()) / norm) - 1)
        measured.append((loss_error, norm_error, float(max(differences))))
    export_model(
        world, model, export_dir, ExportSource(ModelFiles.read(path), None, ()), dtype="float32"
    )
    return {
        "how": PACKED if model.is_packed else PER_DOCUMENT,
        "reason": said.partition(": ")[2],
        "gradients missing": sorted(set(plain_grads) - set(grads)),
        **dict(zip(ERRORS, map(max, zip(*measured, strict=True)), strict=True)),
    }


def resumed(world, path, root, *, is_packed):
    """Return the differences after six steps between an uninterrupted run, `root`/straight, and a
    run that stopped after the fourth step and was rebuilt from its checkpoint. Collective.
    """
    source = ModelSource(str(path))
    form = {"is_packed": is_packed}
    straight = run(world, root / "straight", source, Recipe(), model=form)
    run(world, root / "stopped", source, Recipe(), model=form, stop=StopsAfter(4))
    again = run(world, root / "stopped", source, Recipe(), model=form)
    assert (
        straight.exit_code == again.exit_code == 0 and 0 < again.start_step < Recipe().total_steps
    )
    assert len(straight.losses) == Recipe().total_steps
    late = {step: values for step, values in straight.losses.items() if step > again.start_step}
    faults = [] if late == again.losses else ["losses"]
    faults += differing(straight.parameters, again.parameters)
    return faults + differing(straight.moments, again.moments)
