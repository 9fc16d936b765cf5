"""Look after checkpoints from outside the run: list, verify, delete and export them (floor 5).

Imports no torch, so that an answer is there at once; `export` does when it begins. Exit codes: 0
all good, 1 something is damaged, 2 wrong usage or a run in the way, 73 cannot write or delete, 130
interrupted.
"""

import argparse
import json
import logging
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

from trainer.adapter_names import ADAPTER_CONFIG
from trainer.checkpoint import fsio
from trainer.checkpoint_tools import listing
from trainer.checkpoint_tools.listing import plan_pruning, prune
from trainer.cli.arguments import CommandParser, Parser, as_command, at_least
from trainer.config import DTYPES, ConfigError, parse_config
from trainer.errors import EXIT_CRASH, EXIT_DONE, EXIT_RESUMABLE, ResumableError
from trainer.mirror import STATE
from trainer.model.source import find_model
from trainer.runtime.files import tree_bytes
from trainer.runtime.heartbeat import is_live
from trainer.runtime.json_lines import read_object
from trainer.runtime.text import readable
from trainer.tracking.run_info import read_config

AT_ONCE = ("ls", "verify", "prune")
"""End at the first signal: the next start removes what is half deleted. The others clean up
behind themselves.
"""


def set_up(argv: list[str]) -> None:
    """Of the process whose command this is."""
    logging.basicConfig(format="%(levelname)s: %(message)s")
    if argv and argv[0] in AT_ONCE:
        for number in (signal.SIGINT, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)


@as_command({OSError: EXIT_CRASH, ResumableError: EXIT_RESUMABLE})
def main(argv: list[str]) -> int:
    arguments = _parser().parse_args(argv)
    return int(arguments.run(arguments))


def _parser() -> argparse.ArgumentParser:
    """Each command names its function: from the parsed arguments to the exit code."""
    about = "List, verify, delete and export checkpoints."
    parser = Parser("checkpoint", description=about)
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=CommandParser)

    about = "list checkpoints and leftovers, and which one a resume takes"
    command = commands.add_parser(
        "ls", help=about, description=f"{about}; judged by names and sizes, also during a run"
    )
    where = f"a run directory, or one with runs below it (default: {listing.RUNS_ROOT})"
    command.add_argument("directory", metavar="RUN_DIR", nargs="?", type=_path, help=where)
    command.add_argument("--json", action="store_true", help="print one JSON object")
    command.set_defaults(run=_ls)

    about = "read checkpoints whole and compare them with their manifests"
    command = commands.add_parser(
        "verify", help=about, description=f"{about}; exit code 1 if any is damaged"
    )
    command.add_argument(
        "paths",
        metavar="PATH",
        nargs="+",
        type=_path,
        help="a run directory or a global_step_<step>",
    )
    command.set_defaults(run=_verify)

    about = "delete old checkpoints and leftovers; without --yes only say which"
    rule = "The checkpoint a resume takes stays, and is proven before anything goes. Refused while the run trains."
    command = commands.add_parser("prune", help=about, description=f"{about}. {rule}")
    command.add_argument("run_dir", metavar="RUN_DIR", type=_path)
    about = "the newest N stay, and the pointer's"
    command.add_argument("--keep", metavar="N", type=at_least(1), required=True, help=about)
    command.add_argument(
        "--corrupt", action="store_true", help="delete what was set aside as damaged, too"
    )
    command.add_argument("--yes", action="store_true", help="delete")
    command.set_defaults(run=_prune)

    _add_ways_out(commands)
    return parser


def _add_ways_out(commands: "argparse._SubParsersAction[CommandParser]") -> None:
    """Commands that bring a checkpoint elsewhere."""
    about = "make a directory for transformers and vLLM from the shards"
    rule = (
        "The export has weights in the chosen dtype, the tokenizer and the chat template of the "
        "training. Needs no GPU and may run beside a training."
    )
    command = commands.add_parser("export", help=about, description=f"{about}. {rule}")
    where = "a global_step_<step>, or a run directory: then the one a resume takes"
    command.add_argument("checkpoint", metavar="CHECKPOINT", type=_path, help=where)
    command.add_argument(
        "target", metavar="TARGET", type=_path, help="the new directory; its parent must exist"
    )
    command.add_argument(
        "--dtype", choices=DTYPES, default="bfloat16", help="of the weights (default: %(default)s)"
    )
    about = (
        "of LoRA adapters: the adapter, the model with what it adds, or both (default: %(default)s)"
    )
    command.add_argument(
        "--lora", choices=("adapter", "merged", "both"), default="merged", help=about
    )
    about = "of LoRA adapters: the directory of the model they were trained for (default: where it was then)"
    command.add_argument("--base", metavar="DIR", type=_path, help=about)
    command.set_defaults(run=_export)

    about = "bring the mirror of a run up to what its directory holds"
    rule = "A run does so by itself; this is for what was not up when it ended. Refused while the run trains."
    command = commands.add_parser("mirror", help=about, description=f"{about}. {rule}")
    command.add_argument("run_dir", metavar="RUN_DIR", type=_path)
    command.set_defaults(run=_mirror)


def _path(text: str) -> Path:
    """As given, but `.` and `..` written out: the name of a directory says what it is."""
    if not text:
        raise argparse.ArgumentTypeError("is empty (an unset variable?)")
    return Path(text) if Path(text).name not in ("", "..") else Path(os.path.abspath(text))


def _ls(arguments: argparse.Namespace) -> int:
    root = arguments.directory or listing.RUNS_ROOT
    listing.require_dir(root)
    run_dirs = [root] if listing.is_run(fsio.list_dir(root)) else list(listing.runs_below(root))
    if not run_dirs and arguments.directory:
        listing.require_run(root)
    runs = [listing.read_run(run_dir) for run_dir in run_dirs]
    if arguments.json:
        print(json.dumps({"runs": [listing.as_tree(run) for run in runs]}, indent=1))
    else:
        print(
            "\n\n".join("\n".join(listing.as_lines(run)) for run in runs)
            or f"no run below '{root}' yet"
        )
    return EXIT_DONE


def _verify(arguments: argparse.Namespace) -> int:
    code = EXIT_DONE
    for path in [
        checkpoint for given in arguments.paths for checkpoint in listing.checkpoints_at(given)
    ]:
        started, size_bytes = time.perf_counter(), tree_bytes(path)
        problems = listing.prove(path)
        rate = f"{size_bytes / 1e9 / (time.perf_counter() - started):.2f} GB/s"
        if not problems:
            lines = [f"ok      {path}  {readable(size_bytes)}, {rate}"]
        elif path not in arguments.paths and not os.path.lexists(path):
            lines = [f"gone    {path}  deleted meanwhile"]
        else:
            code, lines = (
                EXIT_CRASH,
                [f"FAILED  {path}", *(f"        {problem}" for problem in problems)],
            )
        print("\n".join(map(listing.printable, lines)), flush=True)
    return code


def _prune(arguments: argparse.Namespace) -> int:
    run_dir = arguments.run_dir
    pruning = plan_pruning(run_dir, keep=arguments.keep, is_corrupt_deleted=arguments.corrupt)
    sizes_bytes = {path: tree_bytes(path) for path in pruning.to_delete}
    lines = [f"{run_dir} keeps {', '.join(pruning.kept) or 'no checkpoint'}"]
    for path, size_bytes in sizes_bytes.items():
        verb = "delete" if arguments.yes else "would delete"
        lines.append(f"  {verb} {path.name}  {readable(size_bytes)}")
    if mirror := read_object(run_dir / STATE):
        lines.append(f"{listing.mirror_line(mirror)}; nothing is deleted there")
    print("\n".join(map(listing.printable, lines)), flush=True)
    total = readable(sum(sizes_bytes.values()))
    if not sizes_bytes or not arguments.yes:
        print(f"{total}; nothing is deleted without --yes" if sizes_bytes else "nothing to delete")
        return EXIT_DONE
    prune(pruning)
    print(f"deleted {total}")
    return EXIT_DONE


def _export(arguments: argparse.Namespace) -> int:
    (checkpoint, notes), target = (
        listing.checkpoint_to_export(arguments.checkpoint),
        arguments.target,
    )
    for note in notes:
        print(listing.printable(note))
    started = time.perf_counter()
    from trainer.checkpoint.offline_export import export_from_shards

    print(listing.printable(f"exporting {checkpoint} in {arguments.dtype}"), flush=True)
    base = _base(arguments.base, checkpoint)
    export_from_shards(checkpoint, target, dtype=arguments.dtype, lora=arguments.lora, base=base)
    size = readable(tree_bytes(target))
    print(listing.printable(f"wrote {target}  {size}, {time.perf_counter() - started:.1f} s"))
    return EXIT_DONE


def _mirror(arguments: argparse.Namespace) -> int:
    run_dir = arguments.run_dir
    listing.require_run(run_dir)
    trainer = replace(parse_config(read_config(run_dir)).trainer, default_local_dir=str(run_dir))
    if trainer.checkpoint.mirror is None:
        raise ConfigError(
            f"the run in '{run_dir}' has no mirror: start it once with "
            f"trainer.checkpoint.mirror=<URL>"
        )
    if is_live(run_dir):
        raise ConfigError(f"'{run_dir}' is being trained in: its own process keeps the mirror")
    from trainer.mirror.hub import storage_of, uploader_of
    from trainer.mirror.restore import prepare
    from trainer.mirror.storage import StorageError

    try:
        storage = storage_of(trainer.checkpoint.mirror)
        prepare(trainer, storage)
        uploader_of(trainer, storage).sync()
    except StorageError as error:
        raise OSError(str(error)) from error
    print(listing.printable(listing.mirror_line(read_object(run_dir / STATE)).strip()))
    return EXIT_DONE


def _base(given: Path | None, checkpoint: Path) -> Path | None:
    """The directory of the model that adapters were trained for, which may be in the Hub's
    cache.
    """
    settings = checkpoint / ADAPTER_CONFIG
    if given is not None or not settings.is_file():
        return given
    name = json.loads(settings.read_text(encoding="utf-8"))["base_model_name_or_path"]
    return Path(name) if Path(name).is_absolute() else Path(find_model(name, random_weights=False))


if __name__ == "__main__":
    set_up(sys.argv[1:])
    sys.exit(main(sys.argv[1:]))
