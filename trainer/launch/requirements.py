"""Checks that this interpreter has the package's dependencies.

`environment.sh` calls `python -m trainer.launch.requirements [extra]` before it makes an
environment. The exit code is 0 if all requirements are met.
"""

import importlib.metadata
import sys
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


def unmet_requirements(extra: str | None = None) -> list[str]:
    """Return the requirements, including those of `extra`, that are missing or have a different
    version.
    """
    if not PYPROJECT.is_file():
        return []  # pip installed the package with its dependencies
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    wanted = project["dependencies"]
    if extra:
        wanted += project["optional-dependencies"][extra]
    return [text for text in wanted if not _is_met(text)]


def _is_met(text: str) -> bool:
    try:
        from packaging.requirements import Requirement
        from packaging.version import Version

        requirement = Requirement(text)
        # GPU images carry builds such as 2.13.0a0+…; the release they were made from counts
        installed = Version(importlib.metadata.version(requirement.name)).base_version
    except (ModuleNotFoundError, importlib.metadata.PackageNotFoundError):
        return False
    return requirement.specifier.contains(installed)


if __name__ == "__main__":
    sys.exit(1 if unmet_requirements(*sys.argv[1:2]) else 0)
