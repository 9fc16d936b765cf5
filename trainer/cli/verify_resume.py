"""Prove that a recipe, killed and started again, gives the same numbers as in one piece (floor 5).

Exit codes: 0 equal, 1 different or not judged, 2 wrong usage, 73 cannot write, 130 interrupted; that of the run when a
run fails.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from trainer.cli.arguments import Parser, add_words, as_command, at_least, read_words
from trainer.config import Config, ConfigError
from trainer.launch.ranks import Arguments, choose_num_ranks, gpus_for_run, node_layout
from trainer.resume_proof.proof import MIN_STEPS, Trial, interruptible, verify
from trainer.runtime.environment import call


@as_command(interrupted="interrupted: no verdict")
def main(argv: list[str]) -> int:
    trial = parse_trial(argv)
    with interruptible():
        return verify(trial)


def _parser() -> Parser:
    usage = f"{call('checkpoint verify-resume')} [N] [--steps K] [--kills M] [--seed S] [key=value ...]"
    text = "Prove that a recipe, killed and started again, gives the same numbers as in one piece."
    parser = Parser(usage=usage, description=text)
    parser.add_argument("--steps", metavar="K", type=at_least(MIN_STEPS), default=12, help="of each run; default 12")
    parser.add_argument("--kills", metavar="M", type=at_least(1), default=3, help="of the third run; default 3")
    parser.add_argument("--seed", metavar="S", type=at_least(0), default=1, help="of the moments of the kills")
    add_words(parser)
    return parser


def parse_trial(argv: Sequence[str]) -> Trial:
    """Raises `ConfigError` for what the user got wrong, before anything starts."""
    parser = _parser()
    arguments = parser.parse_intermixed_args(argv)
    asked, config = read_words(parser, arguments.words)
    if any(word.lstrip("+").startswith("trainer.total_training_steps=") for word in asked.overrides):
        raise ConfigError("trainer.total_training_steps is set by this command: give --steps K instead")
    if (mode := config.trainer.resume_mode) != "auto":
        raise ConfigError(f"trainer.resume_mode={mode} cannot be verified: add trainer.resume_mode=auto")
    return trial_of(asked, config, steps=arguments.steps, kills=arguments.kills, seed=arguments.seed)


def trial_of(asked: Arguments, config: Config, *, steps: int, kills: int = 1, seed: int = 1) -> Trial:
    """Raises `ConfigError` on one of several machines."""
    if node_layout(os.environ).num_nodes > 1:
        raise ConfigError("this command works on one machine: set NNODES=1 and use the ranks of this machine alone")
    num_gpus = gpus_for_run(config.trainer.device)
    return Trial(
        num_ranks=choose_num_ranks(asked.num_ranks, num_gpus=num_gpus),
        steps=steps,
        kills=kills,
        seed=seed,
        overrides=tuple(asked.overrides),
        run_dir=Path(config.trainer.default_local_dir).resolve(),
        is_on_gpu=num_gpus > 0,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
