"""Make a workspace in W&B with the panels of this trainer's metrics in sections (floor 5, no torch).

Exit codes: 0 made, 1 W&B failed, 2 wrong usage, offline or without the package.
"""

import os
import sys

from trainer.cli.arguments import Parser, as_command, told_as
from trainer.errors import EXIT_DONE
from trainer.tracking.wandb_workspace import make_workspace


@as_command()
def main(argv: list[str]) -> int:
    about = "Make a W&B workspace: loss, gradient, validation, speed, memory, evaluation, each in a section."
    parser = Parser("workspace", description=about)
    parser.add_argument("project", metavar="PROJECT", help="as trainer.project_name, or WANDB_PROJECT of the runs")
    whose = "the user or team (default: WANDB_ENTITY, else that of the login)"
    parser.add_argument("--entity", metavar="NAME", default=os.environ.get("WANDB_ENTITY"), help=whose)
    arguments = parser.parse_args(argv)
    with told_as("wandb"):
        address = make_workspace(arguments.project, entity=arguments.entity)
    print(f"workspace made: {address}")
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
