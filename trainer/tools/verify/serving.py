"""Served loss = trained loss: what an engine makes of an export, against the validation of its step
(floor 5).

The tokens that the run validated on are given to the engine; the loss of the supervised ones,
weighted as `val/loss`, must be that of the step. How far apart two right answers may be is
measured, not guessed: the export is computed twice, in the dtype it is served in and in a wider
one. Where the run computed with wider weights than it is served with, the trained model is computed
with its own weights and with rounded ones too. With D_i the difference of sample i's summed
log-probability, a row for each cause, and N the supervised tokens of all, the tolerance is (the sum
over causes of |sum D_i| + 4 sqrt(sum D_i^2)) / N, the last sum over all, and at least 1e-6 of the
loss.
"""

import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import transformers

from trainer.checkpoint import layout
from trainer.checkpoint.export import require_export
from trainer.checkpoint.layout import CheckpointInfo
from trainer.config import Config, ConfigError, parse_config
from trainer.data.samples import Samples
from trainer.run.inputs import PreparedData, prepare_data_of_run
from trainer.runtime.files import atomic_write
from trainer.runtime.json_lines import strict
from trainer.serving import engines
from trainer.serving.engines import Sample
from trainer.tools.verify import serving_causes
from trainer.tracking import metrics_file, read_metrics
from trainer.tracking.run_info import read_config

LEAST_TOLERANCE = 1e-6
NUM_DEVIATIONS = 4
PROOFS = "proofs"


@dataclass(frozen=True)
class Trained:
    """A checkpoint and the validation of its step."""

    info: CheckpointInfo
    config: Config
    data: PreparedData
    validation: Samples
    samples: list[Sample]
    loss: float
    num_loss_tokens: int


@dataclass(frozen=True)
class ServedLoss:
    """Loss of the export, how far from it the trained one may be, the loss of an adapter's base
    without it.
    """

    loss: float
    tolerance: float
    base_loss: float | None
    program: str
    sums: np.ndarray | None
    rounding: float = 0.0
    """How far apart two right sums of a sample may be."""


@dataclass(frozen=True)
class Certificate:
    """What was proven; `causes` and `first_difference` where it was not."""

    checkpoint: str
    step: int
    engine: str
    dtype: str
    is_equal: bool
    val_loss: float
    served_loss: float
    tolerance: float
    base_loss: float | None
    """Of an adapter's base without it."""
    num_samples: int
    num_loss_tokens: int
    causes: tuple[str, ...]
    first_difference: str | None
    created_ts: float


def prove_serving(checkpoint: Path, *, engine: str, python: str) -> tuple[Certificate, Path]:
    """The certificate and where it was written. Raises `ConfigError`, `DataError` where nothing
    can be compared.
    """
    if engine == engines.VLLM:
        engines.require_vllm(python)
    trained = read_trained(checkpoint)
    export = checkpoint / layout.HUGGINGFACE
    transformers.logging.disable_progress_bar()
    require_export(trained.info)
    found = serving_causes.causes(trained.info, trained.config, trained.data, trained.samples)
    measured = ServedLoss(math.nan, math.nan, None, engine, None)
    try:
        measured = measure(trained, export, engine, python)
    except Exception as error:  # what was found may be why it cannot even be loaded
        if not found:
            raise
        found.append(
            f"{engine} does not load it: {type(error).__name__}: {str(error).splitlines()[0]}"
        )
    certificate = _certificate(trained, measured, found)
    path = checkpoint.resolve().parent / PROOFS / f"step_{trained.info.step}_{engine}.json"
    path.parent.mkdir(exist_ok=True)
    atomic_write(path, json.dumps(strict(asdict(certificate)), indent=1) + "\n")
    return certificate, path


def _certificate(trained: Trained, measured: ServedLoss, causes: list[str]) -> Certificate:
    is_near = abs(measured.loss - trained.loss) <= measured.tolerance
    if (
        measured.base_loss is not None
        and abs(measured.base_loss - measured.loss) <= measured.tolerance
    ):
        causes = [
            *causes,
            "adapter: served is the loss of the base model, as if there were no adapter",
        ]
    first = None
    if measured.sums is not None and (causes or not is_near):
        info, config, validation = trained.info, trained.config, trained.validation
        first = serving_causes.first_difference(
            info, config, validation, trained.samples, measured.sums, rounding=measured.rounding
        )
    if not causes and not is_near:
        causes = [
            "not known: every file of the export is as it was written, and says what was trained"
        ]
    return Certificate(
        checkpoint=trained.info.path.name,
        step=trained.info.step,
        engine=measured.program,
        dtype=str(_dtypes(trained.config)[0]).removeprefix("torch."),
        is_equal=is_near and not causes,
        val_loss=trained.loss,
        served_loss=measured.loss,
        tolerance=measured.tolerance,
        base_loss=measured.base_loss,
        num_samples=len(trained.samples),
        num_loss_tokens=trained.num_loss_tokens,
        causes=tuple(causes),
        first_difference=first,
        created_ts=time.time(),
    )


def read_trained(checkpoint: Path) -> Trained:
    info, run_dir = layout.inspect(checkpoint), checkpoint.resolve().parent
    if info.manifest is None:
        raise ConfigError(f"'{checkpoint}' cannot be proven: {info.reason}")
    config = parse_config(read_config(run_dir))
    log = run_dir / metrics_file.FILE_NAME
    rows = [row for row in read_metrics(log) if row["step"] == info.step and "val/loss" in row]
    if not rows:
        raise ConfigError(
            f"no validation at step {info.step} in '{log}': set trainer.test_freq so that the "
            f"steps that are saved are validated, or prove another checkpoint"
        )
    data = prepare_data_of_run(config, run_dir)
    if data.validation is None:
        raise ConfigError("the run had no validation samples: set data.val_files or data.val_ratio")
    samples = validation_samples(data.validation)
    num_loss_tokens = sum(int(sample.mask[1:].sum()) for sample in samples)
    if num_loss_tokens != int(rows[-1]["val/total_valid_token_count"]):
        raise ConfigError(
            f"the validation data are no longer those of step {info.step}: {num_loss_tokens} "
            f"supervised tokens, {int(rows[-1]['val/total_valid_token_count'])} were validated; "
            f"give back the files as they were"
        )
    return Trained(
        info, config, data, data.validation, samples, float(rows[-1]["val/loss"]), num_loss_tokens
    )


def validation_samples(validation: Samples) -> list[Sample]:
    return [
        Sample(*validation.sample(index), validation.location(index))
        for index in range(len(validation))
    ]


def _dtypes(config: Config) -> tuple[torch.dtype, torch.dtype]:
    """What it is served in, no wider than what it was validated in; and a wider one."""
    exact = (config.trainer.checkpoint.export_dtype, config.model.fsdp_config.param_dtype) == (
        "float32",
        "float32",
    )
    return (torch.float32, torch.float64) if exact else (torch.bfloat16, torch.float32)


def measure(trained: Trained, export: Path, engine: str, python: str) -> ServedLoss:
    narrow, wide = _dtypes(trained.config)
    exact, rounded = (
        engines.in_transformers(export, trained.samples, dtype=dtype) for dtype in (wide, narrow)
    )
    served, program = rounded, f"transformers {transformers.__version__}"
    if engine == engines.VLLM:
        served, program = engines.in_vllm(export, trained.samples, python=python)
    differences = np.stack([rounded - exact, *_of_rounded_weights(trained, narrow)])
    spread = NUM_DEVIATIONS * float(np.sqrt((differences**2).sum()))
    tolerance = (float(np.abs(differences.sum(axis=1)).sum()) + spread) / trained.num_loss_tokens
    tolerance = max(tolerance, LEAST_TOLERANCE * abs(trained.loss))
    base_loss = None
    if engines.adapter_of(export)[1] is not None:
        base = engines.in_transformers(export, trained.samples, dtype=wide, has_adapter=False)
        base_loss = -float(base.sum()) / trained.num_loss_tokens
    loss = -float(served.sum()) / trained.num_loss_tokens
    rounding = spread / math.sqrt(len(trained.samples))
    return ServedLoss(loss, tolerance, base_loss, program, served, rounding)


def _of_rounded_weights(trained: Trained, narrow: torch.dtype) -> Iterator[np.ndarray]:
    """What the trained model's sums differ by when its weights are rounded, where it may have
    computed with others.
    """
    if narrow == torch.bfloat16 and trained.config.model.fsdp_config.param_dtype != "bfloat16":
        with serving_causes.trained_model(trained.info, trained.config) as model:
            own = np.array(list(serving_causes.sums_of(model, trained.validation)))
            serving_causes.round_weights(model, narrow)
            yield np.array(list(serving_causes.sums_of(model, trained.validation))) - own
