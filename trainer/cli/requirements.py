"""`python -m trainer.cli.requirements [extra]` exits 0 when all of pyproject.toml is met, else 1 (floor 5)."""

import sys

from trainer.launch.requirements import unmet_requirements

if __name__ == "__main__":
    sys.exit(1 if unmet_requirements(*sys.argv[1:2]) else 0)
