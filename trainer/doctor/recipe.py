"""What is looked at of a configuration: files, rows, model, memory, disk, what it would continue from (floor 5).

torch is imported only by what needs it.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from trainer.checkpoint import fsio, layout
from trainer.checkpoint.space import SPARE, existing_parent, readable
from trainer.data.rows import UnusableError, location
from trainer.doctor.checked import Check, Checked, Launch
from trainer.run import preflight
from trainer.run.compose import with_words
from trainer.runtime.file_lock import try_lock
from trainer.runtime.live_run import is_live
from trainer.tracking import wandb_backend
from trainer.tracking.facade import with_environment

NUM_SHOWN, SHOWN_CHARS = 3, 120


def _ask(name: str, launch: Launch) -> Iterator[Checked]:
    preflight.CHECKS[name](launch.config)
    return iter(())


PREFLIGHT: dict[str, Check] = {name: partial(_ask, name) for name in preflight.CHECKS}


def files(launch: Launch) -> Iterator[Checked]:
    found = preflight.find_files(launch.config)
    for side, sources in (("train", found.train), ("validation", found.validation)):
        paths = [path for _, files in sources for path in files]
        size = readable(sum(path.stat().st_size for path in paths))
        yield Checked("ok", f"{side}: {len(paths)} files, {size}" if paths else f"{side}: no files of its own")


def directories(launch: Launch) -> Iterator[Checked]:
    """Every kind of operation that a save, a lock and a cache need, tried where they will happen."""
    config = launch.config
    yield from _tried("trainer.default_local_dir", Path(config.trainer.default_local_dir))
    yield from _tried("data.cache_dir", Path(config.data.cache_dir), needs_links=bool(config.model.new_tokens))


def _tried(key: str, directory: Path, *, needs_links: bool = False) -> Iterator[Checked]:
    try:
        with TemporaryDirectory(prefix=".sft-", dir=existing_parent(directory)) as name:
            made = Path(name)
            for data in (b"old", b"new"):  # synced, and moved over what is there
                fsio.atomic_write(made / "file", data)
            fsio.make_dir(made / "staged")
            fsio.rename(made / "staged", made / "final")
            if needs_links:
                (made / "link").symlink_to(made / "file")
            with (made / "file").open("ab") as file:  # NFS locks exclusively only what is open for writing
                has_locks = try_lock(file.fileno())
    except OSError as error:
        yield Checked("fail", f"{key}={directory}: {error}", "choose a directory that can be written, on another disk")
        return
    if has_locks is False:
        what = f"{key}={directory} is on a file system without locks: a killed run is waited for, work is done twice"
        yield Checked("warn", what, "choose another, or mount it with locks (NFS: no `nolock`; Lustre: `flock`)")


def resume(launch: Launch) -> Iterator[Checked]:
    run_dir = Path(launch.config.trainer.default_local_dir)
    if is_live(run_dir):
        fix = "wait for it or stop it, or choose another trainer.experiment_name"
        yield Checked("fail", f"{run_dir} is being trained in", fix)
    found = preflight.find_candidates(launch.config)
    for note in found.notes:
        _, is_worry, text = note.rpartition("WARNING: ")
        fix = "look at it with `checkpoint ls` before it goes on" if is_worry else ""
        yield Checked("warn" if is_worry else "ok", text, fix)
    chosen = found.chosen
    yield Checked("ok", f"{run_dir} is new" if chosen is None else f"continues from {chosen.path}")


def login(launch: Launch) -> Iterator[Checked]:
    if "wandb" not in with_environment(launch.config.trainer.logger):
        return
    try:
        wandb_backend.require_login()
    except Exception as error:  # wandb raises many kinds
        yield Checked("fail", f"wandb: {error}", "or train without it: USE_WANDB=false")


def architecture(launch: Launch) -> Iterator[Checked]:
    from trainer.model import packed_lm
    from trainer.run.inputs import require_trainable, source_without_weights

    config, source = launch.config, source_without_weights(launch.config)
    reason, found = require_trainable(config, source), packed_lm.read_config(source)
    name = ", ".join(getattr(found, "architectures", None) or [found.model_type])
    how = "packed" if reason is None else f"one by one (slower): {reason}"
    yield Checked("ok", f"{name}: documents run {how}")
    longest, key = getattr(found, "max_position_embeddings", None), "data.max_length"
    if isinstance(longest, int) and config.data.max_length > longest:
        what = f"{key}={config.data.max_length}, but its config.json names {longest} positions: engines serve no more"
        yield Checked("warn", what, f"{key}={longest}, or a config.json with the scaling that it is to be served with")
    if getattr(found, "auto_map", None):
        what = "code comes with the model (auto_map in config.json): engines load its export only if told to trust it"
        yield Checked("warn", what, "give the engine its flag (vLLM: --trust-remote-code)")
    for note in packed_lm.notes(found):
        yield Checked("ok", note)


def rows(launch: Launch) -> Iterator[Checked]:
    """The first row of each file, through template and tokenizer."""
    from trainer.data.preview import preview
    from trainer.run.inputs import source_without_weights
    from trainer.run.prepared_data import encode_first_rows

    config, described = launch.config, False
    is_strict = config.data.on_bad_row == "error"
    found = encode_first_rows(config, preflight.find_files(config), source_without_weights(config))
    for row, result, tokenizer in found:
        place = location(row.file, row.line)
        if isinstance(result, UnusableError):
            fix = "mend it, or leave such rows out with data.on_bad_row=skip" if is_strict else "it is left out"
            yield Checked("fail" if is_strict else "warn", f"{place}: {result}", fix)
        elif result and not described:
            described, sample = True, result[0]
            shown = " ".join(preview(sample.input_ids, sample.loss_mask, tokenizer, color=False).split())
            yield Checked("ok", f"{place}, its end, with what is supervised in [[ ]]: …{shown[-SHOWN_CHARS:]}")


def cache(launch: Launch) -> Iterator[Checked]:
    from trainer.data.token_cache import NotPreparedError
    from trainer.data_tools.stats import validation_in_train
    from trainer.run.inputs import prepare_data_alone

    try:
        data = prepare_data_alone(launch.config, only_cached=True)
    except NotPreparedError:
        yield Checked("ok", "not prepared yet: the first start does it, or `data stats` now")
        return
    yield Checked("ok", f"prepared: {len(data.train)} samples, {len(data.validation or ())} for validation")
    if (found := validation_in_train(data)) and found["count"]:
        places = "; ".join(f"{where} equals {other}" for where, other in found["places"][:NUM_SHOWN])
        what = f"{found['count']} of {found['num_samples']} samples of validation are trained on: {places}"
        yield Checked("warn", what, "take them out of one side: val/loss is too good with them")


def memory_and_disk(launch: Launch) -> Iterator[Checked]:
    from trainer.planner.disk import plan_disk
    from trainer.planner.forecast import GIB, Change, default_memory_gib, forecaster

    config, num_ranks = launch.config, launch.num_ranks_together
    if config.automatic:
        from trainer.planner.choose import automatic

        config = with_words(config, automatic(config, num_ranks))
    memory_gib = default_memory_gib(config, num_ranks)
    found = forecaster(config, memory_gib)(Change(num_ranks))
    where = "a card" if launch.num_gpus else "a rank's share here" if not found.is_cuda else "a card, none being here"
    takes = f"{found.needed_gib:.1f} GiB a rank, of {memory_gib:.1f} of {where} (predicted)"
    fix = "`plan` with the same words names the smallest change that fits"
    yield Checked("ok", takes) if found.fits else Checked("fail", f"takes {takes}", fix)
    host_bytes, total_bytes = found.host_gib * launch.num_ranks * GIB, psutil.virtual_memory().total
    if launch.num_gpus and host_bytes > total_bytes:
        what = f"{readable(host_bytes)} of host memory are needed, and this machine has {readable(total_bytes)}"
        yield Checked("fail", what, "trainer.checkpoint.async_save=false, or more ranks on more machines")
    disk, run_dir = plan_disk(config, found.plan), Path(config.trainer.default_local_dir)
    one, to_come = disk.checkpoint_bytes, max(1, (disk.num_checkpoints or 1) - len(layout.committed(run_dir)))
    yield _room(run_dir, one, one * to_come, f"{to_come} checkpoints of {readable(one)}")
    tokens = disk.token_bytes or 0  # which may be there already
    yield _room(Path(config.data.cache_dir), 0, tokens, f"up to {readable(tokens)} of prepared tokens")


def _room(directory: Path, least_bytes: int, most_bytes: int, what: str) -> Checked:
    free_bytes = fsio.free_bytes(existing_parent(directory))
    what = f"{directory}: {what} to come, {readable(free_bytes)} free"
    if free_bytes >= most_bytes * SPARE:
        return Checked("ok", what)
    fix = "free some space, choose another disk, or lower trainer.max_ckpt_to_keep"
    return Checked("fail" if free_bytes < least_bytes * SPARE else "warn", what, fix)
