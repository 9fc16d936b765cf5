"""An installed package has all that a checkout has."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OF_A_CHECKOUT = {"trainer/launch/environment.sh"}
"""Sourced by the scripts beside the package."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The content of a wheel built from the working tree, where no checkout is near."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    for name in ("trainer", "conf"):
        shutil.copytree(
            ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(source.parent)!r})"
    done = subprocess.run(
        [sys.executable, "-c", build], cwd=source, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = source.parent.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        assert "fsdp-sft = fsdp_sft:main" in file.read(entry_points(file)).decode()
        file.extractall(target)
    return target


def entry_points(file: zipfile.ZipFile) -> str:
    return next(name for name in file.namelist() if name.endswith("entry_points.txt"))


def test_a_wheel_holds_every_file_of_the_package(site):
    installed, own = ({str(path) for path in files_below(root)} for root in (site, ROOT))
    assert own - installed == OF_A_CHECKOUT


def files_below(root: Path) -> list[Path]:
    """Relative to `root`; links are followed."""
    walked = os.walk(root / "trainer", followlinks=True)
    found = [
        Path(directory, name).relative_to(root) for directory, _, names in walked for name in names
    ]
    return [path for path in found if path.suffix != ".pyc"]


def test_a_foreign_package_of_the_same_name_is_named(site, tmp_path):
    command = [
        sys.executable,
        "-c",
        "import sys; from fsdp_sft import main; sys.exit(main())",
        "checkpoint",
        "--help",
    ]

    def call(*path: Path) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), "PYTHONSAFEPATH": "1"}
        return subprocess.run(
            command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60
        )

    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "__init__.py").write_text("raise SystemExit('run')")
    done = call(tmp_path, site)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(
        f"ERROR: Python finds {tmp_path}/trainer/__init__.py as 'trainer' in front of"
    )
    done = call(site, tmp_path)
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


def test_an_installed_package_trains_the_recipe_of_the_working_directory(site, tmp_path):
    """Beside a folder of the same name, by the console's command, from a file that nobody has
    to name.
    """
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "__init__.py").write_text("raise SystemExit('a foreign package')")
    recipe = (
        f"optim: {{lr: 0.001, lr_warmup_steps_ratio: 0, lr_scheduler: constant}}\ntrainer: {{total_training_steps: 1, \
default_local_dir: {tmp_path / 'runs'}}}\n"
    )
    (tmp_path / "sft.local.yaml").write_text(recipe)
    env = {**os.environ, "PYTHONPATH": str(site), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        [sys.executable, "-c", TRIES],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.count("note: recipe sft.local.yaml") == 2  # once for each call
    assert json.loads((tmp_path / "runs" / "run.json").read_text())
