"""Serve an export in transformers, in vLLM, or by a server: log-probabilities, answers."""

import json
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial, reduce
from operator import getitem
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
import transformers

from trainer.config import ConfigError
from trainer.model.weights import whole_model
from trainer.runtime.environment import call
from trainer.runtime.processes import run_in
from trainer.tools.evaluate import vllm_engine
from trainer.tools.evaluate.scorers import Turns

VLLM = "vllm"
PEFT_CONFIG = "adapter_config.json"
VLLM_RANKS = (16, 32, 64, 128, 256, 320, 512)
"""Values of `max_lora_rank` that vLLM accepts."""
NUM_LOG_LINES = 12
BATCH = 32
"""Prompts that are continued together, except in vLLM."""
NUM_REQUESTS = 8
REQUEST_TIMEOUT_S = 600.0

Generate = Callable[[Path, Sequence[Turns], int], Iterator[list[str]]]
"""From an export, prompts and the most new tokens to greedy answers, in order, batch by batch."""


@dataclass(frozen=True)
class Sample:
    """Token ids (int32) of one document, which of them are supervised, and its `file:line`."""

    ids: np.ndarray
    mask: np.ndarray
    place: str


def make_generate(engine: str, python: str) -> Generate:
    """Return the function for `transformers`, `vllm` (in `python`) or the address of a server."""
    if "://" in engine:
        return partial(_ask_server, engine.rstrip("/").removesuffix("/v1") + "/v1")
    if engine != VLLM:
        return _generate_in_transformers
    require_vllm(python)
    return partial(_generate_in_vllm, python)


def adapter_of(export: Path) -> tuple[Path, Path | None, int]:
    """Return model, adapter and rank: (base, export, r) of an adapter, else (export, None, 0).

    Raises `ConfigError` if the base is not where the adapter says.
    """
    if not (export / PEFT_CONFIG).exists():
        return export, None, 0
    settings = json.loads((export / PEFT_CONFIG).read_text(encoding="utf-8"))
    base = Path(str(settings["base_model_name_or_path"]))
    if not base.is_dir():
        raise ConfigError(
            f"'{export}' is an adapter for '{base}', which is no directory here. Fix: put the base "
            "model there"
        )
    return base, export, int(settings["r"])


def load_model(
    export: Path, *, dtype: torch.dtype | Literal["auto"], has_adapter: bool = True
) -> Any:
    """Load an export with transformers' own class, and its adapter unless `has_adapter` is false.

    `dtype` "auto" takes the one that the export was written in.
    """
    path, adapter, _ = adapter_of(export)
    whole = whole_model(_from_files(transformers.AutoConfig, path))
    loader: Any = transformers.AutoModelForCausalLM if whole is None else type(whole)
    model: Any = _from_files(loader, path, dtype=dtype)
    if adapter is not None and has_adapter:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter).to(model.dtype)
    return model.eval()


def _from_files(loader: Any, path: Path, **options: Any) -> Any:
    """Load with a class of transformers. Raises `ConfigError` where that needs the model's code."""
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
def sums_in_transformers(
    export: Path, samples: Sequence[Sample], *, dtype: torch.dtype, has_adapter: bool = True
) -> np.ndarray:
    """Return the log-probability of each sample's supervised tokens, one document at a time."""
    model = load_model(export, dtype=dtype, has_adapter=has_adapter)
    sums = []
    for sample in samples:
        ids, mask = torch.from_numpy(sample.ids).long(), torch.from_numpy(sample.mask)
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1][mask[1:]]
        loss = F.cross_entropy(logits.double(), ids[1:][mask[1:]], reduction="sum")
        sums.append(-loss.item())
    return np.array(sums)


def sums_in_vllm(export: Path, samples: Sequence[Sample], *, python: str) -> tuple[np.ndarray, str]:
    """Return the same sums as vLLM serves them, and its version. Raises `ConfigError`."""
    job = {
        "ids": [sample.ids.tolist() for sample in samples],
        "masks": [sample.mask.tolist() for sample in samples],
    }
    answer = ask_vllm(export, job, python=python)
    return np.array(answer["sums"]), f"vllm {answer['version']}"


def ask_vllm(export: Path, asked: Mapping[str, Any], *, python: str) -> dict[str, Any]:
    """Return the answer of `vllm_engine.py`, run by `python`, to a job about an export.

    Raises `ConfigError` with the end of its log.
    """
    model, adapter, rank = adapter_of(export)
    with tempfile.TemporaryDirectory(prefix="sft-vllm-") as work:
        job_file, answer_file = Path(work, "job.json"), Path(work, "answer.json")
        job = {
            **asked,
            "model": str(model),
            "adapter": adapter and str(adapter),
            "max_lora_rank": vllm_rank(rank),
            "answer": str(answer_file),
        }
        job_file.write_text(json.dumps(job), encoding="utf-8")
        ended = run_in(python, str(vllm_engine.__file__), str(job_file))
        if ended.returncode != 0:
            log = "\n".join(ended.stderr.splitlines()[-NUM_LOG_LINES:])
            raise ConfigError(
                f"vLLM does not serve '{export}' ({python} ended with {ended.returncode}):\n{log}"
            )
        answer: dict[str, Any] = json.loads(answer_file.read_text(encoding="utf-8"))
    return answer


def vllm_rank(rank: int) -> int:
    """Return the `max_lora_rank` for an adapter. Raises `ConfigError` for one that is too large."""
    for limit in VLLM_RANKS:
        if rank <= limit:
            return limit
    raise ConfigError(
        f"vLLM takes adapters of rank {VLLM_RANKS[-1]} at most, this one has {rank}. Fix: --engine "
        f"transformers, or merge it with {call('checkpoint export CHECKPOINT DIRECTORY')}"
    )


def require_vllm(python: str) -> None:
    """Raise `ConfigError` if `python` is no interpreter or has no vLLM."""
    code = "import importlib.util as u, sys; sys.exit(u.find_spec('vllm') is None)"
    try:
        found = run_in(python, "-c", code).returncode == 0
    except OSError as error:
        raise ConfigError(f"--python {python} is no interpreter: {error}") from error
    if not found:
        raise ConfigError(
            f"{python} has no vllm. Fix: pip install vllm, or name an interpreter that has it with "
            "--python"
        )


class _Chat:
    """Prompts rendered by the exported tokenizer, for an engine that is given token ids."""

    def __init__(self, export: Path) -> None:
        model, _, _ = adapter_of(export)
        has_tokenizer = (export / "tokenizer_config.json").exists()
        self.tokenizer: Any = _from_files(
            transformers.AutoTokenizer, export if has_tokenizer else model
        )
        ends = _from_files(transformers.AutoConfig, model).get_text_config().eos_token_id
        if (model / "generation_config.json").exists():
            ends = transformers.GenerationConfig.from_pretrained(model).eos_token_id or ends
        all_ends = {self.tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])}
        self.stop_ids = sorted(all_ends - {None})

    def ids(self, turns: Turns) -> list[int]:
        if self.tokenizer.chat_template is not None:
            rendered = self.tokenizer.apply_chat_template(
                list(turns), add_generation_prompt=True, return_dict=True
            )
            return list(rendered["input_ids"])
        if len(turns) > 1:
            raise ConfigError(
                "the model has no chat template: it continues a text, and cannot answer several "
                "messages. Fix: ask with rows of `prompt`, or train with data.chat_template"
            )
        return list(self.tokenizer(turns[0]["content"]).input_ids)

    def text(self, ids: Sequence[int]) -> str:
        return str(
            self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )


@torch.no_grad()
def _generate_in_transformers(
    export: Path, prompts: Sequence[Turns], max_new_tokens: int
) -> Iterator[list[str]]:
    transformers.logging.disable_progress_bar()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    chat, model = _Chat(export), load_model(export, dtype="auto").to(device)
    pad = chat.tokenizer.pad_token_id
    pad = chat.stop_ids[0] if pad is None else pad
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
        written = model.generate(
            input_ids=torch.tensor(ids, device=device),
            attention_mask=torch.tensor(mask, device=device),
        )
        yield [chat.text(row) for row in written[:, width:].tolist()]


def _generate_in_vllm(
    python: str, export: Path, prompts: Sequence[Turns], max_new_tokens: int
) -> Iterator[list[str]]:
    chat = _Chat(export)
    job = {
        "ids": [chat.ids(turns) for turns in prompts],
        "max_new_tokens": max_new_tokens,
        "stop_ids": chat.stop_ids,
    }
    yield [chat.text(ids) for ids in ask_vllm(export, job, python=python)["ids"]]


def _ask_server(
    address: str, export: Path, prompts: Sequence[Turns], max_new_tokens: int
) -> Iterator[list[str]]:
    """Ask an OpenAI-compatible server, at an address that ends with /v1."""
    settings = {
        "model": _served_model(address, export),
        "max_tokens": max_new_tokens,
        "temperature": 0.0,
    }

    def ask(turns: Turns) -> str:
        body = {"messages": list(turns), **settings}
        keys = ("choices", 0, "message", "content")
        return _request(f"{address}/chat/completions", body, *keys) or ""

    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        for start in range(0, len(prompts), BATCH):
            yield list(pool.map(ask, prompts[start : start + BATCH]))


def _served_model(address: str, export: Path) -> str:
    """Return the server's name for an export: the model in a directory of the same name, or the
    only one, unless it is another export. Raises `ConfigError`.

    vLLM says where a model is, and of an adapter also its parent: the base that it serves beside
    an adapter must not be scored in its place.
    """
    is_adapter = (export / PEFT_CONFIG).exists()
    roots = {
        str(model["id"]): Path(model.get("root") or model["id"])
        for model in _request(f"{address}/models", None, "data")
        if bool(model.get("parent")) == is_adapter
    }
    same_step = [name for name, root in roots.items() if root.parts[-2:] == export.parts[-2:]]
    same_run = [name for name in same_step if roots[name].parts[-3:] == export.parts[-3:]]
    only = [name for name, root in roots.items() if len(roots) == 1 and root.name != export.name]
    for found in (same_run, same_step, only):
        if found:
            return found[0]
    served = ", ".join(f"{name} ({root})" for name, root in roots.items()) or "nothing"
    kind = "adapters" if is_adapter else "models"
    raise ConfigError(
        f"of {kind} the server at {address} serves {served}, which is not {export}. Fix: serve "
        "that there"
    )


def _request(url: str, body: Mapping[str, Any] | None, *keys: str | int) -> Any:
    """Return the value at `keys` in the answer of a server. Raises `ConfigError`."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as answer:
            return reduce(getitem, keys, json.load(answer))
    except (OSError, ValueError, LookupError, TypeError) as error:
        text = ""
        if isinstance(error, urllib.error.HTTPError):
            text = error.read(500).decode(errors="replace")
        raise ConfigError(
            f"the server at {url} does not answer as OpenAI's API does: {type(error).__name__}: "
            f"{error} {text}"
        ) from error
