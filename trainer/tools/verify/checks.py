"""All checks of `doctor`: those that every start runs, and those that take longer (floor 5).

torch is imported only by the checks that need it.
"""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from trainer.checkpoint import fsio
from trainer.checkpoint.retention import existing_parent
from trainer.config import ConfigError
from trainer.data.rows import UnusableError, location
from trainer.errors import CannotWriteError, DataError
from trainer.launch.checks import OF_CONFIG, OF_MACHINE, Check, Checked, Launch, architecture
from trainer.launch.requirements import unmet_requirements
from trainer.run import preflight
from trainer.runtime.files import try_lock
from trainer.runtime.heartbeat import is_live
from trainer.runtime.processes import run_in
from trainer.runtime.text import readable
from trainer.tracking import wandb_backend
from trainer.tracking.facade import with_environment

NUM_SHOWN, SHOWN_CHARS = 3, 120
MIRROR_WITHIN_S = 10.0
MIN_FREE_SHARE = 0.9
"""Of a card's memory; its driver keeps some."""


def requirements(launch: Launch) -> Iterator[Checked]:
    for text in unmet_requirements():
        yield Checked("fail", f"{text} is not installed here", f"pip install '{text}'")


def cards(launch: Launch) -> Iterator[Checked]:
    if launch.problem is not None:
        yield Checked("fail", launch.problem)
    elif launch.num_gpus:
        yield from _cards(launch.num_ranks)
    elif launch.config.trainer.device == "cuda":
        yield Checked(
            "warn",
            "trainer.device=cuda, but there is no card here",
            "ask again on the machine that trains",
        )
    else:
        yield Checked("ok", f"{launch.num_ranks} ranks would train on this machine's CPUs")


def _cards(num_ranks: int) -> Iterator[Checked]:
    import torch

    for number in range(num_ranks):
        free_bytes, total_bytes = torch.cuda.mem_get_info(number)
        if free_bytes < MIN_FREE_SHARE * total_bytes:
            what = f"card {number} has {readable(free_bytes)} of {readable(total_bytes)} free: another process uses it"
            yield Checked(
                "warn",
                what,
                "end it (nvidia-smi lists it), or choose cards with CUDA_VISIBLE_DEVICES",
            )
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    names = ", ".join(sorted({torch.cuda.get_device_name(number) for number in range(num_ranks)}))
    yield Checked(
        "ok", f"{names}; torch {torch.__version__}, CUDA {torch.version.cuda}, NCCL {nccl}"
    )


def directories(launch: Launch) -> Iterator[Checked]:
    """Every kind of operation that a save, a lock and a cache need, tried where they will
    happen.
    """
    config = launch.config
    needs_lock = config.trainer.checkpoint.require_lock
    yield from _tried(
        "trainer.default_local_dir", Path(config.trainer.default_local_dir), needs_lock=needs_lock
    )
    yield from _tried(
        "data.cache_dir", Path(config.data.cache_dir), needs_links=bool(config.model.new_tokens)
    )


def _tried(
    key: str, directory: Path, *, needs_links: bool = False, needs_lock: bool = False
) -> Iterator[Checked]:
    try:
        with TemporaryDirectory(prefix=".sft-", dir=existing_parent(directory)) as name:
            made = Path(name)
            for data in (b"old", b"new"):  # synced, and moved over what is there
                fsio.atomic_write(made / "file", data)
            fsio.make_dir(made / "staged")
            fsio.rename(made / "staged", made / "final")
            if needs_links:
                (made / "link").symlink_to(made / "file")
            # NFS locks exclusively only what is open for writing
            with (made / "file").open("ab") as file:
                has_locks = try_lock(file.fileno())
    except OSError as error:
        yield Checked(
            "fail",
            f"{key}={directory}: {error}",
            "choose a directory that can be written, on another disk",
        )
        return
    if has_locks is False:
        what = f"{key}={directory} is on a file system without locks: two processes may do the same work there"
        fix = "choose another, or mount it with locks (NFS: no `nolock`; Lustre: `flock`)"
        accept = ", or accept it with trainer.checkpoint.require_lock=false" if needs_lock else ""
        yield Checked("fail" if needs_lock else "warn", what, fix + accept)


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
    if (chosen := found.chosen) is None:
        yield Checked("ok", f"{run_dir} is new")
    else:
        is_alone = launch.layout.num_nodes == 1
        message = preflight.already_complete(launch.config) if is_alone else None
        yield Checked("ok", message or f"continues from {chosen.path}")


def login(launch: Launch) -> Iterator[Checked]:
    if "wandb" not in with_environment(launch.config.trainer.logger):
        return
    try:
        wandb_backend.require_login()
    except Exception as error:  # wandb raises many kinds
        yield Checked("fail", f"wandb: {error}", "or train without it: USE_WANDB=false")


def mirror(launch: Launch) -> Iterator[Checked]:
    """One listing; what writing needs, the start learns."""
    if (url := launch.config.trainer.checkpoint.mirror) is None:
        yield Checked("ok", "none is set (trainer.checkpoint.mirror)")
        return
    from trainer.mirror.storage import StorageError, count_files  # fsspec takes a moment to import

    try:
        num_files = count_files(url, within_s=MIRROR_WITHIN_S)
    except (ConfigError, StorageError) as error:
        way_out = "its login, its name or the network; or train without it: trainer.checkpoint.mirror=null"
        yield Checked("fail", str(error), way_out)
    else:
        yield Checked("ok", f"{url} answers, {num_files} files")


def serving(launch: Launch) -> Iterator[Checked]:
    """Whether vLLM has a class of its own for what is exported."""
    from trainer.model import packed_lm
    from trainer.run.inputs import source_without_weights

    names = (
        getattr(packed_lm.read_config(source_without_weights(launch.config)), "architectures", None)
        or []
    )
    known = served_by_vllm(launch.vllm_python)
    if known is None or not names:
        why = (
            f"{launch.vllm_python} has no vLLM"
            if known is None
            else "config.json names no architecture"
        )
        yield Checked(
            "ok", f"whether vLLM serves it was not looked at: {why} (--python names an interpreter)"
        )
    elif missing := sorted(set(names) - known):
        what = f"{', '.join(missing)} is not among the architectures of the vLLM of {launch.vllm_python}"
        yield Checked(
            "warn",
            what,
            "try a tiny run and `prove RUN_DIR --engine vllm`, or serve it with transformers",
        )
    else:
        yield Checked("ok", f"vLLM serves {', '.join(names)}")


def rows(launch: Launch) -> Iterator[Checked]:
    """The first row of each file, through template and tokenizer."""
    from trainer.data.preview import preview
    from trainer.run.inputs import encode_first_rows, source_without_weights

    config, described = launch.config, False
    is_strict = config.data.on_bad_row == "error"
    found = encode_first_rows(config, preflight.find_files(config), source_without_weights(config))
    for row, result, tokenizer in found:
        place = location(row.file, row.line)
        if isinstance(result, UnusableError):
            fix = (
                "mend it, or leave such rows out with data.on_bad_row=skip"
                if is_strict
                else "it is left out"
            )
            yield Checked("fail" if is_strict else "warn", f"{place}: {result}", fix)
        elif result and not described:
            described, sample = True, result[0]
            shown = " ".join(
                preview(sample.input_ids, sample.loss_mask, tokenizer, color=False).split()
            )
            yield Checked(
                "ok", f"{place}, its end, with what is supervised in [[ ]]: …{shown[-SHOWN_CHARS:]}"
            )


def cache(launch: Launch) -> Iterator[Checked]:
    from trainer.data.token_cache import NotPreparedError
    from trainer.data_tools.stats import validation_in_train
    from trainer.run.inputs import prepare_data_alone

    try:
        data = prepare_data_alone(launch.config, only_cached=True)
    except NotPreparedError:
        yield Checked("ok", "not prepared yet: the first start does it, or `data stats` now")
        return
    yield Checked(
        "ok", f"prepared: {len(data.train)} samples, {len(data.validation or ())} for validation"
    )
    if (found := validation_in_train(data)) and found["count"]:
        places = "; ".join(
            f"{where} equals {other}" for where, other in found["places"][:NUM_SHOWN]
        )
        what = f"{found['count']} of {found['num_samples']} samples of validation are trained on: {places}"
        yield Checked("warn", what, "take them out of one side: val/loss is too good with them")


FIND = "from importlib.util import find_spec; vllm = find_spec('vllm'); print(vllm.origin if vllm else '')"
REGISTRY = "model_executor/models/registry.py"
TABLE = "_VLLM_MODELS"
"""A dictionary there, put together from others by name."""


def served_by_vllm(python: str) -> set[str] | None:
    """The architectures that the vLLM of an interpreter knows, read from its own list without
    importing it, which takes half a minute; None where there is no vLLM, or no list as we know it.
    """
    try:
        found = run_in(python, "-c", FIND).stdout.strip()
        body = (
            ast.parse((Path(found).parent / REGISTRY).read_text(encoding="utf-8")).body
            if found
            else []
        )
    except (OSError, SyntaxError):
        return None
    tables = {
        target.id: line.value
        for line in body
        if isinstance(line, ast.Assign) and isinstance(line.value, ast.Dict)
        for target in line.targets
        if isinstance(target, ast.Name)
    }
    parts = tables[TABLE].values if TABLE in tables else []
    named = [tables[part.id] for part in parts if isinstance(part, ast.Name) and part.id in tables]
    return {
        str(ast.literal_eval(key)) for table in named for key in table.keys if key is not None
    } or None


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
    "serving": serving,
    "rows": rows,
    "cache": cache,
}
NEEDS = {
    "resume": {"run directory", "files"},
    "login": {"requirements", "trackers"},
    "mirror's answer": {"requirements", "mirror"},
    "architecture": {"requirements", "model", "adapters"},
    "serving": {"architecture"},
    "rows": {"requirements", "model", "template", "files"},
    "cache": {"rows"},
    "memory and disk": {"cards", "architecture"},
}
"""Without those a check would only repeat their failure."""


def examine(checks: Mapping[str, Check], launch: Launch) -> Iterator[tuple[str, Checked | None]]:
    """Name and finding of each check; None for one that must wait until others are mended."""
    broken = set[str]()
    for name, check in checks.items():
        if NEEDS.get(name, set()) & broken:
            broken.add(name)
            yield name, None
            continue
        for found in _findings(check, launch):
            if found.level == "fail":
                broken.add(name)
            yield name, found


def _findings(check: Check, launch: Launch) -> list[Checked]:
    try:
        return list(check(launch)) or [Checked("ok", "nothing is wrong")]
    except (ConfigError, DataError, CannotWriteError, OSError) as error:
        return [Checked("fail", str(error))]
    except Exception as error:  # whatever a run would end with
        return [Checked("fail", f"{type(error).__name__}: {error}")]
