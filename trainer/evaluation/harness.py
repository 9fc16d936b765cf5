"""Benchmarks of others: lm-evaluation-harness is given an exported checkpoint, and its results are read (floor 5)."""

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from trainer.config import ConfigError
from trainer.serving.engines import VLLM, adapter_of

INSTALL = "pip install lm-eval (with vLLM: pip install 'lm-eval[vllm]')"
NUM_LINES = 12


def run_tasks(export: Path, tasks: str, *, engine: str, python: str, seed: int) -> Iterator[tuple[str, float, float]]:
    """(`task_metric`, value, standard error or 0) of every result. Raises `ConfigError` where the harness fails."""
    _require_harness(python)
    model, adapter, _ = adapter_of(export)
    arguments = [f"pretrained={model}", *([] if adapter is None else [f"peft={adapter}"]), "dtype=auto"]
    if engine == VLLM and adapter is not None:
        arguments[1] = f"lora_local_path={adapter}"
    with tempfile.TemporaryDirectory(prefix="sft-harness-") as work:
        command = [python, "-m", "lm_eval", "--model", "vllm" if engine == VLLM else "hf", "--tasks", tasks]
        command += ["--model_args", ",".join(arguments), "--output_path", work, "--seed", str(seed)]
        ended = subprocess.run(command, env=_environment(), capture_output=True, text=True, stdin=subprocess.DEVNULL)
        files = sorted(Path(work).rglob("results*.json"))
        if ended.returncode != 0 or not files:
            said = "\n".join(ended.stderr.splitlines()[-NUM_LINES:])
            raise ConfigError(f"lm_eval ended with {ended.returncode} and {len(files)} results:\n{said}")
        results = json.loads(files[-1].read_text())["results"]
    for task, values in results.items():
        for name, value in values.items():
            metric, _, choice = name.partition(",")
            if choice and not metric.endswith("_stderr") and isinstance(value, int | float):
                error = values.get(f"{metric}_stderr,{choice}")
                suffix = "" if choice == "none" else f"_{choice}"
                yield f"{task}_{metric}{suffix}", float(value), float(error) if isinstance(error, int | float) else 0.0


def _require_harness(python: str) -> None:
    code = "import importlib.util as u, sys; sys.exit(u.find_spec('lm_eval') is None)"
    if subprocess.run([python, "-c", code], env=_environment(), stdin=subprocess.DEVNULL).returncode != 0:
        raise ConfigError(f"--tasks needs lm-evaluation-harness in {python}: {INSTALL}, or name another with --python")


def _environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}
