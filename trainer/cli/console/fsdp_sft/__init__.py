"""The entry point of the script `fsdp-sft`. It is outside `trainer`, so that it can report a
different package called `trainer` that Python finds first.
"""

import sys
from importlib.util import find_spec
from pathlib import Path


def main() -> int:
    spec = find_spec("trainer")
    places = spec.submodule_search_locations if spec else None
    if not any(Path(place, "cli", "__main__.py").is_file() for place in places or ()):
        found = "no package" if spec is None else spec.origin or places
        fix = "remove its directory from PYTHONPATH, or uninstall it"
        print(
            f"ERROR: Python imports {found} as 'trainer' instead of fsdp-sft's package. Fix: {fix}",
            file=sys.stderr,
        )
        return 2
    from trainer.cli.__main__ import main as run_command

    return run_command()
