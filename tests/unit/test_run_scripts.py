"""run_sft.sh and run_tests.sh: which interpreter they take, and what they install when."""

import os
import shutil
import subprocess
from pathlib import Path

from trainer.launch import requirements

ROOT = Path(requirements.__file__).parents[2]
COPIED = (
    "run_sft.sh",
    "run_tests.sh",
    "pyproject.toml",
    "constraints.txt",
    "trainer/launch/environment.sh",
)
# Stands for every interpreter: notes its calls, makes virtual environments, has the dependencies
# never or always.
FAKE_PYTHON = """#!/bin/bash
echo "$(basename "$(dirname "$(dirname "$0")")") $*" >>{log}
case "$*" in
    "-m trainer.launch.requirements"*) exit {lacks_requirements} ;;
    "-m venv"*) mkdir -p "${{@: -1}}/bin"; cp "$0" "${{@: -1}}/bin/python" ;;
    "-c import sys, venv"*) exit {is_old} ;;
    "-m pip"*) [ ! -e {broken_network} ] ;;
esac
"""


class Checkout:
    """A copy of the scripts, with a false `python3` first on the path."""

    def __init__(
        self, directory: Path, *, lacks_requirements: bool = True, is_old: bool = False
    ) -> None:
        self.root = directory / "repo"
        self.caller = directory / "elsewhere"
        self.log = directory / "calls"
        self.broken_network = directory / "broken"
        for name in COPIED:
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.root / name)
        python = directory / "system" / "bin" / "python3"
        python.parent.mkdir(parents=True)
        python.write_text(
            FAKE_PYTHON.format(
                log=self.log,
                lacks_requirements=int(lacks_requirements),
                is_old=int(is_old),
                broken_network=self.broken_network,
            )
        )
        python.chmod(0o755)
        self.env = {"PATH": f"{python.parent}:/usr/bin:/bin", "HOME": str(directory)}
        self.caller.mkdir()

    def run(
        self, script: str, *words: str, **env: str
    ) -> tuple[subprocess.CompletedProcess[str], list[str]]:
        """The result and the interpreter calls, as `environment arguments`, without the
        question for requirements.
        """
        self.log.write_text("")
        result = subprocess.run(
            ["bash", self.root / script, *words],
            env=self.env | env,
            cwd=self.caller,
            capture_output=True,
            text=True,
        )
        calls = self.log.read_text().replace(f"{self.root}", "ROOT").splitlines()
        return result, [call for call in calls if "requirements" not in call]


LAUNCH = ".venv -m trainer.launch 2 optim.lr=1"


def installed(calls: list[str]) -> list[str]:
    return [call.split("constraints.txt ")[1] for call in calls if "-m pip install" in call]


def test_the_active_environment_is_used_as_it_is(tmp_path):
    checkout = Checkout(tmp_path, lacks_requirements=False)
    result, calls = checkout.run("run_sft.sh", "2", "optim.lr=1")
    assert calls == ["system -m trainer.launch 2 optim.lr=1"]
    assert (result.stdout, result.stderr) == ("", "")
    assert not (checkout.root / ".venv").exists()


def test_the_second_call_installs_nothing(tmp_path):
    checkout = Checkout(tmp_path)
    first, calls = checkout.run("run_sft.sh", "2", "optim.lr=1")
    assert first.returncode == 0, first.stderr
    assert "setting up" in first.stdout
    assert installed(calls) == ["torch", "-e ROOT"]
    assert calls[-1] == LAUNCH
    second, calls = checkout.run("run_sft.sh", "2", "optim.lr=1")
    assert calls == [LAUNCH]
    assert second.stdout == ""


def test_an_interrupted_installation_starts_over(tmp_path):
    checkout = Checkout(tmp_path)
    checkout.broken_network.touch()
    result, calls = checkout.run("run_sft.sh", "2")
    assert result.returncode != 0
    (half_installed := checkout.root / ".venv" / "half-installed").touch()
    assert not any("trainer.launch" in call for call in calls)
    checkout.broken_network.unlink()
    result, calls = checkout.run("run_sft.sh", "2", "optim.lr=1")
    assert result.returncode == 0
    assert not half_installed.exists()
    assert "system -m venv ROOT/.venv" in calls
    assert installed(calls) == ["torch", "-e ROOT"]
    assert checkout.run("run_sft.sh", "2", "optim.lr=1")[1] == [LAUNCH]


def test_an_environment_of_someone_else_is_never_changed(tmp_path):
    checkout = Checkout(tmp_path)
    mine = checkout.root / ".venv" / "mine"
    mine.parent.mkdir()
    mine.touch()
    result, calls = checkout.run("run_sft.sh", "2")
    assert result.returncode == 2
    assert "was not made by this script" in result.stderr
    assert calls == [] and list(mine.parent.iterdir()) == [mine]


def test_an_environment_of_someone_else_is_used_when_it_is_complete(tmp_path):
    checkout = Checkout(tmp_path)
    python = checkout.root / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/bash\necho ".venv $*" >>{checkout.log}\n')
    python.chmod(0o755)
    assert checkout.run("run_sft.sh", "2", "optim.lr=1")[1] == [LAUNCH]
    assert list((checkout.root / ".venv").rglob("*")) == [python.parent, python]


def test_an_old_python_is_refused_with_a_way_out(tmp_path):
    checkout = Checkout(tmp_path, is_old=True)
    result, _ = checkout.run("run_sft.sh", PYTHON="python3")
    assert result.returncode == 2
    assert result.stderr.startswith("ERROR: no Python >= 3.11")
    assert "PYTHON" in result.stderr


def test_a_folder_named_trainer_does_not_shadow_the_package(tmp_path):
    """Neither where the command is called nor in front in PYTHONPATH."""
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "__init__.py").write_text("raise SystemExit(99)")
    command = ["bash", ROOT / "run_sft.sh", "2", "data.train_batchsize=8"]
    result = subprocess.run(
        command,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:"},
    )
    assert result.returncode == 2
    assert "did you mean 'data.train_batch_size'?" in result.stderr


def test_absent_and_other_versions_are_unmet(tmp_path, monkeypatch):
    project = '[project]\ndependencies = ["rich>=13", "rich<2", "no-such-thing"]\n'
    (tmp_path / "pyproject.toml").write_text(
        project + '[project.optional-dependencies]\nx = ["nope>=1"]\n'
    )
    monkeypatch.setattr(requirements, "PYPROJECT", tmp_path / "pyproject.toml")
    assert requirements.unmet_requirements("x") == ["rich<2", "no-such-thing", "nope>=1"]
