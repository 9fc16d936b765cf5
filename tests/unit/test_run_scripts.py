"""run_sft.sh and run_tests.sh: the interpreter that they choose, and the packages that they
install.
"""

import os
import shutil
import subprocess

from repository import REPOSITORY

COPIED = ("run_sft.sh", "pyproject.toml", "constraints.txt", "trainer/launch/environment.sh")
FAKE_PYTHON = """#!/bin/bash
echo "$(basename "$(dirname "$(dirname "$0")")") $*" >>{directory}/calls
case "$*" in
    "-m trainer.launch.requirements"*) [ -e {directory}/complete ] ;;
    "-m venv"*) mkdir -p "${{@: -1}}/bin"; cp "$0" "${{@: -1}}/bin/python" ;;
    "-m pip"*) [ ! -e {directory}/offline ] ;;
esac
"""
"""Replaces every interpreter: it records its calls and creates virtual environments."""
LAUNCH = "-m trainer.launch 2 optim.lr=1"


class Checkout:
    """A copy of the scripts, with a fake `python3` first in the path. Files tell it about the
    machine: complete, offline.
    """

    def __init__(self, directory):
        self.directory = directory
        self.root = directory / "repo"
        self.venv = self.root / ".venv"
        for name in COPIED:
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / name, self.root / name)
        python = directory / "system" / "bin" / "python3"
        python.parent.mkdir(parents=True)
        python.write_text(FAKE_PYTHON.format(directory=directory))
        python.chmod(0o755)
        (directory / "elsewhere").mkdir()

    def run(self, **env):
        """Return the result, and the interpreter calls as `environment arguments`, without the
        check of requirements.
        """
        (log := self.directory / "calls").write_text("")
        path = f"{self.directory}/system/bin:/usr/bin:/bin"
        result = subprocess.run(
            ["bash", self.root / "run_sft.sh", "2", "optim.lr=1"],
            env={"PATH": path, "HOME": str(self.directory), **env},
            cwd=self.directory / "elsewhere",
            capture_output=True,
            text=True,
        )
        calls = log.read_text().replace(f"{self.root}", "ROOT").splitlines()
        return result, [call for call in calls if "requirements" not in call]


def installed(calls):
    return [call.split("constraints.txt ")[1] for call in calls if "-m pip install" in call]


def test_the_active_environment_is_used_as_it_is(tmp_path):
    checkout = Checkout(tmp_path)
    (tmp_path / "complete").touch()
    result, calls = checkout.run()
    assert (calls, result.stdout, result.stderr) == ([f"system {LAUNCH}"], "", "")
    assert not checkout.venv.exists()


def test_the_first_call_installs_also_after_an_interruption_and_the_second_nothing(tmp_path):
    checkout = Checkout(tmp_path)
    (tmp_path / "offline").touch()
    result, calls = checkout.run()
    assert result.returncode != 0 and not any("trainer.launch" in call for call in calls)
    (half_installed := checkout.venv / "half-installed").touch()
    (tmp_path / "offline").unlink()
    result, calls = checkout.run()
    assert result.returncode == 0 and "setting up" in result.stdout, result.stderr
    assert "system -m venv ROOT/.venv" in calls and not half_installed.exists()
    assert installed(calls) == ["torch", "-e ROOT"] and calls[-1] == f".venv {LAUNCH}"
    result, calls = checkout.run()
    assert (calls, result.stdout) == ([f".venv {LAUNCH}"], "")


def test_an_environment_of_someone_else_is_never_changed_and_used_if_it_is_complete(tmp_path):
    checkout = Checkout(tmp_path)
    checkout.venv.mkdir()
    result, calls = checkout.run()
    assert result.returncode == 2 and "was not made by this script" in result.stderr
    assert calls == [] and list(checkout.venv.iterdir()) == []
    python = checkout.venv / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/bash\necho ".venv $*" >>{tmp_path}/calls\n')
    python.chmod(0o755)
    assert checkout.run()[1] == [f".venv {LAUNCH}"]
    assert list(checkout.venv.rglob("*")) == [python.parent, python]


def test_a_folder_named_trainer_does_not_shadow_the_package(tmp_path):
    """It is neither in the caller's directory nor first in PYTHONPATH."""
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "__init__.py").write_text("raise SystemExit(99)")
    result = subprocess.run(
        ["bash", REPOSITORY / "run_sft.sh", "2", "data.train_batchsize=8"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:"},
    )
    assert result.returncode == 2
    assert "did you mean 'data.train_batch_size'?" in result.stderr


def test_bytecode_is_written_at_the_installation_where_python_may_not_write_it(tmp_path):
    _, calls = Checkout(tmp_path).run(PYTHONDONTWRITEBYTECODE="1")
    assert [call.split()[5] for call in calls if "-m pip install" in call] == ["--compile"] * 2
