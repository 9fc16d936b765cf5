"""An installed package has all that a checkout has."""

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
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(source.parent)!r})"
    done = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    (wheel,) = source.parent.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(target)
    return target


def test_a_wheel_holds_every_file_of_the_package(site: Path) -> None:
    installed, own = ({str(path) for path in files_below(root)} for root in (site, ROOT))
    assert own - installed == OF_A_CHECKOUT


def files_below(root: Path) -> list[Path]:
    """Relative to `root`; links are followed."""
    walked = os.walk(root / "trainer", followlinks=True)
    found = [Path(directory, name).relative_to(root) for directory, _, names in walked for name in names]
    return [path for path in found if path.suffix != ".pyc"]


def test_an_installed_package_composes_its_configuration_and_recipes(site: Path, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(site), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-m", "trainer", "--cfg", "job", "experiment=gsm8k", "optim.lr=0.125"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "lr: 0.125" in done.stdout and "gsm8k" in done.stdout
    where = [sys.executable, "-c", "import trainer; print(trainer.__file__)"]
    found = subprocess.run(where, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60).stdout
    assert Path(found.strip()).is_relative_to(site)
