"""What an exported model writes behind prompts: in transformers, in vLLM, or at a server's
address (floor 2).
"""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import reduce
from itertools import groupby, takewhile
from operator import getitem
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers

from trainer.config import ConfigError
from trainer.serving import engines

BATCH = 32
"""Prompts that are continued together in transformers, by their number: the same ones also
after a kill.
"""
NUM_REQUESTS = 8
REQUEST_TIMEOUT_S = 600.0

Turns = Sequence[Mapping[str, Any]]
"""Messages, the last of which is to be answered."""


@dataclass(frozen=True)
class Sampling:
    """`temperature` 0 is greedy. What generation_config.json says of it does not count, its end
    tokens do.
    """

    max_new_tokens: int = 512
    temperature: float = 0.0
    seed: int = 0


class Engine(Protocol):
    """`name`: which program, with its version where it is known before."""

    name: str

    def generate(
        self, export: Path, prompts: Mapping[int, Turns], sampling: Sampling
    ) -> Iterator[tuple[int, str]]:
        """(number, text) of every prompt, as they come. Raises `ConfigError` where the export
        cannot be served.
        """


def make_engine(word: str, python: str) -> Engine:
    """`transformers`, `vllm` (in `python`), or the address of a server."""
    if "://" in word:
        return ServerEngine(word)
    if word != engines.VLLM:
        return TransformersEngine()
    engines.require_vllm(python)
    return VllmEngine(python)


class _Chat:
    """Prompts as the exported tokenizer renders them, for a model that is given token ids."""

    def __init__(self, export: Path) -> None:
        path = engines.adapter_of(export)[0]
        own = export if (export / "tokenizer_config.json").exists() else path
        self.tokenizer: Any = engines.from_files(transformers.AutoTokenizer, own)
        said = engines.from_files(transformers.AutoConfig, path).get_text_config().eos_token_id
        if (path / "generation_config.json").exists():
            said = transformers.GenerationConfig.from_pretrained(path).eos_token_id or said
        ends = {self.tokenizer.eos_token_id, *(said if isinstance(said, list) else [said])}
        self.stop_ids = sorted(ends - {None})

    def ids(self, turns: Turns) -> list[int]:
        if self.tokenizer.chat_template is None:
            if len(turns) > 1:
                text = "the model has no chat template: it continues a text, and cannot answer several messages"
                raise ConfigError(
                    f"{text}; ask with rows of `prompt`, or train with data.chat_template"
                )
            return list(self.tokenizer(turns[0]["content"]).input_ids)
        rendered = self.tokenizer.apply_chat_template(
            list(turns), add_generation_prompt=True, return_dict=True
        )
        return list(rendered["input_ids"])

    def text(self, ids: Sequence[int]) -> str:
        return str(
            self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )


class TransformersEngine:
    name = f"transformers {transformers.__version__}"

    @torch.no_grad()
    def generate(
        self, export: Path, prompts: Mapping[int, Turns], sampling: Sampling
    ) -> Iterator[tuple[int, str]]:
        transformers.logging.disable_progress_bar()
        device = "cuda" if torch.cuda.is_available() else "cpu"
        chat, model = _Chat(export), engines.load_model(export, dtype="auto").to(device)
        pad = chat.tokenizer.pad_token_id
        pad = chat.stop_ids[0] if pad is None else pad
        settings = transformers.GenerationConfig(
            max_new_tokens=sampling.max_new_tokens,
            do_sample=sampling.temperature > 0,
            temperature=sampling.temperature or None,
            top_k=0 if sampling.temperature else None,  # transformers' own default is 50
            eos_token_id=chat.stop_ids,
            pad_token_id=pad,
        )
        model.generation_config = settings  # from the model's own would come what is not set here
        for number, group in groupby(sorted(prompts), key=lambda index: index // BATCH):
            indices = list(group)
            rows = [chat.ids(prompts[index]) for index in indices]
            width = max(map(len, rows))
            ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows], device=device)
            mask = torch.tensor(
                [[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device
            )
            torch.manual_seed(sampling.seed + number)
            written = model.generate(input_ids=ids, attention_mask=mask, generation_config=settings)
            yield from zip(indices, map(chat.text, written[:, width:].tolist()), strict=True)


class VllmEngine:
    def __init__(self, python: str) -> None:
        self._python, self.name = python, engines.VLLM

    def generate(
        self, export: Path, prompts: Mapping[int, Turns], sampling: Sampling
    ) -> Iterator[tuple[int, str]]:
        chat = _Chat(export)
        wanted = {**asdict(sampling), "stop_ids": chat.stop_ids}
        job = {"ids": [chat.ids(turns) for turns in prompts.values()], "sampling": wanted}
        answer = engines.ask_vllm(export, job, python=self._python)
        self.name = f"vllm {answer['version']}"
        yield from zip(prompts, map(chat.text, answer["ids"]), strict=True)


class ServerEngine:
    """An OpenAI-compatible server, at the address that ends with /v1."""

    def __init__(self, address: str) -> None:
        self._address = address.rstrip("/").removesuffix("/v1") + "/v1"
        self.name = self._address

    def generate(
        self, export: Path, prompts: Mapping[int, Turns], sampling: Sampling
    ) -> Iterator[tuple[int, str]]:
        model = self._model(export)
        self.name = f"{model} at {self._address}"
        limits = {
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "seed": sampling.seed,
        }

        def ask(turns: Turns) -> str:
            body = {"model": model, "messages": list(turns), **limits}
            return self._ask("chat/completions", body, "choices", 0, "message", "content") or ""

        with ThreadPoolExecutor(NUM_REQUESTS) as pool:
            yield from zip(prompts, pool.map(ask, prompts.values()), strict=True)

    def _model(self, export: Path) -> str:
        """The one that lies where the export does, or the only one, unless that is the export of
        another step.

        vLLM says where its models lie; beside an adapter it serves the base, which is not to be
        scored in its place.
        """
        models = self._ask("models", None, "data")
        served = {str(model["id"]): Path(model.get("root") or model["id"]) for model in models}
        lone = [
            name for name, root in served.items() if len(served) == 1 and root.name != export.name
        ]
        own = [name for name, root in served.items() if root.parts[-2:] == export.parts[-2:]]
        if (settings := export / engines.PEFT_CONFIG).exists():
            base = Path(json.loads(settings.read_text(encoding="utf-8"))["base_model_name_or_path"])
            bases = {str(model["id"]) for model in models if not model.get("parent")}
            bases = {name for name in bases if served[name].parts[-2:] == base.parts[-2:]}
            lone, own = ([name for name in names if name not in bases] for names in (lone, own))
        if found := own or lone:
            return max(found, key=lambda name: _num_alike(served[name], export.resolve()))
        said = ", ".join(f"{name} ({root})" for name, root in served.items()) or "nothing"
        raise ConfigError(
            f"the server at {self._address} serves {said}, which is not {export}: serve that there"
        )

    def _ask(self, path: str, body: Mapping[str, Any] | None, *keys: str | int) -> Any:
        """What stands below `keys` in the answer."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self._address}/{path}", data, headers)
        try:
            with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as answer:
                return reduce(getitem, keys, json.load(answer))
        except (OSError, ValueError, LookupError, TypeError) as error:
            said = (
                error.read(500).decode(errors="replace")
                if isinstance(error, urllib.error.HTTPError)
                else ""
            )
            why = f"{type(error).__name__}: {error} {said}".rstrip()
            raise ConfigError(
                f"the server at {request.full_url} does not answer as OpenAI's API does: {why}"
            ) from error


def _num_alike(first: Path, second: Path) -> int:
    """Last parts that are the same."""
    pairs = zip(reversed(first.parts), reversed(second.parts), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
