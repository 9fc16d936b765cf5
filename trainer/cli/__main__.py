"""`python -m trainer.cli`: the commands there are (floor 5, no torch)."""

import sys

from trainer.errors import EXIT_DONE, EXIT_USAGE

COMMANDS = {
    "plan": "whether a run fits its memory, and which override makes it fit",
    "data": "what is trained: samples with masks, statistics, a comparison with other frameworks",
    "watch": "how a run stands, while it trains or after it",
    "report": "what happened in training runs, from their logs; --html writes the page",
    "diagnose": "the report as JSON, its verdict as exit code",
    "compare": "runs side by side",
    "checkpoint": "list, prove, delete and export checkpoints; verify-resume proves that a recipe resumes",
    "prove": "whether an export serves, in transformers or vLLM, the loss that its step was validated with",
    "metrics": "what the metrics mean",
    "replay": "steps of a run trained again without some of their rows: what changes",
    "resend": "one clean tracker run from a run directory",
}


def listing() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  python -m trainer.cli.{name:{width}}  {about}" for name, about in COMMANDS.items()]
    return "\n".join(["tools (each with --help):", *lines])


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(listing())
        return EXIT_DONE
    name = argv[0] if argv[0] in COMMANDS else "COMMAND"
    print(f"ERROR: a command is called as: python -m trainer.cli.{name}\n{listing()}", file=sys.stderr)
    return EXIT_USAGE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
