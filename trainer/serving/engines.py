"""What an exported directory gives the supervised tokens of samples, in transformers or in vLLM
(floor 2).
"""

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
import transformers

from trainer.config import ConfigError
from trainer.runtime.environment import call
from trainer.runtime.processes import run_in
from trainer.serving import vllm_engine
from trainer.weights import whole_model

TRANSFORMERS, VLLM = "transformers", "vllm"
PEFT_CONFIG = "adapter_config.json"
VLLM_RANKS = (16, 32, 64, 128, 256, 320, 512)
"""What vLLM takes as `max_lora_rank`."""
NUM_LINES = 12  # of an engine's last words


@dataclass(frozen=True)
class Sample:
    """Token ids (int32) and which of them are supervised, of one document."""

    ids: np.ndarray
    mask: np.ndarray
    place: str
    """`file:line` of its row."""


def adapter_of(export: Path) -> tuple[Path, Path | None, int]:
    """(model, adapter, rank): of an exported adapter its base and itself, of a model None and 0.

    Raises `ConfigError` if the base is not where the adapter says.
    """
    if not (export / PEFT_CONFIG).exists():
        return export, None, 0
    settings = json.loads((export / PEFT_CONFIG).read_text(encoding="utf-8"))
    base = Path(str(settings["base_model_name_or_path"]))
    if not base.is_dir():
        raise ConfigError(
            f"'{export}' is an adapter for '{base}', which is no directory here: put the base "
            f"model there"
        )
    return base, export, int(settings["r"])


def vllm_rank(rank: int) -> int:
    """The `max_lora_rank` for an adapter. Raises `ConfigError` for one that vLLM does not take."""
    for limit in VLLM_RANKS:
        if rank <= limit:
            return limit
    raise ConfigError(
        f"vLLM takes adapters of rank {VLLM_RANKS[-1]} at most, this one has {rank}: use --engine "
        f"transformers, or merge it with {call('checkpoint export CHECKPOINT DIRECTORY')}"
    )


def in_transformers(
    export: Path, samples: Sequence[Sample], *, dtype: torch.dtype, has_adapter: bool = True
) -> np.ndarray:
    """Sums as transformers' own class computes them, one document after the other;
    `has_adapter` false: its base.
    """
    model = load_model(export, dtype=dtype, has_adapter=has_adapter)
    return np.array([_sum(model, sample) for sample in samples])


def load_model(
    export: Path, *, dtype: torch.dtype | Literal["auto"], has_adapter: bool = True
) -> Any:
    """By transformers' own class, with the adapter where it is one; `dtype` "auto": as it was
    written.
    """
    path, adapter, _ = adapter_of(export)
    whole = whole_model(from_files(transformers.AutoConfig, path))
    loader: Any = transformers.AutoModelForCausalLM if whole is None else type(whole)
    model: Any = from_files(loader, path, dtype=dtype)
    if adapter is not None and has_adapter:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter).to(model.dtype)
    return model.eval()


def from_files(loader: Any, path: Path, **options: Any) -> Any:
    """What a class of transformers makes of the files at `path`. Raises `ConfigError` where
    that needs their code.
    """
    try:
        return loader.from_pretrained(path, trust_remote_code=False, **options)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise ConfigError(
            f"'{path}' is made by Python code that comes with it (auto_map in its files), which is "
            "not run here. Fix: serve it with a server that is told to trust that code, and give "
            "its address: --engine http://HOST/v1"
        ) from error


@torch.no_grad()
def _sum(model: Any, sample: Sample) -> float:
    ids, mask = torch.from_numpy(sample.ids).long(), torch.from_numpy(sample.mask)
    logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1][mask[1:]]
    return -F.cross_entropy(logits.double(), ids[1:][mask[1:]], reduction="sum").item()


def in_vllm(export: Path, samples: Sequence[Sample], *, python: str) -> tuple[np.ndarray, str]:
    """(sums as vLLM serves them, its version), in a process of `python`, which has it. Raises
    `ConfigError`.
    """
    masks = [sample.mask.tolist() for sample in samples]
    answer = ask_vllm(
        export, {"ids": [sample.ids.tolist() for sample in samples], "masks": masks}, python=python
    )
    return np.array(answer["sums"]), f"vllm {answer['version']}"


def ask_vllm(export: Path, asked: Mapping[str, Any], *, python: str) -> dict[str, Any]:
    """What `vllm_engine.py` answers to a job about an export. Raises `ConfigError` with its
    last words.
    """
    model, adapter, rank = adapter_of(export)
    with tempfile.TemporaryDirectory(prefix="sft-vllm-") as work:
        job_file, answer_file = Path(work, "job.json"), Path(work, "answer.json")
        about = {
            "model": str(model),
            "adapter": adapter and str(adapter),
            "max_lora_rank": vllm_rank(rank),
        }
        job_file.write_text(
            json.dumps({**about, **asked, "answer": str(answer_file)}), encoding="utf-8"
        )
        ended = run_in(python, str(vllm_engine.__file__), str(job_file))
        if ended.returncode != 0:
            said = "\n".join(ended.stderr.splitlines()[-NUM_LINES:])
            raise ConfigError(
                f"vLLM does not serve '{export}' ({python} ended with {ended.returncode}):\n{said}"
            )
        answer: dict[str, Any] = json.loads(answer_file.read_text(encoding="utf-8"))
    return answer


def require_vllm(python: str) -> None:
    require_module("vllm", python, "pip install vllm")


def require_module(name: str, python: str, install: str) -> None:
    """Raises `ConfigError` where the interpreter is none, or lacks the module."""
    code = f"import importlib.util as u, sys; sys.exit(u.find_spec('{name}') is None)"
    try:
        found = run_in(python, "-c", code).returncode == 0
    except OSError as error:
        raise ConfigError(f"--python {python} is no interpreter: {error}") from error
    if not found:
        raise ConfigError(
            f"{python} has no {name} ({install}): name an interpreter that has it with --python"
        )
