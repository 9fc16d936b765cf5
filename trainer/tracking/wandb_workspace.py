"""A workspace in W&B: the panels of a project in the sections of the table of metrics, made once, online."""

import importlib
import importlib.util
import os

from trainer import metrics
from trainer.config import ConfigError
from trainer.metrics.words import GROUPS
from trainer.runtime.evaluations import PREFIX, SUCCESS_RATE
from trainer.tracking import wandb_backend

NAME = "fsdp-sft"
PACKAGE = "wandb_workspaces"
INSTALL = "'wandb-workspaces>=0.4.13'"


def make_workspace(project: str, *, entity: str | None) -> str:
    """Its address. `entity`: the user or team, by default that of the login.

    Raises `ConfigError` where the package is missing or wandb offline, and what wandb raises.
    """
    if importlib.util.find_spec(PACKAGE) is None:
        raise ConfigError(f"a workspace needs a package of W&B's own: pip install {INSTALL}")
    if os.environ.get("WANDB_MODE", "online") != "online":
        raise ConfigError(f"a workspace is made online: WANDB_MODE is {os.environ['WANDB_MODE']}")
    import wandb

    wandb_backend.require_login()
    workspaces, panels = (importlib.import_module(f"{PACKAGE}.{name}") for name in ("workspaces", "reports.v2"))
    charts = metrics.charts()
    evaluation = panels.LinePlot(x=wandb_backend.STEP, metric_regex=f"^{PREFIX}|^{SUCCESS_RATE}$")
    plots = {"evaluation: checkpoints scored by what they write": [evaluation]} | {
        f"{group}: {meaning}": [
            panels.LinePlot(title=title, x=wandb_backend.STEP, y=keys) for title, keys in charts[group].items()
        ]
        for group, meaning in GROUPS.items()
        if group in charts
    }
    sections = [workspaces.Section(name=name, panels=found, is_open=True) for name, found in plots.items()]
    made = workspaces.Workspace(
        entity=entity or wandb.Api().default_entity, project=project, name=NAME, sections=sections
    )
    return str(made.save().url)
