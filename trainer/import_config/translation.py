"""From a file of another trainer to a recipe of ours: what becomes of each setting."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from trainer.config import Config, ConfigError, find_foreign, known_keys, parse_config, problem_with_key
from trainer.import_config.peers import AXOLOTL, LLAMA_FACTORY, TRL, VERL, VERL_LEGACY, Peer
from trainer.import_config.reading import ForeignFile, flat, read_foreign
from trainer.import_config.rules import PER_DEVICE, UNKNOWN, Answer, ForeignSetting, Given, became, no_equal, nothing
from trainer.run.compose import PARTS
from trainer.runtime.environment import call

PEERS = {"verl": VERL, "trl": TRL, "axolotl": AXOLOTL, "llama-factory": LLAMA_FACTORY}
RANKS = ("num_processes", "nproc_per_node", "num_gpus", "trainer.n_gpus_per_node")
MACHINES = ("nnodes", "num_machines", "trainer.nnodes")
NEEDED = ("model.partial_pretrain", "data.train_files")
"""Without these the quickstart would be trained."""
_OWN_WORD = re.compile(r"((?:data|model|optim|trainer)\.[\w.]+)=(\{value\}|\[[a-z,]+\]|[a-z0-9_.]+)")
_UNSET = re.compile(r"\$(?!\{oc\.env:)")


@dataclass(frozen=True)
class Translation:
    """`rows`: every setting of the file, then the defaults that matter, each with what became of it."""

    peer: str
    num_ranks: int | None
    rows: list[tuple[ForeignSetting, Answer]]

    @property
    def words(self) -> dict[str, Any]:
        """Our keys; what the file says wins over defaults. Null is what the recipe must still be given."""
        found: dict[str, Any] = dict.fromkeys(NEEDED)
        for _, answer in sorted(self.rows, key=lambda row: row[0].line is not None):
            found |= answer.words
        return found


def import_file(path: Path, *, name: str | None, num_ranks: int | None, mean_tokens: float | None) -> Translation:
    """`name` of the trainer, where the file does not show it; `num_ranks` of its launch. Raises `ConfigError`."""
    file = read_foreign(path)
    peer = PEERS[name] if name else _peer_of(file, path)
    settings = flat(file.settings) if "verl" in peer.origins else file.settings
    if num_ranks is None:
        num_ranks = _ranks_of(settings)
    defaults = {key: ForeignSetting(key, value) for key, value in peer.defaults.items()}
    written = {key: setting for key, setting in settings.items() if setting.value is not None}
    given = Given(defaults | written, num_ranks, mean_tokens)
    if num_ranks is None and any(key in given.settings for key in PER_DEVICE):
        raise ConfigError(
            f"{path} does not say on how many ranks it was started, and its batch is that of one rank: say it, "
            f"{call(f'import {path} N')}"
        )
    rows = [(setting, _answer(setting, given, peer)) for setting in settings.values()]
    own = Config()
    for key, setting in defaults.items():
        if key not in written:
            answer = _answer(setting, given, peer)
            words = {name: value for name, value in answer.words.items() if attrgetter(name)(own) != value}
            if words or (answer.text and answer.kind not in ("became", "changes nothing")):
                rows.append((setting, Answer(answer.kind, answer.text, words)))
    return Translation(peer.name, num_ranks, rows)


def check(words: Mapping[str, Any]) -> None:
    """Raises `ConfigError` where they make no configuration, also with what is still to be given."""
    given = {key: "given" for key in NEEDED if words[key] is None}
    tree: Any = OmegaConf.to_container(_tree({**words, **given}))
    parse_config(tree, PARTS)


def _tree(words: Mapping[str, Any]) -> DictConfig:
    tree = OmegaConf.create({})
    for key in known_keys():
        if key in words:
            OmegaConf.update(tree, key, words[key])
    return tree


def recipe(translation: Translation, *, name: str, command: str) -> str:
    """The text of a file for `experiment=`: what differs stands at its head."""
    words = {"trainer.experiment_name": name} | translation.words
    lines = [f"# {translation.peer}'s {name}: {command}"]
    for setting, answer in translation.rows:
        if answer.kind not in ("became", "changes nothing"):
            value = " ".join(str(setting.value).split())
            lines.append(f"# {answer.kind}: {setting.key}={value}{answer.text and f': {answer.text}'}")
    return "\n".join([*lines, OmegaConf.to_yaml(_tree(words))])


def _peer_of(file: ForeignFile, path: Path) -> Peer:
    """Whose a file is. Raises `ConfigError` where it does not show that."""
    keys, command = set(file.settings), file.command
    if "axolotl" in command or "config" in keys:
        raise ConfigError(f"{path} starts a trainer with a file of its own: import that file")
    if "fsdp_sft_trainer" in command:
        return VERL_LEGACY
    if "base_model" in keys:
        return AXOLOTL
    if keys & {"stage", "finetuning_type", "cutoff_len", "dataset_dir", "template"}:
        return LLAMA_FACTORY
    if "model_name_or_path" in keys:
        return TRL
    groups = {key.partition(".")[0] for key in keys}
    if {"data", "model"} <= groups:
        is_legacy = "model.partial_pretrain" in flat(file.settings)
        return VERL_LEGACY if is_legacy else VERL
    raise ConfigError(f"{path} does not show whose it is: name it, --from {' | '.join(PEERS)}")


def _ranks_of(settings: Mapping[str, ForeignSetting]) -> int | None:
    """`num_processes` counts those of all machines."""

    def number(keys: Iterable[str]) -> tuple[str, int] | None:
        found = ((key, settings[key].value) for key in keys if key in settings)
        return next(((key, value) for key, value in found if isinstance(value, int)), None)

    ranks, machines = number(RANKS), number(MACHINES)
    if ranks is None:
        return None
    return ranks[1] if ranks[0] == "num_processes" or machines is None else ranks[1] * machines[1]


def _answer(setting: ForeignSetting, given: Given, peer: Peer) -> Answer:
    key, value = setting.key, setting.value
    if isinstance(value, str) and _UNSET.search(value):
        return Answer(UNKNOWN, "its value is set outside of the file, or twice in it")
    if value is None and setting.line is not None:
        return nothing("left open")
    if key in (*RANKS, *MACHINES):
        return nothing("ranks of a machine are the first word of the command, machines NNODES in its environment")
    if rule := peer.rules.get(key):
        try:
            return rule(given, value)
        except ConfigError:
            raise
        except (TypeError, ValueError, AttributeError, KeyError) as error:
            return no_equal(f"cannot be read: {error}")
    if "verl" in peer.origins and problem_with_key(key) is None:
        return became(**{key: value})
    row = find_foreign(key, peer.origins)
    if row is None:
        return Answer(UNKNOWN)
    if row.own_key is not None:
        return became(**{row.own_key: value})
    if row.changes_nothing(str(value)):
        return nothing(row.here if "*" in row.unchanged else "")
    if words := dict(_words_of(row.here, value)):
        return became(**words)
    return no_equal(row.advice(str(value)))


def _words_of(here: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Our keys where the table says nothing but `key=value` words."""
    matches = [_OWN_WORD.fullmatch(word) for word in here.split()]
    for match in matches if all(matches) else []:
        assert match is not None
        text = match[2]
        yield match[1], value if text == "{value}" else text[1:-1].split(",") if text[0] == "[" else text
