"""`fsdp-sft COMMAND …`, the same as `bash run_sft.sh COMMAND …` in a checkout (floor 5, no torch)."""

import importlib
import sys

import trainer
from trainer.config import did_you_mean
from trainer.errors import EXIT_DONE, EXIT_USAGE
from trainer.runtime.environment import call

TRAIN = "train"
GROUPS = {
    "before a run": {
        "import": ("a recipe from verl's, TRL's, axolotl's or LLaMA-Factory's file", "theirs.yaml 8 -o mine.yaml"),
        "doctor": ("machine, disk, data, model and resume, each line with its fix", "8 experiment=mine"),
        "plan": ("what a run needs and takes, and which override makes it fit", "8 experiment=mine"),
        "data": ("what is trained: samples with masks, statistics, a comparison", "preview experiment=mine"),
    },
    "a machine": {
        "accept": ("a verdict for each line: kernels, ranks, resume, memory, speed", "8 experiment=mine"),
    },
    "a run": {
        TRAIN: ("train, or go on where a run ended", "8 experiment=mine optim.lr=1e-5"),
        "watch": ("how a run stands, while it trains or after it", "checkpoints/mine/first"),
        "report": ("what happened in runs, from their logs; --html writes the page", "checkpoints/mine/first"),
        "diagnose": ("the report as JSON, its verdict as exit code", "checkpoints/mine/first"),
        "compare": ("runs side by side", "checkpoints/mine/first checkpoints/mine/second"),
        "metrics": ("what the metrics mean", "train/loss"),
        "resend": ("one clean tracker run from a run directory", "checkpoints/mine/first --to wandb"),
        "workspace": ("panels in W&B for a project, in sections by what they show", "mine --entity team"),
        "replay": (
            "steps trained again without some of their rows: what changes",
            "checkpoints/mine/first --from 100 --steps 20 --without train.jsonl:7",
        ),
    },
    "checkpoints": {
        "checkpoint": ("list, prove, delete and export them; verify-resume proves a recipe", "ls checkpoints"),
        "prove": ("whether an export serves the loss its step was validated with", "checkpoints/mine/first"),
        "evaluate": ("score what they write: text, numbers, programs", "checkpoints/mine/first --score exec --watch"),
    },
}
"""By group and name: what a command does, and words to call it with."""
COMMANDS = [name for group in GROUPS.values() for name in group]


def listing() -> str:
    """Every command, with an example."""
    lines = []
    for group, commands in GROUPS.items():
        lines.append(f"{group}:")
        for name, (about, example) in commands.items():
            lines += [f"  {name:10}  {about}", f"  {'':10}    {call(f'{name} {example}')}"]
    return "\n".join(lines)


def main(argv: list[str] | None = None, *, is_program: bool = False) -> int:
    """`is_program`: the log and the signals of this process are the command's to set. The console script passes
    neither words nor this.
    """
    is_program |= argv is None
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(f"usage: {call('COMMAND …')}   (each has --help)\n\n{listing()}")
        return EXIT_DONE
    if argv[0] == "--version":
        print(trainer.__version__)
        return EXIT_DONE
    if argv[0] not in COMMANDS:
        hint = did_you_mean(argv[0], COMMANDS)
        print(f"ERROR: there is no command '{argv[0]}'{hint and f': {hint}'}\n{listing()}", file=sys.stderr)
        return EXIT_USAGE
    module = importlib.import_module("trainer.launch.__main__" if argv[0] == TRAIN else f"trainer.cli.{argv[0]}")
    if is_program and hasattr(module, "set_up"):
        module.set_up(argv[1:])
    return int(module.main(argv[1:]))


if __name__ == "__main__":
    sys.exit(main())
