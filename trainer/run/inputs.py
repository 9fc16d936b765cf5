"""What a run is made from: model files, tokenizer and tokens, ready before any process group exists."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from trainer.config import QUICKSTART, Config
from trainer.data.chat import tokenizer_digest
from trainer.data.conversation import RowKeys
from trainer.data.loader import View
from trainer.data.rows import resolve_files
from trainer.data.sample_writer import PrepareOptions
from trainer.data.token_cache import TokenDataset, prepare, split
from trainer.errors import DataError
from trainer.model.assemble import per_document_reason
from trainer.model.packed_lm import ModelSource
from trainer.model.source import find_model
from trainer.quickstart import MODEL_DIR, TRAIN_FILE
from trainer.run.preflight import read_chat_template
from trainer.runtime.environment import local_rank


@dataclass(frozen=True)
class Inputs:
    """What a run is made from, ready before any process group exists."""

    source: ModelSource
    tokenizer: PreTrainedTokenizerBase
    tokenizer_digest: str
    chat_template: str | None
    train: View
    validation: View | None


def prepare_inputs(config: Config, *, progress: Callable[[], None]) -> Inputs:
    """Model files, tokenizer and tokens. Needs no process group; the machine's first rank does the work once.

    `progress` is called while it goes on.
    """
    train_files, val_files = _data_files(config)
    source = resolve_source(config, progress=progress)
    # what config.json alone refuses is refused before anything is tokenised
    per_document_reason(config.model, source, max_length=config.data.max_length)
    tokenizer = AutoTokenizer.from_pretrained(source.path, trust_remote_code=source.trust_remote_code)
    chat_template = read_chat_template(config.data)
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    digest = tokenizer_digest(tokenizer)  # half a second for a large vocabulary
    dataset = _prepare(config, train_files, config.data.train_max_samples, tokenizer, digest, progress)
    if val_files is not None:
        held_out = _prepare(config, val_files, config.data.val_max_samples, tokenizer, digest, progress)
        train, validation = View.whole(dataset), View.whole(held_out)
    else:
        train_ids, val_ids = split(dataset, val_ratio=config.data.val_ratio, seed=config.trainer.seed)
        limit = config.data.val_max_samples
        train, validation = View(dataset, train_ids), View(dataset, val_ids if limit == -1 else val_ids[:limit])
    if not len(train.lengths):
        raise DataError("no training samples are left; lower data.val_ratio or give more rows")
    return Inputs(source, tokenizer, digest, chat_template, train, validation if len(validation.lengths) else None)


def resolve_source(config: Config, *, progress: Callable[[], None] = lambda: None) -> ModelSource:
    model = config.model
    if model.partial_pretrain == QUICKSTART:
        return ModelSource(str(MODEL_DIR), random_weights=True, trust_remote_code=False)
    path = find_model(model.partial_pretrain, random_weights=model.random_weights, progress=progress)
    return ModelSource(path, random_weights=model.random_weights, trust_remote_code=model.trust_remote_code)


def _data_files(config: Config) -> tuple[list[Path], list[Path] | None]:
    """Files of the training and of the validation rows. Raises `DataError` for what is missing or no data file."""

    def resolved(files: str | list[str]) -> list[Path]:
        if files == QUICKSTART:
            return [TRAIN_FILE]
        return resolve_files(files)

    val_files = config.data.val_files
    return resolved(config.data.train_files), None if val_files is None else resolved(val_files)


def _prepare(
    config: Config,
    files: list[Path],
    max_samples: int,
    tokenizer: PreTrainedTokenizerBase,
    digest: str,
    progress: Callable[[], None],
) -> TokenDataset:
    data = config.data
    options = PrepareOptions(
        keys=RowKeys(data.messages_key, data.tools_key, data.prompt_key, data.response_key),
        max_length=data.max_length,
        truncation=data.truncation,
        on_bad_row=data.on_bad_row,
        max_bad_fraction=data.max_bad_fraction,
        max_samples=max_samples,
        special_in_content=data.special_in_content,
        template_kwargs=data.apply_chat_template_kwargs,
    )
    return prepare(
        files,
        tokenizer=tokenizer,
        tokenizer_digest=digest,
        options=options,
        cache_dir=Path(data.cache_dir),
        wait=local_rank() != 0,
        progress=progress,
    )
