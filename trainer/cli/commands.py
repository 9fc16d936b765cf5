"""Every command, with its description and example arguments."""

from trainer.runtime.environment import call

TRAIN = "train"
GROUPS = {  # by group and name: a description, and example arguments
    "before a run": {
        "doctor": (
            "machine, disk, data and model, each line with its fix; --run trains",
            "8 experiment=mine",
        ),
        "plan": ("memory and disk of a run, and which override makes it fit", "8 experiment=mine"),
        "data": ("show samples with their masks, or count them", "preview experiment=mine"),
    },
    "a run": {
        TRAIN: ("train, or continue a run", "8 experiment=mine optim.lr=1e-5"),
        "report": (
            "verdict and findings of runs, from their logs",
            "checkpoints/mine/first --html report.html",
        ),
    },
    "checkpoints": {
        "checkpoint": ("list, verify, delete and export them", "ls checkpoints"),
        "mirror": ("bring the mirror of a run up to date", "checkpoints/mine/first"),
        "prove": (
            "check that an export serves the loss its step was validated with",
            "checkpoints/mine/first",
        ),
        "evaluate": (
            "score generated answers: text, numbers, programs",
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
