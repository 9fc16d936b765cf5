"""Every command, with its description and example arguments."""

from trainer.runtime.environment import call

TRAIN = "train"
GROUPS = {  # {group: {name: (description, example arguments)}}
    "before a run": {
        "doctor": (
            "check machine, disk, data and model, and print a fix for each problem; --run also trains",
            "8 experiment=mine",
        ),
        "plan": (
            "estimate the memory and disk space that a run needs, and what would make it fit",
            "8 experiment=mine",
        ),
        "data": ("show samples with their loss masks, or count them", "preview experiment=mine"),
    },
    "a run": {
        TRAIN: ("train, or resume a run", "8 experiment=mine optim.lr=1e-5"),
        "report": (
            "print a verdict on runs and their problems, from their logs",
            "checkpoints/mine/first --html report.html",
        ),
    },
    "checkpoints": {
        "checkpoint": ("list, verify, delete or export checkpoints", "ls checkpoints"),
        "mirror": (
            "upload checkpoints that are missing from a run's mirror",
            "checkpoints/mine/first",
        ),
        "prove": (
            "check that an export, when served, reproduces the validation loss of its step",
            "checkpoints/mine/first",
        ),
        "evaluate": (
            "score generated answers as text, numbers or programs",
            "checkpoints/mine/first --score numeric --watch",
        ),
    },
}
COMMANDS = {name: entry for group in GROUPS.values() for name, entry in group.items()}


def listing() -> str:
    """Return a line for every command, with an example."""
    lines = []
    for group, commands in GROUPS.items():
        lines.append(f"{group}:")
        for name, (about, example) in commands.items():
            lines += [f"  {name:10}  {about}", f"{'':16}{call(f'{name} {example}')}"]
    return "\n".join(lines)
