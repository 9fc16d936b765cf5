"""Prove that the loss of an export in an engine equals the validation loss of its step.

The engine gets the very tokens that the run validated on, and its loss of the supervised ones must
be `val/loss`. How far apart two right answers may be is measured: the export is computed in the
dtype it is served in and in a wider one. Where the run computed with wider weights than it is
served with, the trained model is computed with its own weights and with rounded ones too. With D_i
the difference of sample i's summed log-probability, a row for each cause, and N the supervised
tokens of all samples, the tolerance is (the sum over causes of |sum D_i| + 4 sqrt(sum D_i^2)) / N,
the last sum over all rows, and at least 1e-6 of the loss.
"""

import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import transformers

from trainer.checkpoint import layout
from trainer.checkpoint.export import require_export
from trainer.config import ConfigError, parse_recorded
from trainer.runtime.files import atomic_write
from trainer.runtime.json_lines import strict
from trainer.tools.evaluate import engines
from trainer.tools.evaluate.causes import (
    Trained,
    causes_of,
    first_difference,
    round_weights,
    sums_of,
    trained_model,
)
from trainer.tools.evaluate.engines import VLLM, Sample
from trainer.tracking import metrics_file, read_metrics
from trainer.tracking.run_info import read_config
from trainer.train.start.inputs import prepare_data_of_run

LEAST_TOLERANCE = 1e-6
NUM_DEVIATIONS = 4
PROOFS = "proofs"


@dataclass(frozen=True)
class Served:
    """Loss of the export in `engine`, how far the trained one may be from it, and of an adapter
    the loss of its base without it. `rounding`: how far apart two right sums of a sample may be.
    """

    engine: str
    loss: float = math.nan
    tolerance: float = math.nan
    base_loss: float | None = None
    sums: np.ndarray | None = None
    rounding: float = 0.0


@dataclass(frozen=True)
class Certificate:
    """The result of a proof; `causes` and `first_difference` where the losses differ."""

    checkpoint: str
    step: int
    engine: str
    dtype: str
    is_equal: bool
    val_loss: float
    served_loss: float
    tolerance: float
    base_loss: float | None
    num_samples: int
    num_loss_tokens: int
    causes: tuple[str, ...]
    first_difference: str | None
    created_ts: float


def prove_serving(checkpoint: Path, *, engine: str, python: str) -> tuple[Certificate, Path]:
    """Return the certificate and where it was written.

    Raises `ConfigError` and `DataError` where there is nothing to compare.
    """
    if engine == VLLM:
        engines.require_vllm(python)
    trained = read_trained(checkpoint)
    transformers.logging.disable_progress_bar()
    require_export(trained.info)
    causes = causes_of(trained)
    served = Served(engine)
    try:
        served = measure(trained, engine, python)
    except Exception as error:  # a cause may explain why the export cannot even be loaded
        if not causes:
            raise
        reason = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        causes.append(f"{engine} does not load it: {reason}")
    certificate = certify(trained, served, causes)
    path = checkpoint.resolve().parent / PROOFS / f"step_{trained.info.step}_{engine}.json"
    path.parent.mkdir(exist_ok=True)
    atomic_write(path, json.dumps(strict(asdict(certificate)), indent=1) + "\n")
    return certificate, path


def certify(trained: Trained, served: Served, causes: list[str]) -> Certificate:
    is_near = abs(served.loss - trained.loss) <= served.tolerance
    base_loss = served.base_loss
    if base_loss is not None and abs(base_loss - served.loss) <= served.tolerance:
        causes = [*causes, "adapter: the served loss is that of the base model without the adapter"]
    is_equal = is_near and not causes
    difference = None
    if not is_equal and served.sums is not None:
        difference = first_difference(trained, served.sums, rounding=served.rounding)
    if not causes and not is_near:
        causes = ["unknown: every file of the export is as written, and holds what was trained"]
    return Certificate(
        checkpoint=trained.info.path.name,
        step=trained.info.step,
        engine=served.engine,
        dtype=str(_dtypes(trained)[0]).removeprefix("torch."),
        is_equal=is_equal,
        val_loss=trained.loss,
        served_loss=served.loss,
        tolerance=served.tolerance,
        base_loss=base_loss,
        num_samples=len(trained.samples),
        num_loss_tokens=trained.num_loss_tokens,
        causes=tuple(causes),
        first_difference=difference,
        created_ts=time.time(),
    )


def read_trained(checkpoint: Path) -> Trained:
    info, run_dir = layout.inspect(checkpoint), checkpoint.resolve().parent
    if info.manifest is None:
        raise ConfigError(f"'{checkpoint}' cannot be proven: {info.reason}")
    config = parse_recorded(read_config(run_dir))
    log = run_dir / metrics_file.FILE_NAME
    rows = [row for row in read_metrics(log) if row["step"] == info.step and "val/loss" in row]
    if not rows:
        raise ConfigError(
            f"no validation at step {info.step} in '{log}'. Fix: set trainer.test_freq so that "
            "saved steps are validated, or prove another checkpoint"
        )
    data = prepare_data_of_run(config, run_dir)
    validation = data.validation
    if validation is None:
        raise ConfigError(
            "the run had no validation samples. Fix: set data.val_files or data.val_ratio"
        )
    samples = [
        Sample(*validation.sample(index), validation.location(index))
        for index in range(len(validation))
    ]
    num_loss_tokens = sum(int(sample.mask[1:].sum()) for sample in samples)
    num_validated = int(rows[-1]["val/total_valid_token_count"])
    if num_loss_tokens != num_validated:
        raise ConfigError(
            f"the validation data are no longer those of step {info.step}: {num_loss_tokens} "
            f"supervised tokens, {num_validated} were validated. Fix: restore the files"
        )
    loss = float(rows[-1]["val/loss"])
    return Trained(info, config, data.tokenizer, validation, samples, loss, num_loss_tokens)


def _dtypes(trained: Trained) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtype it is served in, no wider than that of the validation, and a wider one."""
    config = trained.config
    dtypes = {config.trainer.checkpoint.export_dtype, config.model.fsdp_config.param_dtype}
    if dtypes == {"float32"}:
        return torch.float32, torch.float64
    return torch.bfloat16, torch.float32


def measure(trained: Trained, engine: str, python: str) -> Served:
    samples, export = trained.samples, trained.export
    narrow, wide = _dtypes(trained)
    exact = engines.sums_in_transformers(export, samples, dtype=wide)
    rounded = engines.sums_in_transformers(export, samples, dtype=narrow)
    sums, program = rounded, f"transformers {transformers.__version__}"
    if engine == VLLM:
        sums, program = engines.sums_in_vllm(export, samples, python=python)
    differences = [rounded - exact]
    if narrow == torch.bfloat16 and trained.config.model.fsdp_config.param_dtype != "bfloat16":
        with trained_model(trained) as model:
            unrounded = sums_of(model, trained)
            round_weights(model, narrow)
            differences.append(sums_of(model, trained) - unrounded)
    D = np.stack(differences)  # [causes, samples]
    spread = NUM_DEVIATIONS * float(np.sqrt((D**2).sum()))
    tolerance = (float(np.abs(D.sum(axis=1)).sum()) + spread) / trained.num_loss_tokens
    base_loss = None
    if engines.adapter_of(export)[1] is not None:
        base = engines.sums_in_transformers(export, samples, dtype=wide, has_adapter=False)
        base_loss = -float(base.sum()) / trained.num_loss_tokens
    return Served(
        engine=program,
        loss=-float(sums.sum()) / trained.num_loss_tokens,
        tolerance=max(tolerance, LEAST_TOLERANCE * abs(trained.loss)),
        base_loss=base_loss,
        sums=sums,
        rounding=spread / math.sqrt(len(samples)),
    )
