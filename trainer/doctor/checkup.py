"""Every check, in their order, and what each needs (floor 5, no torch)."""

import os
from collections.abc import Iterator

from trainer.config import Config, ConfigError
from trainer.doctor import machine, recipe
from trainer.doctor.checked import Check, Checked, Launch
from trainer.errors import CannotWriteError, DataError
from trainer.launch.ranks import DEFAULT_NUM_CPU_RANKS, choose_num_ranks, count_gpus, node_layout

CHECKS: dict[str, Check] = {
    "requirements": machine.requirements,
    "cards": machine.cards,
    **machine.QUICK,
    **recipe.PREFLIGHT,
    "files": recipe.files,
    "directories": recipe.directories,
    "resume": recipe.resume,
    "login": recipe.login,
    "architecture": recipe.architecture,
    "rows": recipe.rows,
    "cache": recipe.cache,
    "memory and disk": recipe.memory_and_disk,
}
NEEDS = {
    "login": {"requirements", "trackers"},
    "architecture": {"requirements", "model", "adapters"},
    "rows": {"requirements", "model", "template", "files"},
    "cache": {"rows"},
    "memory and disk": {"cards", "architecture"},
}
"""Without those, a check would only say the same again."""


def launch_of(config: Config, asked: int | None) -> Launch:
    """What would be started here on the ranks asked for."""
    try:
        num_gpus, layout = 0 if config.trainer.device == "cpu" else count_gpus(), node_layout(os.environ)
        return Launch(config, choose_num_ranks(asked, num_gpus=num_gpus), num_gpus, layout)
    except ConfigError as error:
        return Launch(config, asked or DEFAULT_NUM_CPU_RANKS, problem=str(error))


def examine(launch: Launch) -> Iterator[tuple[str, Checked | None]]:
    """By check what it says; None for one that must wait until others are mended."""
    broken = set[str]()
    for name, check in CHECKS.items():
        if NEEDS.get(name, set()) & broken:
            broken.add(name)
            yield name, None
            continue
        for found in _said(check, launch):
            if found.level == "fail":
                broken.add(name)
            yield name, found


def _said(check: Check, launch: Launch) -> list[Checked]:
    try:
        return list(check(launch)) or [Checked("ok", "nothing is wrong")]
    except Exception as error:  # whatever a run would end with
        says_itself = isinstance(error, ConfigError | DataError | CannotWriteError | OSError)
        return [Checked("fail", str(error) if says_itself else f"{type(error).__name__}: {error}")]
