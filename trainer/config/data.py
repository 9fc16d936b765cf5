"""The keys of `data`, and the sources that `data.train_files` and `data.val_files` name."""

import re
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any

from trainer.config.keys import (
    ConfigError,
    at_least,
    count_or_all,
    key,
    not_empty,
    one_of,
    where,
    within,
)

QUICKSTART = "quickstart"
AUTO = "auto"
NAME = r"\w[\w.-]*"
RESERVED_VARIABLES = (
    "messages",
    "conversation",
    "conversations",
    "tools",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "return_assistant_tokens_mask",
    "return_dict",
    "tokenize",
)
"""Template arguments that the trainer sets, so users cannot define variables with these names."""


@dataclass(frozen=True)
class SourceConfig:
    """An entry of a list of sources."""

    files: str | list[str] = key(MISSING, "path, glob or list of both", not_empty)
    name: str | None = key(
        None,
        "name in metrics and logs; null = the name of the first file",
        where(
            re.compile(NAME).fullmatch,
            "must consist of letters, digits, _ - and ., and begin with a letter or digit; got '{}'",
        ),
    )
    repeat: float = key(
        1.0,
        "how often an epoch trains each row; 2.5 = twice, plus a third time for half of the rows "
        "(the other half in the next epoch); must be 1 for validation",
        within("(0, 1000]"),
    )
    max_samples: int | None = key(
        None, "use only this many rows from the beginning; -1 = all", count_or_all
    )
    chat_template: str | None = key(
        None, "template for these rows: chatml | llama3 | plain, or the path of a jinja file"
    )
    messages_key: str | None = key(None, "column with [{role, content}, ...]")
    tools_key: str | None = key(None, "column with tool definitions")
    prompt_key: str | None = key(None, "column with the user's text")
    response_key: str | None = key(None, "column with the assistant's text")
    text_key: str | None = key(None, "column with plain text, all of which is trained")


@dataclass(frozen=True)
class DataConfig:
    """Training data and batches."""

    train_files: str | list[str | SourceConfig] = key(
        QUICKSTART,
        "path, glob or list of .jsonl (also .gz, .zst), .json, .parquet, hf://org/name:split; or a "
        "list of sources, e.g. [{files: a.jsonl, repeat: 2.5}, {files: b.jsonl}] (docs/config.md); "
        "quickstart = the generated samples",
        not_empty,
    )
    val_files: str | list[str | SourceConfig] | None = key(
        None,
        "like train_files; null = hold out val_ratio of the training rows of each source",
        not_empty,
    )
    val_ratio: float = key(
        0.02,
        "fraction of the training rows held out if val_files is null; 0 = no validation",
        within("[0, 1)"),
    )
    train_batch_size: int = key(
        32,
        "samples per optimizer step, summed over all ranks; results do not depend on the number of "
        "ranks",
        at_least(1),
    )
    micro_batch_size_per_gpu: int | None = key(
        None, "maximum samples per forward pass; null = no limit", at_least(1)
    )
    max_token_len_per_gpu: int | None = key(
        8192, "maximum tokens per forward pass and rank; null = no limit", at_least(1)
    )
    max_length: int = key(2048, "maximum tokens per sample", at_least(1))
    truncation: str = key(
        "error",
        "handling of longer samples: error | left | right (cut that side) | drop | split (cut "
        "plain text into several samples)",
        one_of("error", "left", "right", "drop", "split"),
    )
    order: str = key(
        "shuffled",
        "shuffled | short_first_epoch (the first epoch goes from short to long rows)",
        one_of("shuffled", "short_first_epoch"),
    )
    messages_key: str = key("messages", "column with [{role, content}, ...]; nested keys as a.b")
    tools_key: str = key("tools", "column with tool definitions, if any")
    prompt_key: str | None = key(
        None, "single-turn data: column with the user's text; null = detect the format"
    )
    response_key: str | None = key(None, "single-turn data: column with the assistant's text")
    text_key: str | None = key(
        None,
        "column with plain text, for continued pretraining; the whole text and an end token are "
        "trained",
    )
    chat_template: str | None = key(
        None,
        "replaces the tokenizer's chat template: chatml | llama3 | plain, or the path of a jinja "
        "file; exported with the model",
    )
    apply_chat_template_kwargs: dict[str, Any] = key(
        {},
        "additional variables for the template, e.g. {enable_thinking: false}",
        where(
            lambda variables: variables.keys().isdisjoint(RESERVED_VARIABLES),
            f"cannot contain {', '.join(RESERVED_VARIABLES)}, which the trainer sets; got {{}}",
        ),
    )
    turns: str = key(
        "auto",
        "together (a conversation is one sample) | apart (each supervised turn is one sample, with "
        "the prompt that a server would render) | auto (apart if the template renders a turn "
        "differently once others follow)",
        one_of("together", "apart", "auto"),
    )
    train_on: str = key(
        "all",
        "supervised assistant turns: all | last (the last one of each row)",
        one_of("all", "last"),
    )
    special_in_content: str = key(
        "error",
        "messages that contain tokens that the template writes around turns: error (the row is "
        "bad) | parse (train them as special tokens)",
        one_of("error", "parse"),
    )
    train_max_samples: int = key(
        -1,
        "use only this many rows from the beginning of each training source; -1 = all",
        count_or_all,
    )
    on_bad_row: str = key(
        "error",
        "unusable rows: error (list them and stop) | skip (count and list them; stop if more than "
        "half of all rows are unusable)",
        one_of("error", "skip"),
    )
    num_workers: int = key(
        1,
        "data loader processes per rank; 0 = build batches in the training process",
        within("[0, 64]"),
    )
    cache_dir: str = key("checkpoints/.cache", "directory of prepared tokens, reused across runs")


@dataclass(frozen=True)
class RowKeys:
    """Names of the columns that hold a row's conversation (`data.messages_key`, …). A nested column
    is named `a.b`.
    """

    messages_key: str = "messages"
    tools_key: str = "tools"
    prompt_key: str | None = None
    response_key: str | None = None
    text_key: str | None = None


@dataclass(frozen=True)
class Source:
    """Files whose rows are read and rendered in the same way: a `SourceConfig` whose missing values
    are filled in from `data`.
    """

    name: str
    files: str | list[str]
    repeat: float
    max_samples: int
    chat_template: str | None
    keys: RowKeys


def sources_of(data: DataConfig, name: str) -> list[Source]:
    """Return the sources of `data.<name>`, which is `train_files` or `val_files`. Raises
    `ConfigError`.
    """
    dotted = f"data.{name}"
    files = getattr(data, name)
    if files is None:
        return []
    if isinstance(files, str) or all(isinstance(entry, str) for entry in files):
        return [_source(SourceConfig(files, name=name), data, name, dotted)]
    found = []
    for number, entry in enumerate(files):
        given = SourceConfig(entry) if isinstance(entry, str) else entry
        found.append(_source(given, data, name, f"{dotted}[{number}]"))
    names = [source.name for source in found]
    if repeated := {source for source in names if names.count(source) > 1}:
        raise ConfigError(
            f"'{dotted}' has several sources named '{repeated.pop()}'.\n"
            f"Fix: give each a different `name`"
        )
    return found


def _source(
    given: SourceConfig,
    data: DataConfig,
    name: str,
    dotted: str,
) -> Source:
    """Return a source whose missing settings are filled in from `data`. Raises `ConfigError`."""
    if name == "val_files" and given.repeat != 1:
        raise ConfigError(
            f"'{dotted}.repeat' must be 1, got {given.repeat:g}: validation uses every row exactly "
            f"once"
        )
    if problem := column_problem(given, f"{dotted}."):
        raise ConfigError(problem)
    max_samples = given.max_samples
    if max_samples is None:
        max_samples = data.train_max_samples if name == "train_files" else -1
    # a source that names columns of one format ignores those that `data` names for others
    has_own = bool(given.messages_key or given.prompt_key or given.text_key)
    return Source(
        name=given.name or _name(given.files, dotted),
        files=given.files,
        repeat=given.repeat,
        max_samples=max_samples,
        chat_template=given.chat_template or data.chat_template,
        keys=RowKeys(
            messages_key=given.messages_key or data.messages_key,
            tools_key=given.tools_key or data.tools_key,
            prompt_key=given.prompt_key if has_own else data.prompt_key,
            response_key=given.response_key if has_own else data.response_key,
            text_key=given.text_key if has_own else data.text_key,
        ),
    )


def column_problem(keys: DataConfig | SourceConfig, prefix: str) -> str:
    """Return a message if the keys that name columns contradict each other, else ''."""
    if (keys.prompt_key is None) != (keys.response_key is None):
        return (
            f"'{prefix}prompt_key' and '{prefix}response_key' work only together. Fix: set both or "
            f"neither"
        )
    if keys.text_key is not None and keys.prompt_key is not None:
        return (
            f"'{prefix}text_key' does not work with '{prefix}prompt_key'. Fix: remove one of them"
        )
    return ""


def _name(files: str | list[str], dotted: str) -> str:
    """Return the name of the first file without its suffixes."""
    first = files if isinstance(files, str) else files[0]
    stem = Path(first).stem.removesuffix(".jsonl")  # as in a.jsonl.gz
    if not re.fullmatch(NAME, stem):
        raise ConfigError(
            f"'{dotted}' needs a `name`, because metrics cannot be named after its file '{first}'"
        )
    return stem
