"""One clean tracker run made from `metrics.jsonl`: each step once, whatever kills and rollbacks there were."""

from pathlib import Path

from trainer.config import ConfigError
from trainer.errors import EXIT_CRASH
from trainer.tracking import events_file, metrics_file, run_info
from trainer.tracking.facade import HISTORIES, importable
from trainer.tracking.run_info import RunFile, RunInfo

TARGETS = ("tensorboard", "wandb", "mlflow", "trackio", "csv")


def resend(run_dir: Path, *, target: str, output: Path) -> str:
    """Write the run to the tracker `target`, with its files in the new directory `output`; how to look at it.

    The tracker shows it as finished if its last attempt ended with exit code 0. Raises `ConfigError` if there is
    nothing to read or `output` is in use, and what the tracker raises.
    """
    metrics_path = run_dir / metrics_file.FILE_NAME
    if not metrics_path.is_file():
        raise ConfigError(f"'{run_dir}' has no {metrics_file.FILE_NAME}: give the directory of a run")
    if output.exists() and any(output.iterdir()):
        raise ConfigError(f"'{output}' is not empty: name a new directory with --output")
    spec = HISTORIES if target == "csv" else importable(target)
    output.mkdir(parents=True, exist_ok=True)
    description = run_info.read_run_file(run_dir / run_info.FILE_NAME)
    info = RunInfo(
        project_name=description.get("project_name", run_dir.resolve().parent.name),
        experiment_name=description.get("experiment_name", run_dir.resolve().name),
        config=description.get("config", {}),
        run_dir=output,
        metrics_path=metrics_path,
        total_steps=description.get("total_steps"),
        attempt=1 + metrics_file.read_past(metrics_path).num_attempts,
        run_file=RunFile(output / run_info.FILE_NAME),
        group=description.get("group", description.get("experiment_name", run_dir.resolve().name)),
        resume_step=-1,
    )
    backend = spec.build(info)
    backend.open()  # sends all rows, as those of earlier attempts
    exit_code = events_file.last_exit_code(run_dir / events_file.FILE_NAME)
    backend.close(EXIT_CRASH if exit_code is None else exit_code)
    return spec.where(info) if spec.where is not None else str(output)
