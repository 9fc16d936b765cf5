# ruff: noqa: N999, a command's file is named as the command
"""Files of verl, TRL, axolotl and LLaMA-Factory as a recipe: `bash run_sft.sh import FILE` (floor 5, no torch).

Exit codes: 0 imported, 2 wrong usage or a file that cannot be read, 73 cannot write.
"""

import sys
from pathlib import Path

from trainer.cli.arguments import Parser, as_command, write_file
from trainer.config import ConfigError
from trainer.errors import EXIT_DONE
from trainer.import_config.rules import BECAME, Answer, ForeignSetting
from trainer.import_config.translation import NEEDED, PEERS, Translation, check, import_file, recipe
from trainer.runtime.environment import call

SHOWN = 60  # characters of a value


@as_command()
def main(argv: list[str]) -> int:
    about = "Make a recipe of another trainer's configuration, and say line by line what became of it."
    parser = Parser("import", description=about)
    about = "a YAML file, or a script that launches verl, trl or llamafactory-cli with its settings as words"
    parser.add_argument("file", metavar="FILE", type=Path, help=about)
    about = "ranks it was started on, on all machines together: the batch of these trainers is that of one rank"
    parser.add_argument("num_ranks", metavar="N", nargs="?", type=int, help=about)
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, help="write the recipe there; default: print it")
    parser.add_argument("--from", dest="name", choices=PEERS, help="whose it is, where the file does not show that")
    about = "mean length of a row in tokens: how many rows a batch of packed sequences holds"
    parser.add_argument("--mean-tokens", metavar="X", type=float, help=about)
    options = parser.parse_args(argv)
    for name in ("num_ranks", "mean_tokens"):
        if (value := getattr(options, name)) is not None and not value > 0:
            raise ConfigError(f"{name.replace('_', ' ')} must be positive, got {value}")
    found = import_file(options.file, name=options.name, num_ranks=options.num_ranks, mean_tokens=options.mean_tokens)
    print("\n".join(table(found)))
    check(found.words)
    command = call(f"train {found.num_ranks or 'N'} experiment={options.output or 'FILE.yaml'}")
    text = recipe(found, name=options.file.stem, command=command)
    if options.output is None:
        print(f"\n{text}", end="")
    else:
        write_file(options.output, text)
        print(f"start it: {command}")
    if missing := [key for key in NEEDED if found.words[key] is None]:
        print(f"before it starts it needs: {', '.join(f'{key}=…' for key in missing)}")
    return EXIT_DONE


def table(found: Translation) -> list[str]:
    """A line for each setting of the file and each default that matters, and how many of each kind."""
    lines = [f"{found.peer}'s settings, and what became of them:"]
    lines += [_line(f"{setting.line:>4}", setting, answer) for setting, answer in found.rows if setting.line]
    silent = [(setting, answer) for setting, answer in found.rows if setting.line is None]
    if silent:
        lines.append(f"what {found.peer} does where the file is silent:")
        lines += [_line("   -", setting, answer) for setting, answer in silent]
    kinds = [answer.kind for setting, answer in found.rows if setting.line]
    lines.append(", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds)))
    return lines


def _line(place: str, setting: ForeignSetting, answer: Answer) -> str:
    words = " ".join(f"{key}={'null' if value is None else value}" for key, value in answer.words.items())
    text = f"({answer.text})" if answer.text and words else answer.text
    arrow = "->" if words else ""
    kind = "" if answer.kind == BECAME and words else f"{answer.kind}:" if words or text else answer.kind
    said = " ".join(part for part in (kind, arrow, words, text) if part)
    given = "" if setting.value is None else f"={setting.value}"
    shown = given if len(given) <= SHOWN else f"{given[:SHOWN]}…"
    return f"{place}  {setting.key}{'' if setting.key == setting.value else shown}  {said}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
