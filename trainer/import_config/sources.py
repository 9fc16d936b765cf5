"""The data that other trainers name: files, data sets of the Hub, and LLaMA-Factory's list of names."""

import json
import re
from pathlib import Path
from typing import Any

from trainer.import_config.rules import Answer, Given, Rule, became, differs, no_equal

_FILE = re.compile(r"(\.{0,2}/|~|\$).*|.*\.(jsonl?|parquet)(\.gz|\.zst)?")
_CHAT_TYPES = (None, "chat_template", "sharegpt")
_SHAREGPT = ("conversations", "from", "value")


def address(path: str, *, split: str, subset: str | None = None) -> str:
    """A file as it is, else the split of a data set of the Hub."""
    if _FILE.fullmatch(path):
        return path
    return f"hf://{path}:{f'{subset}/' if subset else ''}{split}"


def trl_dataset(given: Given, value: Any) -> Answer:
    return became(data__train_files=_trl_address(given, value, "dataset_train_split", "train"))


def trl_validation(given: Given, value: Any) -> Answer:
    """Another split of the same data, where TRL validates at all."""
    if given.value("eval_strategy", "no") == "no" or given.value("dataset_name") is None:
        return became()
    files = _trl_address(given, given.value("dataset_name"), "dataset_test_split", value)
    return became(data__val_files=files)


def _trl_address(given: Given, name: Any, key: str, default: str) -> str:
    return address(str(name), split=given.value(key, default), subset=given.value("dataset_config"))


def listed_datasets(_: Given, value: Any) -> Answer:
    """The list of axolotl, and of TRL's mixtures: each entry is a source with columns of its own."""
    entries, remarks = [], []
    for entry in value if isinstance(value, list) else [value]:
        source, remark = _source(entry)
        entries.append(source)
        remarks += remark
    only = entries[0]
    if len(entries) == 1 and set(only) <= {"files", "messages_key", "text_key"}:
        words = {f"data__{'train_files' if name == 'files' else name}": item for name, item in only.items()}
    else:
        words = {"data__train_files": [_with_name(entry) for entry in entries]}
    return differs("; ".join(dict.fromkeys(remarks)), **words) if remarks else became(**words)


def _source(entry: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A source of ours, and what it does not say."""
    remarks = []
    split, kind = str(entry.get("split") or "train"), entry.get("type")
    if "[" in split:
        split, _, part = split.partition("[")
        remarks.append(f"all rows of {split}, not [{part}: data.train_max_samples limits them")
    files = entry.get("data_files") or address(str(entry.get("path")), split=split, subset=entry.get("name"))
    source: dict[str, Any] = {"files": files}
    if kind == "completion":
        source["text_key"] = entry.get("field") or "text"
    elif kind not in _CHAT_TYPES:
        remarks.append(f"type {kind} writes a text of its own there; rows are rendered with the chat template here")
    mapped = entry.get("message_property_mappings") or {}
    roles = (mapped.get("role"), mapped.get("content"))
    key = entry.get("field_messages")
    if key and (key, *roles) != _SHAREGPT and key != "messages":
        source["messages_key"] = key
    known = (("role", "content"), _SHAREGPT[1:], (None, None))
    if roles not in known:
        remarks.append(f"messages have role and content, or from and value; not {roles[0]} and {roles[1]}")
    if entry.get("roles_to_train", ["assistant"]) not in (["assistant"], ["gpt"], None):
        remarks.append("only assistant turns are trained")
    if (entry.get("train_on_eos") or "turn") != "turn":
        remarks.append("the end token of each trained turn is trained")
    if entry.get("chat_template") not in (None, "tokenizer_default"):
        remarks.append(f"chat_template of a source: {entry['chat_template']}")
    return source, remarks


def _with_name(source: dict[str, Any]) -> dict[str, Any]:
    """No name follows from an address of the Hub."""
    files = str(source["files"])
    return source | ({"name": _name(files[5:].split(":")[0])} if files.startswith("hf://") else {})


def _name(path: str) -> str:
    return re.sub(r"[^\w.-]", "_", path.rpartition("/")[2])


def named_datasets(key: str) -> Rule:
    """LLaMA-Factory's names, found in dataset_info.json of `dataset_dir`; `key` is train_files or val_files."""

    def rule(given: Given, value: Any) -> Answer:
        names = [name.strip() for name in (value if isinstance(value, list) else str(value).split(","))]
        place = Path(str(given.value("dataset_dir", "data")))
        try:
            known = json.loads((place / "dataset_info.json").read_text(encoding="utf-8"))
            sources = [_named(place, name, known[name]) for name in names]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return no_equal(
                f"names of {place}/dataset_info.json, which is not here or does not have them: data.{key}=FILES"
            )
        return became(**{f"data__{key}": sources})

    return rule


def _named(place: Path, name: str, entry: dict[str, Any]) -> dict[str, Any]:
    columns = entry.get("columns") or {}
    if "file_name" in entry:
        source = {"files": str(place / entry["file_name"])}
    else:
        split, subset = entry.get("split", "train"), entry.get("subset")
        source = {"name": _name(name), "files": address(entry["hf_hub_url"], split=split, subset=subset)}
    if entry.get("formatting") == "sharegpt":
        key = columns.get("messages", "conversations")
        return source if key in ("conversations", "messages") else source | {"messages_key": key}
    if "prompt" in columns and "response" in columns and columns["prompt"] != "instruction":
        return source | {"prompt_key": columns["prompt"], "response_key": columns["response"]}
    return source
