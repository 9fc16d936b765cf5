"""List, verify, delete and export checkpoints from outside the run.

Only `export` imports torch, so that the other commands answer at once. Exit codes: 0 all good, 1
something is damaged, 2 wrong usage or a run that still holds the directory, 73 cannot write or
delete, 130 interrupted.
"""

import argparse
import json
import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from trainer.checkpoint import choice, fsio, layout, retention
from trainer.checkpoint.layout import ASIDE_PREFIXES
from trainer.checkpoint.lock import RunLock
from trainer.cli import listing
from trainer.cli.arguments import Parser, as_command, at_least, named_path
from trainer.config import DTYPES
from trainer.errors import EXIT_CRASH, EXIT_DONE, CannotWriteError
from trainer.runtime.files import tree_bytes
from trainer.runtime.text import readable

AT_ONCE = ("ls", "verify", "prune")
"""Commands that end at the first signal; the next start finishes an interrupted deletion. `export`
cleans up instead.
"""


LOCK_TIMEOUT_S = 1.0


def set_up(argv: list[str]) -> None:
    """Set up the log and the signals of this process."""
    logging.basicConfig(format="%(levelname)s: %(message)s")
    if argv and argv[0] in AT_ONCE:
        for number in (signal.SIGINT, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)


@as_command({OSError: EXIT_CRASH})
def main(argv: list[str]) -> int:
    arguments = _parser().parse_args(argv)
    return int(arguments.run(arguments))


def _parser() -> argparse.ArgumentParser:
    """Build the parser. Each command stores its function as `run`."""
    parser = Parser("checkpoint", description="List, verify, delete and export checkpoints.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def add(name: str, run: Callable[[argparse.Namespace], int], about: str) -> Parser:
        command: Parser = commands.add_parser(name, help=about, description=about)
        command.set_defaults(run=run)
        return command

    ls = add(
        "ls",
        _ls,
        "list checkpoints and leftovers, and mark the checkpoint to resume from; works during a run",
    )
    ls.add_argument(
        "directory",
        metavar="RUN_DIR",
        nargs="?",
        type=named_path,
        help=f"a run directory, or a directory that contains runs (default: {listing.RUNS_ROOT})",
    )
    ls.add_argument("--json", action="store_true", help="print one JSON object")

    verify = add(
        "verify",
        _verify,
        "compare every byte of checkpoints with their manifests; exit code 1 if any of them is "
        "damaged",
    )
    verify.add_argument(
        "paths",
        metavar="PATH",
        nargs="+",
        type=named_path,
        help="a run directory or a global_step_<step>",
    )

    prune = add(
        "prune",
        _prune,
        "delete old checkpoints and leftovers, but never the checkpoint to resume from, which is "
        "verified first; refused while the run trains",
    )
    prune.add_argument("run_dir", metavar="RUN_DIR", type=named_path)
    prune.add_argument(
        "--keep",
        metavar="N",
        type=at_least(1),
        required=True,
        help="keep the newest N, and the checkpoint that the pointer names",
    )
    prune.add_argument(
        "--corrupt", action="store_true", help="also delete checkpoints that were set aside"
    )
    prune.add_argument(
        "--yes",
        action="store_true",
        help="delete; without this option, only list what would be deleted",
    )

    export = add(
        "export",
        _export,
        "create a directory for transformers and vLLM from the shards, with tokenizer and chat "
        "template; needs no GPU and works while the run trains",
    )
    export.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        type=named_path,
        help="a global_step_<step>, or a run directory, for the checkpoint to resume from",
    )
    export.add_argument(
        "target",
        metavar="TARGET",
        type=named_path,
        help="the new directory; its parent must exist",
    )
    export.add_argument(
        "--dtype",
        choices=DTYPES,
        default="bfloat16",
        help="dtype of the weights (default: %(default)s)",
    )
    export.add_argument(
        "--lora",
        choices=("adapter", "merged"),
        help="for a LoRA run: export the adapter or the merged model (default: merged)",
    )
    export.add_argument(
        "--base",
        metavar="DIR",
        type=named_path,
        help="the base model of a LoRA adapter (default: its path during training)",
    )
    return parser


def _show(*lines: str) -> None:
    print("\n".join(map(listing.printable, lines)), flush=True)


def _ls(arguments: argparse.Namespace) -> int:
    """Print a table, or JSON, of the checkpoints of one run or of all runs under a directory."""
    root = arguments.directory or listing.RUNS_ROOT
    listing.require_dir(root)
    run_dirs = [root] if listing.is_run(fsio.list_dir(root)) else list(listing.runs_below(root))
    if not run_dirs and arguments.directory:
        listing.require_run(root)
    runs = [listing.read_run(run_dir) for run_dir in run_dirs]
    if arguments.json:
        print(json.dumps({"runs": runs}, indent=1))
        return EXIT_DONE
    for number, run in enumerate(runs):
        if number:
            print()
        _show(*listing.as_lines(run))
    if not runs:
        print(f"there are no runs in '{root}' yet")
    return EXIT_DONE


def _verify(arguments: argparse.Namespace) -> int:
    """Print a line for each checkpoint. If rotation deletes one during the check, that does not count as
    damage.
    """
    code = EXIT_DONE
    paths = [checkpoint for path in arguments.paths for checkpoint in listing.checkpoints_at(path)]
    for path in paths:
        problems = listing.prove(path)
        if not problems:
            _show(f"ok      {path}  {readable(tree_bytes(path))}")
        elif path not in arguments.paths and not os.path.lexists(path):
            _show(f"gone    {path}  deleted during this check")
        else:
            code = EXIT_CRASH
            _show(f"FAILED  {path}", *(f"        {problem}" for problem in problems))
    return code


def _prune(arguments: argparse.Namespace) -> int:
    """Print the checkpoints and leftovers to delete, and delete them with `--yes`, while holding the
    run's lock.

    Keeps the newest `--keep` checkpoints and the checkpoint to resume from. Raises `ConfigError` if
    no checkpoint is usable, because then the leftovers may be all that remains.
    """
    run_dir = arguments.run_dir
    listing.require_run(run_dir)
    lock = RunLock(run_dir)
    lock.acquire(timeout_s=LOCK_TIMEOUT_S)
    try:
        chosen = choice.select(run_dir).chosen
        protect = {chosen.step} if chosen else set()
        old = retention.checkpoints_to_delete(run_dir, keep=arguments.keep, protect=protect)
        kept = [info for info in layout.checkpoints(run_dir) if info.path not in old]
        leftovers = layout.leftovers(run_dir)
        if arguments.corrupt:
            leftovers += [
                name for name in fsio.list_dir(run_dir) if name.startswith(ASIDE_PREFIXES)
            ]
        to_delete = [*old, *(run_dir / name for name in leftovers)]
        sizes_bytes = {path: tree_bytes(path) for path in to_delete}
        names = [
            info.path.name if info.manifest else f"{info.path.name} (incomplete)" for info in kept
        ]
        _show(f"{run_dir} keeps {', '.join(names) or 'no checkpoint'}")
        verb = "delete" if arguments.yes else "would delete"
        for path, size_bytes in sizes_bytes.items():
            _show(f"  {verb} {path.name}  {readable(size_bytes)}")
        total = readable(sum(sizes_bytes.values()))
        if not arguments.yes:
            print(f"{total} in total; add --yes to delete")
            return EXIT_DONE
        committed = [info for info in kept if info.manifest]
        for info in committed:
            if info is committed[-1] or info.step in protect:
                _require_whole(info.path)
        if left := [path.name for path in to_delete if not layout.delete(path)]:
            raise CannotWriteError(f"cannot delete (reasons above): {', '.join(left)}")
        print(f"deleted {total}")
    finally:
        lock.release()
    return EXIT_DONE


def _require_whole(checkpoint: Path) -> None:
    """Raise `OSError` if anything but the export is damaged. Resuming does not need the export."""
    problems = listing.prove(checkpoint)
    if damage := [problem for problem in problems if not layout.is_export(problem)]:
        raise OSError(
            f"nothing was deleted, because '{checkpoint}' is damaged: {'; '.join(damage)}.\n"
            "Fix: start the run (it sets the checkpoint aside and continues from an older one) "
            "or move it away, then prune again"
        )


def _export(arguments: argparse.Namespace) -> int:
    """Export one checkpoint. Imports torch."""
    checkpoint, notes = listing.checkpoint_to_export(arguments.checkpoint)
    _show(*notes, f"exporting {checkpoint} as {arguments.dtype}")
    started = time.perf_counter()
    target = arguments.target
    from trainer.checkpoint.offline_export import export_from_shards

    export_from_shards(
        checkpoint,
        target,
        dtype=arguments.dtype,
        lora=arguments.lora,
        base=arguments.base,
    )
    size = readable(tree_bytes(target))
    _show(f"wrote {target}  {size}, {time.perf_counter() - started:.1f} s")
    return EXIT_DONE
