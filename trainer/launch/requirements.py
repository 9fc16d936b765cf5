"""Find out if this interpreter has the package's dependencies.

`environment.sh` asks before it makes one: `python -m trainer.launch.requirements [extra]` exits 0
when all are met.
"""

import importlib.metadata
import sys
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


def unmet_requirements(extra: str | None = None) -> list[str]:
    """The requirements, of `extra` too, that are absent or of another version."""
    if PYPROJECT.is_file():
        project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
        wanted = project["dependencies"]
        wanted += project["optional-dependencies"][extra] if extra else []
    else:  # installed from a wheel
        known = importlib.metadata.requires("fsdp-sft") or []
        wanted = [text for text in known if "extra ==" not in text]
    return [text for text in wanted if not _is_met(text)]


def _is_met(text: str) -> bool:
    try:
        from packaging.requirements import Requirement
        from packaging.version import Version

        requirement = Requirement(text)
        # GPU images carry builds such as 2.13.0a0+...: what counts is the release they were made
        # from.
        installed = Version(importlib.metadata.version(requirement.name)).base_version
    except (ModuleNotFoundError, importlib.metadata.PackageNotFoundError):
        return False
    return requirement.specifier.contains(installed)


if __name__ == "__main__":
    sys.exit(1 if unmet_requirements(*sys.argv[1:2]) else 0)
