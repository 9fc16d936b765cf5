"""Proves that the loss of an export in an engine equals the validation loss of its step.

The engine receives exactly the tokens that the run validated on. Its loss over the supervised ones
must equal `val/loss`, within a tolerance. The tolerance follows from measured differences between
correct losses: the export's loss is computed in its serving dtype and in a wider dtype. If the run
used wider weights than the export has, the trained model's loss is also computed with its original
weights and with rounded weights.

Let D_i be the difference of sample i's summed log-probability, in one row for each of these
comparisons, and N the number of supervised tokens of all samples. The tolerance is (the sum over
comparisons of |sum D_i| + 4 sqrt(sum D_i^2)) / N, where the last sum is over all rows. It is at
least 1e-6 of the loss.
"""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import transformers

from trainer.checkpoint import layout
from trainer.checkpoint.export import require_export
from trainer.config import ConfigError, parse_recorded
from trainer.errors import CannotWriteError
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
from trainer.tools.evaluate.engines import VLLM
from trainer.tracking import metrics_file, read_metrics
from trainer.tracking.run_info import read_config
from trainer.train.start.inputs import prepare_data_alone

LEAST_TOLERANCE = 1e-6
NUM_DEVIATIONS = 4
PROOFS = "proofs"


@dataclass
class Certificate:
    """The result of comparing an export with the trained model, filled in step by step.

    `base_loss` is the loss of the base model without the adapter. `causes` and `first_difference`
    are set if the losses differ. `served_loss` and `tolerance` are NaN if the engine cannot load
    the export.
    """

    step: int
    nonce: str
    engine: str
    dtype: str
    is_equal: bool
    val_loss: float
    num_samples: int
    num_loss_tokens: int
    served_loss: float = math.nan
    tolerance: float = math.nan
    base_loss: float | None = None
    causes: list[str] = field(default_factory=list)
    first_difference: str | None = None


def prove_serving(checkpoint: Path, *, engine: str, python: str) -> tuple[Certificate, Path]:
    """Check that a checkpoint's export has the validation loss of training; return the result and its
    file.

    Raises `ConfigError` or `DataError` if there is nothing to compare, and `CannotWriteError`.
    """
    if engine == VLLM:
        engines.require_vllm(python)
    trained = read_trained(checkpoint)
    transformers.logging.disable_progress_bar()
    require_export(trained.info)
    result = Certificate(
        step=trained.info.step,
        nonce=trained.manifest.nonce,
        engine=engine,
        dtype=str(_dtypes(trained)[0]).removeprefix("torch."),
        is_equal=False,
        val_loss=trained.loss,
        num_samples=len(trained.samples),
        num_loss_tokens=trained.num_loss_tokens,
        causes=causes_of(trained),
    )
    try:
        compare(trained, result, python)
    except Exception as error:  # a cause may explain why the export cannot even be loaded
        if not result.causes:
            raise
        reason = str(error).partition("\n")[0]
        result.causes.append(f"{engine} cannot load it: {type(error).__name__}: {reason}")
    path = checkpoint.resolve().parent / PROOFS / f"step_{result.step}_{engine}.json"
    try:
        path.parent.mkdir(exist_ok=True)
        atomic_write(path, json.dumps(strict(result), indent=1) + "\n")
    except OSError as error:
        fix = "Fix: make the run directory writable"
        raise CannotWriteError(f"cannot write the certificate: {error}.\n{fix}") from error
    return result, path


def read_trained(checkpoint: Path) -> Trained:
    """Read a checkpoint and the validation at its step.

    Raises `ConfigError` if the checkpoint is damaged, or if its step was not validated on the
    current data. Raises `DataError` if the data cannot be read.
    """
    info = layout.inspect(checkpoint)
    run_dir = checkpoint.resolve().parent
    if info.manifest is None:
        raise ConfigError(f"cannot prove '{checkpoint}': {info.reason}")
    config = parse_recorded(read_config(run_dir))
    log = run_dir / metrics_file.FILE_NAME
    logged = read_metrics(log) if log.exists() else ()
    rows = [row for row in logged if row["step"] == info.step and "val/loss" in row]
    data = prepare_data_alone(config)
    samples = data.validation
    if not rows or samples is None:
        raise ConfigError(
            f"'{log}' has no validation at step {info.step}.\nFix: prove a different checkpoint, or "
            f"train with trainer.test_freq and data.val_files so that saved steps are validated"
        )
    num_loss_tokens = int(samples.counts(np.arange(len(samples)))[1].sum())
    num_validated = int(rows[-1]["val/total_valid_token_count"])
    if num_loss_tokens != num_validated:
        raise ConfigError(
            f"the validation data changed after step {info.step}: it has {num_loss_tokens} "
            f"supervised tokens, but {num_validated} were validated.\nFix: restore the data files"
        )
    return Trained(
        info=info,
        manifest=info.manifest,
        config=config,
        tokenizer=data.tokenizer,
        samples=samples,
        loss=float(rows[-1]["val/loss"]),
        num_loss_tokens=num_loss_tokens,
    )


def _dtypes(trained: Trained) -> tuple[torch.dtype, torch.dtype]:
    """Return the serving dtype, which is no wider than the dtype of the validation, and a wider
    dtype.
    """
    config = trained.config
    dtypes = {config.trainer.checkpoint.export_dtype, config.model.fsdp_config.param_dtype}
    if dtypes == {"float32"}:
        return torch.float32, torch.float64
    return torch.bfloat16, torch.float32


def compare(trained: Trained, result: Certificate, python: str) -> None:
    """Serve the samples in the engine of `result`, and compare the served loss with `val/loss`.

    The export is refused if `result.causes` holds any cause, even if the losses are equal.
    """
    causes = result.causes
    samples = trained.samples
    export = trained.export
    narrow, wide = _dtypes(trained)
    exact = engines.sums_in_transformers(export, samples, dtype=wide)
    rounded = engines.sums_in_transformers(export, samples, dtype=narrow)
    if result.engine == VLLM:
        sums, result.engine = engines.sums_in_vllm(export, samples, python=python)
    else:
        sums = rounded
        result.engine = f"transformers {transformers.__version__}"
    differences = [rounded - exact]
    if narrow == torch.bfloat16 and trained.config.model.fsdp_config.param_dtype != "bfloat16":
        with trained_model(trained) as model:
            unrounded = sums_of(model, trained)
            round_weights(model, narrow)
            differences.append(sums_of(model, trained) - unrounded)
    D = np.stack(differences)  # [comparisons, samples]
    spread = NUM_DEVIATIONS * float(np.sqrt((D**2).sum()))
    tolerance = (float(np.abs(D.sum(axis=1)).sum()) + spread) / trained.num_loss_tokens
    tolerance = max(tolerance, LEAST_TOLERANCE * abs(trained.loss))
    loss = -float(sums.sum()) / trained.num_loss_tokens
    result.tolerance = tolerance
    result.served_loss = loss
    base, adapter = engines.model_of(export)
    if adapter:
        base_sums = engines.sums_in_transformers(base, samples, dtype=wide)
        result.base_loss = -float(base_sums.sum()) / trained.num_loss_tokens
        if abs(result.base_loss - loss) <= tolerance:
            causes.append(
                "adapter: the served loss equals the loss of the base model without the adapter"
            )
    result.is_equal = abs(loss - trained.loss) <= tolerance and not causes
    if not result.is_equal:
        rounding = spread / math.sqrt(len(samples))
        result.first_difference = first_difference(trained, sums, rounding=rounding)
        if not causes:
            causes.append("unknown: the export is complete and contains the trained weights")
