"""Serves an export with transformers or vLLM: log-probabilities of tokens, and greedy answers."""

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from safetensors import SafetensorError

from trainer.config import ConfigError
from trainer.data.samples import Samples
from trainer.model.weights import whole_model
from trainer.runtime.environment import call
from trainer.runtime.processes import run_in
from trainer.tools.evaluate import vllm_engine

VLLM = "vllm"
PEFT_CONFIG = "adapter_config.json"
LEAST_VLLM_RANK = 16
NUM_LOG_LINES = 12
BATCH = 32
"""The number of prompts in one batch of transformers."""

Generate = Callable[[Path, Sequence[Sequence[int]], int], list[str]]
"""Takes an export, the tokens of prompts and the maximum number of new tokens. Returns the
answers.
"""


def make_generate(engine: str, python: str) -> Generate:
    """Return the function that generates answers with an engine.

    vLLM runs in the interpreter `python`. Raises `ConfigError` if that interpreter has no vLLM.
    """
    if engine != VLLM:
        return generate_in_transformers
    require_vllm(python)
    return partial(generate_in_vllm, python)


def model_of(export: Path) -> tuple[Path, dict[str, Any]]:
    """Return the directory of the whole model, and the settings of the adapter.

    If the export is a whole model, return it and no settings. If it is an adapter, return its base
    model and the adapter's settings. Raises
    `ConfigError` if the base model is missing.
    """
    if not (export / PEFT_CONFIG).exists():
        return export, {}
    settings = json.loads((export / PEFT_CONFIG).read_text(encoding="utf-8"))
    base = Path(str(settings["base_model_name_or_path"]))
    if not base.is_dir():
        raise ConfigError(
            f"'{export}' is an adapter, but the directory '{base}' of its base model does not "
            f"exist.\n"
            f"Fix: copy the base model to that directory"
        )
    return base, settings


def load_model(export: Path, *, dtype: torch.dtype | Literal["auto"]) -> Any:
    """Load an export with its transformers class, including its adapter if it has one.

    `dtype="auto"` keeps the dtype of the files. Raises `ConfigError` if they cannot be read.
    """
    path, adapter = model_of(export)
    whole = whole_model(_from_files(transformers.AutoConfig, path), str(path))
    loader: Any = transformers.AutoModelForCausalLM if whole is None else type(whole)
    try:
        model: Any = _from_files(loader, path, dtype=dtype)
        if adapter:
            from peft import PeftModel

            model = PeftModel.from_pretrained(model, export).to(model.dtype)
    except SafetensorError as error:
        raise ConfigError(
            f"the weights in '{export}' cannot be read: {error}.\nFix: use another checkpoint, or "
            f"write the export again with `checkpoint export`; `checkpoint verify` lists all damaged "
            f"files"
        ) from error
    return model.eval()


def _from_files(loader: Any, path: Path, **options: Any) -> Any:
    """Call `from_pretrained`. Raises `ConfigError` if that would run code shipped with a model."""
    try:
        return loader.from_pretrained(path, trust_remote_code=False, **options)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise ConfigError(
            f"'{path}' needs its own Python code (auto_map in its files), which this command does "
            f"not run.\n"
            f"Fix: score it with a program that runs this code, and record the result with --attach"
        ) from error


@torch.no_grad()
def sums_in_transformers(export: Path, samples: Samples, *, dtype: torch.dtype) -> np.ndarray:
    """Return, for each sample, the summed log-probability of its supervised tokens."""
    model = load_model(export, dtype=dtype)
    sums = []
    for index in range(len(samples)):
        tokens, mask = samples.sample(index)
        ids = torch.from_numpy(tokens).long()
        is_kept = torch.from_numpy(mask)[1:]
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1][is_kept]
        loss = F.cross_entropy(logits.double(), ids[1:][is_kept], reduction="sum")
        sums.append(-loss.item())
    return np.array(sums)


def sums_in_vllm(export: Path, samples: Samples, *, python: str) -> tuple[np.ndarray, str]:
    """Return the same sums as `sums_in_transformers`, computed by vLLM, and vLLM's version.

    Raises `ConfigError` if vLLM cannot serve the export.
    """
    ids, masks = zip(*map(samples.sample, range(len(samples))), strict=True)
    job = {"ids": [row.tolist() for row in ids], "masks": [row.tolist() for row in masks]}
    answer = ask_vllm(export, job, python=python)
    return np.array(answer["sums"]), f"vllm {answer['version']}"


def ask_vllm(export: Path, asked: Mapping[str, Any], *, python: str) -> dict[str, Any]:
    """Run `vllm_engine.py` in the interpreter `python` on an export, and return its answer.

    `asked` holds the remaining fields of the job. Raises `ConfigError` with the end of the log if
    it fails.
    """
    model, adapter = model_of(export)
    if adapter.get("modules_to_save"):
        raise ConfigError(
            f"vLLM does not serve '{export}', an adapter with modules_to_save.\nFix: create the "
            f"merged model with `{call(f'checkpoint export {export.parent} TARGET')}`, and serve "
            f"that"
        )
    rank = max(LEAST_VLLM_RANK, adapter.get("r", 0))
    job = {
        **asked,
        "model": str(model),
        "adapter": str(export) if adapter else None,
        "max_lora_rank": 1 << (rank - 1).bit_length(),  # vLLM accepts only powers of two
    }
    with tempfile.TemporaryDirectory(prefix="sft-vllm-") as work:
        file = Path(work, "job.json")
        file.write_text(json.dumps(job), encoding="utf-8")
        ended = run_in(python, vllm_engine.__file__, str(file))
        if ended.returncode != 0:
            log = "\n".join(ended.stderr.splitlines()[-NUM_LOG_LINES:])
            raise ConfigError(
                f"vLLM cannot serve '{export}' ({python}: exit code {ended.returncode}). The end "
                f"of its log:\n{log}"
            )
        answer: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return answer


def require_vllm(python: str) -> None:
    """Raise `ConfigError` if `python` is not an interpreter or has no vLLM."""
    code = "import importlib.util as u, sys; sys.exit(u.find_spec('vllm') is None)"
    with suppress(OSError):
        if run_in(python, "-c", code).returncode == 0:
            return
    raise ConfigError(
        f"{python} cannot import vllm.\nFix: pip install vllm, or pass an interpreter that has "
        f"vLLM with --python"
    )


class _AnswerReader:
    """Converts answers to text, with the tokenizer of the export."""

    def __init__(self, export: Path) -> None:
        self.tokenizer: Any = _from_files(transformers.AutoTokenizer, export)
        ends = transformers.GenerationConfig.from_pretrained(export).eos_token_id
        all_ends = {self.tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])}
        self.stop_ids = sorted(all_ends - {None})
        source = str(self.tokenizer.chat_template)
        named = (self.tokenizer.bos_token_id, self.tokenizer.pad_token_id)
        self._around = {
            number
            for number, token in self.tokenizer.added_tokens_decoder.items()
            if token.special and (number in named or token.content in source)
        }
        """Special tokens that surround answers and never occur in them."""

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of an answer, up to the first stop token."""
        own = takewhile(lambda number: number not in self.stop_ids, ids)
        kept = [number for number in own if number not in self._around]
        return str(self.tokenizer.decode(kept, clean_up_tokenization_spaces=False))


@torch.no_grad()
def generate_in_transformers(
    export: Path, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> list[str]:
    """Return transformers' answers. Prompts are processed in batches of `BATCH`, padded on the
    left.
    """
    transformers.logging.disable_progress_bar()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    reader = _AnswerReader(export)
    model = load_model(export, dtype="auto").to(device)
    if reader.tokenizer.pad_token_id is None:
        reader.tokenizer.pad_token_id = reader.stop_ids[0]
    # replaces the model's own settings, which would otherwise apply to everything not set here
    model.generation_config = transformers.GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=reader.stop_ids,
        pad_token_id=reader.tokenizer.pad_token_id,
    )
    answers: list[str] = []
    for start in range(0, len(prompts), BATCH):
        padded = reader.tokenizer.pad(
            {"input_ids": [*map(list, prompts[start : start + BATCH])]},
            padding_side="left",
            return_attention_mask=True,
            return_tensors="pt",
        ).to(device)
        width = padded["input_ids"].shape[1]
        generated = model.generate(**padded)
        answers += [reader.text(row) for row in generated[:, width:].tolist()]
    return answers


def generate_in_vllm(
    python: str,
    export: Path,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
) -> list[str]:
    """Return vLLM's answers."""
    reader = _AnswerReader(export)
    job = {
        "ids": [*map(list, prompts)],
        "max_new_tokens": max_new_tokens,
        "stop_ids": reader.stop_ids,
    }
    answer = ask_vllm(export, job, python=python)
    return [reader.text(ids) for ids in answer["ids"]]
