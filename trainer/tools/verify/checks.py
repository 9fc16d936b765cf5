"""The checks of `doctor`: the checks of every start, and some that take longer.

Only the checks that need torch import it.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from trainer.checkpoint import fsio
from trainer.checkpoint.retention import existing_parent
from trainer.config import ConfigError
from trainer.data.rows import UnusableError, location
from trainer.launch.checks import OF_CONFIG, OF_MACHINE, Check, Checked, Launch, architecture
from trainer.launch.requirements import unmet_requirements
from trainer.runtime.files import try_lock
from trainer.runtime.heartbeat import is_live
from trainer.runtime.text import readable
from trainer.tracking import wandb_backend
from trainer.tracking.facade import with_environment
from trainer.train.start import preflight

SHOWN_CHARS = 120
MIRROR_WITHIN_S = 10.0
MIN_FREE_SHARE = 0.9
"""Share of a GPU's memory that must be free; the driver uses some."""


def requirements(launch: Launch) -> Iterator[Checked]:
    """Check the installed packages against the requirements in pyproject.toml."""
    for text in unmet_requirements():
        yield Checked("fail", f"{text} is not installed here", f"pip install '{text}'")


def cards(launch: Launch) -> Iterator[Checked]:
    """Check the number of GPUs, their driver and their free memory."""
    if launch.problem is not None:
        yield Checked("fail", launch.problem)
        return
    if not launch.num_gpus:
        if launch.config.trainer.device == "cuda":
            what = "trainer.device=cuda, but this machine has no GPU"
            yield Checked("warn", what, "run doctor on the machine you will train on")
        else:
            yield Checked("ok", f"{launch.num_ranks} ranks would train on this machine's CPUs")
        return
    import torch

    numbers = range(launch.num_ranks)
    for number in numbers:
        free_bytes, total_bytes = torch.cuda.mem_get_info(number)
        if free_bytes < MIN_FREE_SHARE * total_bytes:
            what = f"another process is using GPU {number}; only {readable(free_bytes)} is free"
            fix = "end that process (see nvidia-smi), or choose GPUs with CUDA_VISIBLE_DEVICES"
            yield Checked("warn", what, fix)
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    names = ", ".join(sorted({torch.cuda.get_device_name(number) for number in numbers}))
    versions = f"torch {torch.__version__}, CUDA {torch.version.cuda}, NCCL {nccl}"
    yield Checked("ok", f"{names}; {versions}")


def directories(launch: Launch) -> Iterator[Checked]:
    """Try every operation that saves, locks and caches need, in the run directory and the cache
    directory.
    """
    trainer = launch.config.trainer
    needs_lock = trainer.checkpoint.require_lock
    yield from _tried("trainer.default_local_dir", trainer.default_local_dir, needs_lock=needs_lock)
    yield from _tried("data.cache_dir", launch.config.data.cache_dir, needs_lock=False)


def _tried(key: str, directory: str, *, needs_lock: bool) -> Iterator[Checked]:
    """Try the operations that checkpoints need in a directory: synced files, renames, locks. Report
    failures.
    """
    try:
        with TemporaryDirectory(prefix=".sft-", dir=existing_parent(Path(directory))) as name:
            made = Path(name)
            for data in (b"old", b"new"):  # synced, then replaced
                fsio.atomic_write(made / "file", data)
            fsio.make_dir(made / "staged")
            fsio.rename(made / "staged", made / "final")
            # NFS gives exclusive locks only on files that are open for writing
            with (made / "file").open("ab") as file:
                has_locks = try_lock(file.fileno())
    except OSError as error:
        fix = "choose a writable directory on another disk"
        yield Checked("fail", f"{key}={directory}: {error}", fix)
        return
    if has_locks is False:
        what = f"{key}={directory} is on a file system without locks: two processes may share it"
        fix = (
            "choose a different one, mount it with locks (NFS: no `nolock`; Lustre: `flock`), or accept it "
            "with trainer.checkpoint.require_lock=false"
        )
        yield Checked("fail" if needs_lock else "warn", what, fix)


def resume(launch: Launch) -> Iterator[Checked]:
    """Report the checkpoint from which the run would resume, and whether the run is training."""
    config = launch.config
    run_dir = Path(config.trainer.default_local_dir)
    if is_live(run_dir):
        fix = "wait for that run or stop it, or choose a new trainer.experiment_name"
        yield Checked("fail", f"a run is training in {run_dir}", fix)
    found = preflight.find_candidates(config)
    for note in found.notes:
        yield Checked("warn", note, "inspect it with `checkpoint ls` before the run continues")
    if found.chosen is None:
        yield Checked("ok", f"{run_dir} is a new run")
    else:
        yield Checked("ok", f"continues from {found.chosen.path}")


def login(launch: Launch) -> Iterator[Checked]:
    """Check for a Weights & Biases key. Without one, the run would prompt for a key after starting
    its ranks.
    """
    if "wandb" in with_environment(launch.config.trainer.logger):
        try:
            wandb_backend.require_login()
        except Exception as error:  # wandb raises many types
            yield Checked("fail", f"wandb: {error}", "log in, or train with USE_WANDB=false")


def mirror(launch: Launch) -> Iterator[Checked]:
    """List the mirror once. Only the start of a run tries to write to it."""
    url = launch.config.trainer.checkpoint.mirror
    if url is None:
        return
    from trainer.checkpoint.storage import (  # fsspec takes a moment to import
        StorageError,
        count_files,
    )

    try:
        num_files = count_files(url, within_s=MIRROR_WITHIN_S)
    except (ConfigError, StorageError) as error:
        fix = "check login, URL and network, or train with trainer.checkpoint.mirror=null"
        yield Checked("fail", str(error), fix)
    else:
        yield Checked("ok", f"{url} responds and has {num_files} files")


def rows(launch: Launch) -> Iterator[Checked]:
    """Render and tokenize the first row of each file, and show one row."""
    from trainer.data.formats import columns_of
    from trainer.data.readers import iter_rows
    from trainer.data.show import preview
    from trainer.train.start.inputs import Encoders, source_without_weights

    config = launch.config
    is_shown = False
    is_strict = config.data.on_bad_row == "error"
    encoders = Encoders(config, source_without_weights(config))
    files = preflight.find_files(config)
    for source, paths in (*files.train, *files.validation):
        encoder = encoders.row_encoder(source)
        columns = columns_of(source.keys)
        first_rows = [row for path in paths for row in islice(iter_rows(path, columns), 1)]
        for row in first_rows:
            place = location(row.file, row.line)
            try:
                result = encoder.encode(row)
            except UnusableError as error:
                fix = "repair the row; with data.on_bad_row=skip training skips it"
                yield Checked("fail" if is_strict else "warn", f"{place}: {error}", fix)
                continue
            if result and not is_shown:
                is_shown = True
                ids = result[0].input_ids
                mask = result[0].loss_mask
                text = " ".join(preview(ids, mask, encoder.tokenizer).split())
                end = text[-SHOWN_CHARS:]
                yield Checked(
                    "ok", f"the end of the sample at {place} (supervised text in [[ ]]): …{end}"
                )


CHECKS: dict[str, Check] = {
    "requirements": requirements,
    "cards": cards,
    **OF_MACHINE,
    **OF_CONFIG,
    "directories": directories,
    "resume": resume,
    "login": login,
    "mirror's answer": mirror,
    "architecture": architecture,
    "rows": rows,
}
NEEDS = {
    "resume": {"run directory", "files"},
    "login": {"requirements", "trackers"},
    "mirror's answer": {"requirements", "mirror"},
    "architecture": {"requirements", "model", "adapters"},
    "rows": {"requirements", "model", "template", "files"},
    "memory and disk": {"cards", "architecture"},
}
"""{check: checks it needs}. If a check fails, the checks that need it are skipped, because they
would only repeat the failure.
"""


def examine(
    checks: Mapping[str, Callable[[Any], Iterator[Checked] | Checked]],
    subject: Any,
    needs: Mapping[str, set[str]],
    broken: set[str],
) -> Iterator[tuple[str, Checked]]:
    """Yield the name and the findings of each check. Skip a check that needs one in `broken`. Add
    the names of failed and skipped checks to `broken`.
    """
    for name, check in checks.items():
        if missing := needs.get(name, set()) & broken:
            broken.add(name)
            yield name, Checked("skip", f"needs {', '.join(sorted(missing))}")
            continue
        try:
            found = check(subject)
            findings = [found] if isinstance(found, Checked) else list(found)
        except Exception as error:  # a run would end with the same error
            findings = [Checked("fail", str(error) or type(error).__name__)]
        for checked in findings or [Checked("ok", "no problem found")]:
            if checked.level == "fail":
                broken.add(name)
            yield name, checked
