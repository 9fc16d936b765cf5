"""An installed package contains everything that a checkout contains."""

import os
import shutil
import zipfile
from pathlib import Path

import pytest
from processes import run_python
from repository import REPOSITORY

OF_A_CHECKOUT = {"launch/environment.sh"}
"""Sourced by the scripts next to the package."""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The content of a wheel built from the working tree, far from any checkout."""
    source = tmp_path_factory.mktemp("source")
    target = tmp_path_factory.mktemp("site")
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("trainer", "conf"):
        shutil.copytree(REPOSITORY / name, source / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(target)!r})"
    done = run_python("-c", build, cwd=source, env=os.environ)
    assert done.returncode == 0, done.stderr
    (wheel,) = target.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(target)
    return target


@pytest.fixture
def cwd(tmp_path):
    """A directory with a foreign package of the same name."""
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "__init__.py").write_text("raise SystemExit('run')")
    return tmp_path


def call(program, *words, cwd, path):
    env = {**os.environ, "PYTHONPATH": ":".join(map(str, path)), "PYTHONSAFEPATH": "1"}
    return run_python("-c", program, *words, cwd=cwd, env=env, timeout_s=200)


def test_a_wheel_holds_every_file_of_the_package(site):
    def files(root):
        walked = os.walk(root / "trainer", followlinks=True)
        found = [Path(directory, name) for directory, _, names in walked for name in names]
        return {str(path.relative_to(root / "trainer")) for path in found if path.suffix != ".pyc"}

    assert files(REPOSITORY) - files(site) == OF_A_CHECKOUT
    (entries,) = site.glob("*.dist-info/entry_points.txt")
    assert "fsdp-sft = fsdp_sft:main" in entries.read_text()


def test_a_foreign_package_of_the_same_name_is_named(site, cwd):
    program = "import sys; from fsdp_sft import main; sys.exit(main())"
    words = ("checkpoint", "--help")
    done = call(program, *words, cwd=cwd, path=[cwd, site])
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{cwd}/trainer/__init__.py" in done.stderr
    done = call(program, *words, cwd=cwd, path=[site, cwd])
    assert done.returncode == 0 and "verify" in done.stdout, done.stderr


TRIES = """
from pathlib import Path
import trainer
from trainer.api import ConfigError, TrainingError, load_config, train
assert "site" in trainer.__file__, trainer.__file__
assert load_config("experiment=gsm8k").data.prompt_key == "question"
run = train("trainer.device=cpu", "optim.lr=0.002", num_ranks=1)
(row,) = [row for row in run.metrics() if "train/loss" in row]
assert row["train/lr(1e-3)"] == 2 and run.directory == Path("runs").absolute()
assert run.checkpoint.name == "global_step_1" and (run.export / "config.json").is_file()
try:
    train("optim.lrr=1")
except ConfigError as error:
    assert "did you mean 'optim.lr'" in str(error), error
"""
RECIPE = """
optim: {{lr: 0.001, lr_warmup_steps_ratio: 0, lr_scheduler: constant}}
trainer: {{total_training_steps: 1, default_local_dir: {cwd}/runs}}
"""


def test_an_installed_package_trains_the_recipe_of_the_working_directory(site, cwd):
    """The settings come from a file that users need not name."""
    (cwd / "sft.local.yaml").write_text(RECIPE.format(cwd=cwd))
    done = call(TRIES, cwd=cwd, path=[site])
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.count("note: recipe sft.local.yaml") == 2  # once for each call
