"""Adds tokens to a model: a directory with an extended tokenizer, and new rows in the weights."""

import hashlib
import json
import logging
import os
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedModel

from trainer.config import ConfigError
from trainer.errors import CannotWriteError
from trainer.model.weights import local_slices
from trainer.runtime import seeding
from trainer.runtime.files import publish

logger = logging.getLogger(__name__)
ROW_MULTIPLE = 64
"""The vocabulary size is rounded up to a multiple of this number, which makes matrix products fast.
"""
NOISE = 0.1
"""Noise as a share of the rows' spread: new tokens begin near the average token, but differ from it
and from each other.
"""
_CHANGED = ("config.json", "tokenizer.json", "tokenizer_config.json")


def extended(path: str, tokens: Sequence[str], cache_dir: Path) -> tuple[str, dict[str, int]]:
    """Return a directory like `path` whose tokenizer has `tokens`, and {added token: id}.

    All files except the config and the tokenizer are links to the files in `path`. Raise
    `ConfigError` if the tokens cannot be added, and `CannotWriteError` if the directory cannot be
    written.
    """
    source = Path(path).resolve()
    try:
        tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    except Exception as error:  # tokenizers raises only plain `Exception`
        raise ConfigError(
            f"model.new_tokens: {source / 'tokenizer.json'} cannot be read ({error}), so "
            f"no token can be added.\nFix: create it with "
            f"AutoTokenizer.from_pretrained('{path}').save_pretrained('{path}')"
        ) from error
    known = [token for token in tokens if tokenizer.token_to_id(token) is not None]
    if known:
        logger.warning(
            "model.new_tokens: the tokenizer already has %s; not added again",
            ", ".join(map(repr, known)),
        )
    new = [token for token in dict.fromkeys(tokens) if token not in known]
    if not new:
        return path, {}
    tokenizer.add_special_tokens([_added(token) for token in new])
    ids: dict[str, Any] = {token: tokenizer.token_to_id(token) for token in new}
    contents = {
        "tokenizer.json": tokenizer.to_str(pretty=True),
        "config.json": _longer(source, max(ids.values()) + 1),
    }
    if (source / "tokenizer_config.json").exists():
        contents["tokenizer_config.json"] = _described(source, ids)
    try:
        return str(_directory(source, contents, cache_dir)), ids
    except OSError as error:
        fix = "free space or set data.cache_dir to a writable directory"
        raise CannotWriteError(
            f"model.new_tokens: cannot write to '{cache_dir}': {error}; {fix}"
        ) from error


def _added(token: str) -> Any:
    return AddedToken(token, special=True, normalized=False)


def _longer(source: Path, num_tokens: int) -> str:
    """Return config.json with a vocabulary of at least `num_tokens` rows."""
    tree = json.loads((source / "config.json").read_text(encoding="utf-8"))
    if "text_config" in tree:
        raise ConfigError(
            f"model.new_tokens: {source} is a checkpoint with several parts, whose vocabulary "
            f"cannot grow"
        )
    if tree["vocab_size"] < num_tokens:
        tree["vocab_size"] = -(-num_tokens // ROW_MULTIPLE) * ROW_MULTIPLE
    return json.dumps(tree, indent=2)


def _described(source: Path, ids: dict[str, int]) -> str:
    """Return tokenizer_config.json, with the new tokens in its list of added tokens if it has one."""
    tree = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
    if "added_tokens_decoder" in tree:
        tree["added_tokens_decoder"] |= {
            str(number): dict(sorted(_added(token).__getstate__().items()))
            for token, number in ids.items()
        }
    return json.dumps(tree, indent=2, ensure_ascii=False)


def _directory(source: Path, contents: dict[str, str], cache_dir: Path) -> Path:
    """Create the directory, named by a hash of its contents. It is created once, and ranks that
    create it at the same time create equal ones.
    """
    key = json.dumps([str(source), sorted(os.listdir(source)), contents], sort_keys=True)
    target = cache_dir.resolve() / "models" / hashlib.sha256(key.encode()).hexdigest()[:32]
    if target.is_dir():
        return target
    staging = target.with_name(f"{target.name}.tmp-{secrets.token_hex(4)}")
    staging.mkdir(parents=True)
    for name, text in contents.items():
        (staging / name).write_text(text, encoding="utf-8")
    for file in source.iterdir():
        if file.name not in _CHANGED:
            (staging / file.name).symlink_to(file.resolve())
    if not publish(staging, target):
        shutil.rmtree(staging)
    return target


@torch.no_grad()
def fill_rows(
    model: PreTrainedModel,
    ids: dict[str, int],
    num_stored: int,
    *,
    seed: int,
) -> None:
    """Fill the rows of new tokens and the rows that only pad the vocabulary. Collective.

    A row is the mean of the trained tokens' rows plus noise, which depends on (seed, token) and not
    on the number of ranks. `num_stored`: rows of the loaded weights.
    """
    head: Any = model.get_output_embeddings()
    first = min(*ids.values(), num_stored)
    texts = {number: f"row {number}" for number in range(num_stored, head.out_features)}
    texts |= {number: token for token, number in ids.items()}
    parameters = dict.fromkeys([model.get_input_embeddings().weight, *head.parameters()])
    for which, parameter in enumerate(parameters):
        local, (rows, *_) = local_slices(parameter)
        trained = local[: max(0, first - rows.start)].double()
        sums = torch.stack([trained.sum(0), trained.square().sum(0)])
        count = torch.tensor(float(len(trained)), dtype=torch.float64, device=local.device)
        dist.all_reduce(sums)
        dist.all_reduce(count)
        mean = sums[0] / count
        spread = (sums[1] / count - mean.square()).clamp(min=0).sqrt()
        # drop the last digits, which depend on the order of summation
        mean = mean.bfloat16().float()
        spread = spread.bfloat16().float()
        for number, text in texts.items():
            if rows.start <= number < rows.stop:
                key = seeding.key("new token", seed, text, which)
                generator = torch.Generator().manual_seed(key)
                noise = torch.randn(mean.shape, generator=generator).to(local.device)
                local[number - rows.start] = mean + NOISE * spread * noise
