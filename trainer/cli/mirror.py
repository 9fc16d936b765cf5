"""Bring the mirror of a run up to date: `bash run_sft.sh mirror RUN_DIR`.

Exit codes: 0 up to date, 1 the storage failed, 2 wrong usage or the run trains now.
"""

from dataclasses import replace
from pathlib import Path

from trainer.cli import listing
from trainer.cli.arguments import Parser, as_command
from trainer.config import ConfigError, parse_recorded
from trainer.errors import EXIT_CRASH, EXIT_DONE
from trainer.runtime.heartbeat import is_live
from trainer.tracking.run_info import read_config


@as_command({OSError: EXIT_CRASH})
def main(argv: list[str]) -> int:
    parser = Parser(
        "mirror",
        description="Upload missing checkpoints to the mirror of a run. A run does this automatically; "
        "use this command if some were missing when it ended.",
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path)
    run_dir: Path = parser.parse_args(argv).run_dir
    listing.require_run(run_dir)
    trainer = replace(parse_recorded(read_config(run_dir)).trainer, default_local_dir=str(run_dir))
    if trainer.checkpoint.mirror is None:
        raise ConfigError(
            f"the run in '{run_dir}' has no mirror.\n"
            f"Fix: start the run once with trainer.checkpoint.mirror=<URL>"
        )
    if is_live(run_dir):
        raise ConfigError(f"the run in '{run_dir}' is still training and updates the mirror itself")
    from trainer.checkpoint.storage import Storage, StorageError
    from trainer.tools.mirror.restore import prepare
    from trainer.tools.mirror.upload import Uploader

    try:
        storage = Storage(trainer.checkpoint.mirror)
        prepare(trainer, storage)
        Uploader(trainer, storage).sync()
    except StorageError as error:
        raise OSError(str(error)) from error
    print(listing.printable(listing.mirror_line(listing.mirror_of(run_dir)).strip()))
    return EXIT_DONE
