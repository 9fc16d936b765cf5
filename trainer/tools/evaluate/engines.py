"""Serve an export with transformers or vLLM: log-probabilities of tokens, and greedy answers."""

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
import transformers

from trainer.config import ConfigError
from trainer.model.weights import whole_model
from trainer.runtime.processes import run_in
from trainer.tools.evaluate import vllm_engine
from trainer.tools.evaluate.scorers import Turns

VLLM = "vllm"
PEFT_CONFIG = "adapter_config.json"
LEAST_VLLM_RANK = 16
NUM_LOG_LINES = 12
BATCH = 32
"""Prompts that transformers continues together."""

Generate = Callable[[Path, Sequence[Turns], int], Iterator[list[str]]]
"""Takes an export, prompts and the largest number of new tokens. Yields batches of answers, in the
order of the prompts.
"""


@dataclass(frozen=True)
class Sample:
    """Token ids (int32) of one document, its supervision mask, and its `file:line`."""

    ids: np.ndarray
    mask: np.ndarray
    place: str


def make_generate(engine: str, python: str) -> Generate:
    """Return the function of an engine. vLLM runs in the interpreter `python`."""
    if engine != VLLM:
        return generate_in_transformers
    require_vllm(python)
    return partial(generate_in_vllm, python)


def adapter_of(export: Path) -> tuple[Path, Path | None, int]:
    """Return model, adapter and rank: (base, export, r) for an adapter, else (export, None, 0).

    Raises `ConfigError` if the base model is missing.
    """
    if not (export / PEFT_CONFIG).exists():
        return export, None, 0
    settings = json.loads((export / PEFT_CONFIG).read_text(encoding="utf-8"))
    base = Path(str(settings["base_model_name_or_path"]))
    if not base.is_dir():
        raise ConfigError(
            f"'{export}' is an adapter, and there is no directory '{base}' for its base model.\n"
            f"Fix: put the base model there"
        )
    return base, export, int(settings["r"])


def load_model(
    export: Path, *, dtype: torch.dtype | Literal["auto"], has_adapter: bool = True
) -> Any:
    """Load an export with transformers' own class, and its adapter unless `has_adapter` is false.

    `dtype="auto"` keeps the dtype of the files.
    """
    path, adapter, _ = adapter_of(export)
    whole = whole_model(_from_files(transformers.AutoConfig, path), str(path))
    loader: Any = transformers.AutoModelForCausalLM if whole is None else type(whole)
    model: Any = _from_files(loader, path, dtype=dtype)
    if adapter is not None and has_adapter:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter).to(model.dtype)
    return model.eval()


def _from_files(loader: Any, path: Path, **options: Any) -> Any:
    """Call `from_pretrained`. Raises `ConfigError` if that would run code of the model."""
    try:
        return loader.from_pretrained(path, trust_remote_code=False, **options)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise ConfigError(
            f"'{path}' needs its own Python code (auto_map in its files), which is not run here.\n"
            f"Fix: score it with a program that runs this code, and record the result with --attach"
        ) from error


@torch.no_grad()
def sums_in_transformers(
    export: Path, samples: Sequence[Sample], *, dtype: torch.dtype, has_adapter: bool = True
) -> np.ndarray:
    """Return the summed log-probability of the supervised tokens of each sample."""
    model = load_model(export, dtype=dtype, has_adapter=has_adapter)
    sums = []
    for sample in samples:
        ids = torch.from_numpy(sample.ids).long()
        is_kept = torch.from_numpy(sample.mask)[1:]
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1][is_kept]
        loss = F.cross_entropy(logits.double(), ids[1:][is_kept], reduction="sum")
        sums.append(-loss.item())
    return np.array(sums)


def sums_in_vllm(export: Path, samples: Sequence[Sample], *, python: str) -> tuple[np.ndarray, str]:
    """Return the sums of `sums_in_transformers` as vLLM computes them, and its version.

    Raises `ConfigError`.
    """
    job = {
        "ids": [sample.ids.tolist() for sample in samples],
        "masks": [sample.mask.tolist() for sample in samples],
    }
    answer = ask_vllm(export, job, python=python)
    return np.array(answer["sums"]), f"vllm {answer['version']}"


def ask_vllm(export: Path, asked: Mapping[str, Any], *, python: str) -> dict[str, Any]:
    """Run `vllm_engine.py` with `python` on a job about an export, and return its answer.

    Raises `ConfigError` with the end of its log.
    """
    model, adapter, rank = adapter_of(export)
    with tempfile.TemporaryDirectory(prefix="sft-vllm-") as work:
        job_file, answer_file = Path(work, "job.json"), Path(work, "answer.json")
        job = {
            **asked,
            "model": str(model),
            "adapter": adapter and str(adapter),
            # vLLM takes powers of two
            "max_lora_rank": max(LEAST_VLLM_RANK, 1 << (rank - 1).bit_length()),
            "answer": str(answer_file),
        }
        job_file.write_text(json.dumps(job), encoding="utf-8")
        ended = run_in(python, str(vllm_engine.__file__), str(job_file))
        if ended.returncode != 0:
            log = "\n".join(ended.stderr.splitlines()[-NUM_LOG_LINES:])
            raise ConfigError(
                f"vLLM cannot serve '{export}' ({python}: exit code {ended.returncode}). The end "
                f"of its log:\n{log}"
            )
        answer: dict[str, Any] = json.loads(answer_file.read_text(encoding="utf-8"))
    return answer


def require_vllm(python: str) -> None:
    """Raise `ConfigError` if `python` is not an interpreter or has no vLLM."""
    code = "import importlib.util as u, sys; sys.exit(u.find_spec('vllm') is None)"
    with suppress(OSError):
        if run_in(python, "-c", code).returncode == 0:
            return
    raise ConfigError(
        f"{python} is no Python that has vllm.\nFix: pip install vllm, or --python with one that has it"
    )


class _Chat:
    """Prompts and answers as token ids, by the tokenizer and chat template of the export."""

    def __init__(self, export: Path) -> None:
        model, _, _ = adapter_of(export)
        has_tokenizer = (export / "tokenizer_config.json").exists()
        place = export if has_tokenizer else model
        self.tokenizer: Any = _from_files(transformers.AutoTokenizer, place)
        ends = _from_files(transformers.AutoConfig, model).get_text_config().eos_token_id
        if (model / "generation_config.json").exists():
            ends = transformers.GenerationConfig.from_pretrained(model).eos_token_id or ends
        all_ends = {self.tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])}
        self.stop_ids = sorted(all_ends - {None})

    def ids(self, turns: Turns) -> list[int]:
        """Return the token ids of a prompt. Raises `ConfigError`."""
        if self.tokenizer.chat_template is not None:
            rendered = self.tokenizer.apply_chat_template(
                list(turns), add_generation_prompt=True, return_dict=True
            )
            return list(rendered["input_ids"])
        if len(turns) > 1:
            raise ConfigError(
                "the model has no chat template, so it cannot answer a list of messages.\n"
                "Fix: ask with rows of `prompt`, or train with data.chat_template"
            )
        return list(self.tokenizer(turns[0]["content"]).input_ids)

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of an answer, without special tokens."""
        return str(
            self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )


@torch.no_grad()
def generate_in_transformers(
    export: Path, prompts: Sequence[Turns], max_new_tokens: int
) -> Iterator[list[str]]:
    """Yield the answers of transformers to `BATCH` prompts at a time, which are padded on the left."""
    transformers.logging.disable_progress_bar()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    chat = _Chat(export)
    model = load_model(export, dtype="auto").to(device)
    pad = chat.tokenizer.pad_token_id
    if pad is None:
        pad = chat.stop_ids[0]
    # replaces the model's own settings, which would fill in whatever is not set here
    model.generation_config = transformers.GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=chat.stop_ids,
        pad_token_id=pad,
    )
    for start in range(0, len(prompts), BATCH):
        rows = [chat.ids(turns) for turns in prompts[start : start + BATCH]]
        width = max(map(len, rows))
        ids = [[pad] * (width - len(row)) + row for row in rows]
        mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
        generated = model.generate(
            input_ids=torch.tensor(ids, device=device),
            attention_mask=torch.tensor(mask, device=device),
        )
        yield [chat.text(row) for row in generated[:, width:].tolist()]


def generate_in_vllm(
    python: str, export: Path, prompts: Sequence[Turns], max_new_tokens: int
) -> Iterator[list[str]]:
    """Yield the answers of vLLM to all prompts at once."""
    chat = _Chat(export)
    job = {
        "ids": [chat.ids(turns) for turns in prompts],
        "max_new_tokens": max_new_tokens,
        "stop_ids": chat.stop_ids,
    }
    answer = ask_vllm(export, job, python=python)
    yield [chat.text(ids) for ids in answer["ids"]]
