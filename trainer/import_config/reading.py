"""The settings in a file of another trainer: YAML, or a shell script that launches it."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from trainer.config import ConfigError
from trainer.import_config.rules import ForeignSetting

_NUMBER = re.compile(r"[+-]?\d+(\.\d*)?([eE][+-]?\d+)?")
_VARIABLE = re.compile(r"\$(?:(\w+|[@*#])|\{(\w+)(?::?-([^${}]*))?\})")
_OF_THE_START = ("HOME", "USER")
_FLAG = re.compile(r"--([A-Za-z][\w-]*)")
_ASSIGNED = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_HYDRA = re.compile(r"[+~]*([A-Za-z_][\w.]*(?:@[\w.]+)?)=(.*)", re.DOTALL)


@dataclass(frozen=True)
class ForeignFile:
    """`command`: the words of a script's launch that set nothing, '' for YAML."""

    settings: dict[str, ForeignSetting]
    command: str = ""


def read_foreign(path: Path) -> ForeignFile:
    """Raises `ConfigError` for what is neither YAML with keys nor a script that launches a trainer."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if path.suffix in (".sh", ".bash", ".slurm", ".sbatch") or text.startswith("#!"):
        return _read_script(path, text)
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is no YAML: {error}; a launch script has a name that ends in .sh") from error
    if not isinstance(node, yaml.MappingNode) or not isinstance(tree, dict):
        raise ConfigError(f"{path} holds no keys")
    lines = {str(key.value): key.start_mark.line + 1 for key, _ in node.value}
    items = ((str(key), plain(value)) for key, value in tree.items())
    return ForeignFile({key: ForeignSetting(key, value, lines.get(key)) for key, value in items})


def flat(settings: dict[str, ForeignSetting]) -> dict[str, ForeignSetting]:
    """Groups of keys as keys with dots."""

    def walk(key: str, value: Any, line: int | None) -> Iterator[ForeignSetting]:
        if isinstance(value, dict) and value:
            for name, item in value.items():
                yield from walk(f"{key}.{name}", item, line)
        else:
            yield ForeignSetting(key, value, line)

    found = [item for setting in settings.values() for item in walk(setting.key, setting.value, setting.line)]
    return {item.key: item for item in found}


def plain(value: Any) -> Any:
    """A value as it is meant: `1e-5` is a number, `None` is null."""
    if isinstance(value, str):
        text = value.strip()
        if text in ("None", "null", "~", ""):
            return None
        if text in ("True", "true", "False", "false"):
            return text.lower() == "true"
        if _NUMBER.fullmatch(text):
            return float(text) if re.search(r"[.eE]", text) else int(text)
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value


def _read_script(path: Path, text: str) -> ForeignFile:
    """The words of its one launch; variables that the script sets are put in, `$HOME` stays for the start."""
    names: dict[str, str] = {}
    launches: list[ForeignFile] = []
    for lines, words in _commands(text):
        expanded = [_expand(word, names) for word in words]
        if all(_ASSIGNED.fullmatch(word) for word in words if word != "export"):
            for name, value in (word.split("=", 1) for word in expanded if word != "export"):
                # set twice: which one holds is decided when it runs
                names[name] = value if names.get(name, value) == value else f"${name}"
            continue
        # a variable may hold several words
        pairs = zip(expanded, words, strict=True)
        expanded = [part for word, was in pairs for part in (word.split() if was.startswith("$") else [word])]
        command = " ".join(word for word in expanded if "=" not in word)
        launches.append(ForeignFile(dict(_settings(expanded, lines)), command))
    longest = max(launches, key=lambda launch: len(launch.settings), default=None)
    if longest is None or not longest.settings:
        raise ConfigError(f"{path} launches no trainer with key=value words or --flags: import the file it names")
    return longest


def _commands(text: str) -> Iterator[tuple[list[tuple[int, str]], list[str]]]:
    """The words of each command, with its lines and their numbers."""
    lines: list[tuple[int, str]] = []
    joined = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if line.lstrip().startswith("#"):
            continue
        lines.append((number, line))
        joined += line.rstrip().removesuffix("\\") + " "
        if line.rstrip().endswith("\\"):
            continue
        try:
            words = shlex.split(joined, comments=True)
        except ValueError:  # a quote is open
            continue
        if words:
            yield lines, words
        lines, joined = [], ""


def _expand(word: str, names: dict[str, str]) -> str:
    """A default may hold variables itself: inner ones first."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name in ("@", "*"):
            return ""
        if name in _OF_THE_START:
            return f"\0{name}\0"
        return names.get(name, match[0] if match[3] is None else match[3])

    while (found := _VARIABLE.sub(value, word)) != word:
        word = found
    return re.sub("\0(\\w+)\0", r"${oc.env:\1}", word)


def _settings(words: list[str], lines: list[tuple[int, str]]) -> Iterator[tuple[str, ForeignSetting]]:
    """Of `key=value`, `--flag value`, `--flag=value` and `--flag`, a switch; `lines` are those of the command."""

    def line_of(text: str) -> int:
        return next((number for number, line in lines if text in line), lines[0][0])

    waiting = [word for word in words if word != "\\"]
    while waiting:
        word = waiting.pop(0)
        name, equals, value = word.partition("=")
        if flag := _FLAG.fullmatch(name):
            values = [value] if equals else []
            while not equals and waiting and not waiting[0].startswith("--") and not _HYDRA.fullmatch(waiting[0]):
                if waiting[0].endswith(".py") or waiting[0] == "-m" or _takes_one(flag[1], values):
                    break
                values.append(waiting.pop(0))
            key = flag[1].replace("-", "_")
            yield key, ForeignSetting(key, _typed(values[0] if len(values) == 1 else values or "true"), line_of(name))
        elif pair := _HYDRA.fullmatch(word):
            yield pair[1], ForeignSetting(pair[1], _typed(pair[2]), line_of(f"{pair[1]}="))
        elif word.startswith("$"):
            yield word, ForeignSetting(word, word, line_of(word))


def _takes_one(flag: str, values: list[str]) -> bool:
    """Only lists of names take several."""
    return bool(values) and flag not in ("lora_target_modules", "report_to")


def _typed(value: str | list[str]) -> Any:
    if isinstance(value, list):
        return [plain(item) for item in value]
    text = value.strip()
    if text.startswith(("[", "{")):
        try:
            return plain(yaml.safe_load(text))
        except yaml.YAMLError:
            return value
    return plain(text.strip("'\""))
