"""`fsdp-sft COMMAND …`, or in a checkout `bash run_sft.sh COMMAND …`."""

import importlib
import sys

import trainer
from trainer.cli.commands import COMMANDS, TRAIN, listing
from trainer.config import did_you_mean
from trainer.errors import EXIT_DONE, EXIT_USAGE
from trainer.runtime.environment import call
from trainer.runtime.log import escape_unprintable


def main(argv: list[str] | None = None, *, is_program: bool = False) -> int:
    """Run a command and return its exit code.

    `is_program`: the command may set up the log and the signals of this process. The console script
    passes no arguments, which implies `is_program`.
    """
    is_program |= argv is None
    if is_program:
        escape_unprintable()
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(f"usage: {call('COMMAND …')}   (each has --help)\n\n{listing()}")
        return EXIT_DONE
    if argv[0] == "--version":
        print(trainer.__version__)
        return EXIT_DONE
    name, *words = argv
    if name not in COMMANDS:
        hint = did_you_mean(name, COMMANDS)
        known = hint or f"commands are {', '.join(COMMANDS)}"
        print(f"ERROR: unknown command '{name}'; {known}", file=sys.stderr)
        return EXIT_USAGE
    place = "trainer.launch.__main__" if name == TRAIN else f"trainer.cli.{name}"
    module = importlib.import_module(place)
    if is_program and hasattr(module, "set_up"):
        module.set_up(words)
    return int(module.main(words))


if __name__ == "__main__":
    sys.exit(main())
