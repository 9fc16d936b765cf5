"""Fuzz everything that the product reads back from a disk or takes from outside.

`python tests/faults/fuzz.py --minutes 10 --seed 1` runs a coverage-guided campaign with atheris
(`pip install atheris`) on every target and writes benchmarks/results/fuzz.json. Inputs that fail
are kept in tests/faults/corpus/, where the test suite replays them. `--replay FILE` runs one input.

A target reads bytes the way the product does. It may raise only errors that the product answers
with a message. Another error, more than 5 seconds, or more than 2 GiB of memory is a fault.
"""

import argparse
import contextlib
import io
import json
import logging
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

ROOMS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOMS), str(ROOMS / "unit"), str(ROOMS / "faults")]

from campaign import parser_of, run_campaign  # noqa: E402  found by the paths above
from processes import time_limit  # noqa: E402

CORPUS = Path(__file__).with_name("corpus")
MAX_INPUT_BYTES = 4096
LIMIT_S = 5
LIMIT_MIB = 2048
INSTRUMENTED = ["trainer", "json", "yaml", "omegaconf", "hydra", "jinja2"]
"""Packages whose branches guide the fuzzer."""


def instrumented_imports():
    """Let atheris trace the branches of modules that are imported inside; do nothing without
    atheris.
    """
    if "atheris" not in sys.modules:
        return contextlib.nullcontext()
    import atheris

    return atheris.instrument_imports(include=INSTRUMENTED)


def make_targets():
    """Return the targets, and the errors that they may raise."""
    with instrumented_imports():
        from checkpoint_fakes import save, sealed
        from fsspec.implementations.memory import MemoryFileSystem
        from prepared import make_tokenizer

        from trainer.checkpoint import finished, layout, retention, rollback, shards
        from trainer.checkpoint.manifest import ManifestError, parse_manifest
        from trainer.checkpoint.model_files import companion_files
        from trainer.checkpoint.storage import Storage, StorageError
        from trainer.config import CheckpointConfig, ConfigError, RowKeys, TrainerConfig
        from trainer.data.chat import RowEncoder
        from trainer.data.formats import columns_of
        from trainer.data.readers import iter_rows
        from trainer.data.rows import PrepareOptions, UnusableError
        from trainer.errors import CannotWriteError, DataError, ResumableError
        from trainer.model.weight_files import weight_files
        from trainer.model.weights import stored_in
        from trainer.runtime import evaluations
        from trainer.runtime.progress import History
        from trainer.tools.mirror import contents
        from trainer.tools.report.readers import read_run
        from trainer.tools.report.run_log import UnreadableLogError
        from trainer.tracking import metrics_file, row_losses
        from trainer.tracking.run_info import RunFile
        from trainer.train.start.compose import load_config

    options = PrepareOptions(keys=RowKeys(), max_length=64)
    encoder = RowEncoder(make_tokenizer(), options)

    def with_file(name, read):
        def target(data, directory):
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            read(path)

        return target

    def manifest(data, directory):
        """A manifest as written, and with a digest that matches its changed content."""
        with contextlib.suppress(ManifestError):
            parse_manifest(data, step=4)
        try:
            tree = json.loads(data)
            forged = sealed(tree)
        except (ValueError, AttributeError, TypeError, RecursionError):
            return
        parse_manifest(forged, step=4)

    def rows(path, encoder=encoder):
        for row in iter_rows(path, columns_of(options.keys)):
            with contextlib.suppress(UnusableError):
                encoder.encode(row)

    def template(data, directory):
        tokenizer = make_tokenizer(data.decode(errors="replace"))
        path = directory / "rows.jsonl"
        path.write_text(
            '{"messages": [{"role": "user", "content": "a"}, '
            '{"role": "assistant", "content": "b"}]}\n'
        )
        rows(path, RowEncoder(tokenizer, options))

    def run_directory(name):
        """A run with a checkpoint and one file of fuzzed bytes, as a start and a rotation see it."""

        def target(data, directory):
            save(directory, 2)
            (directory / name).write_bytes(data)
            layout.read_pointer(directory)
            layout.committed(directory)
            rollback.read(directory)
            evaluations.read_summaries(directory)
            finished.read(directory / "global_step_2")
            retention.settle(directory, 2, keep=1, history=History())

        return target

    def mirror(data, directory):
        """A mirror whose listing has a fuzzed name, and a file of fuzzed bytes for each name."""
        files = MemoryFileSystem()
        files.store = {}
        files.pseudo_dirs = [""]
        storage = Storage("memory://bucket/run", files)
        name, _, content = data.partition(b"\0")
        printable = name.decode(errors="replace").replace("/", "_")
        listed = f"global_step_2/{printable[:100]}_"
        for place in (listed, layout.POINTER, "global_step_2/manifest.json", "run.json"):
            files.pipe_file(f"/bucket/run/{place}", content)
        contents.look(storage)
        trainer = TrainerConfig(
            default_local_dir=str(directory),
            checkpoint=CheckpointConfig(mirror="memory://bucket/run"),
        )
        contents.claim(trainer, storage)

    def recipe(data, directory):
        path = directory / "mine.yaml"
        path.write_bytes(data)
        load_config([f"experiment={path}"])

    def override(data, directory):
        load_config([data.decode(errors="replace").replace("\0", "")])

    def run_file(path):
        file = RunFile(path)
        file.require("project", "experiment")
        file.tracker("wandb")
        file.set_tracker("wandb", "id", 4)

    def report(path):
        from trainer.tools.report.analyse import analyse

        analyse(read_run(path))

    def past(path):
        metrics_file.read_past(path)
        metrics_file.read_metrics(path)

    def weights(path):
        for tensor in stored_in(path).values():
            tensor.read(())

    targets = {
        "manifest": manifest,
        "pointer": run_directory("latest_checkpointed_iteration.txt"),
        "rollbacks": run_directory("rollbacks.json"),
        "evaluations": run_directory("evaluations.jsonl"),
        "finished": run_directory("global_step_2/finished.json"),
        "safetensors": with_file("model.safetensors", weights),
        "weight_index": with_file(
            "model.safetensors.index.json", lambda path: weight_files(path.parent)
        ),
        "model_files": with_file(
            "config.json", lambda path: list(map(Path.read_bytes, companion_files(path.parent)))
        ),
        "torch_shard": with_file("data.pt", shards.read_torch),
        "rows_jsonl": with_file("rows.jsonl", rows),
        "rows_json": with_file("rows.json", rows),
        "rows_gzip": with_file("rows.jsonl.gz", rows),
        "rows_parquet": with_file("rows.parquet", rows),
        "chat_template": template,
        "recipe": recipe,
        "override": override,
        "run_file": with_file("run.json", run_file),
        "metrics": with_file("metrics.jsonl", past),
        "row_losses": with_file("row_losses.jsonl", row_losses.read_row_losses),
        "report_jsonl": with_file("metrics.jsonl", report),
        "report_csv": with_file("history.csv", report),
        "report_console": with_file("console.log", report),
        "mirror": mirror,
    }
    answered = (
        ConfigError, DataError, CannotWriteError, ManifestError, StorageError, ResumableError,
        UnreadableLogError, FileNotFoundError,
    )  # fmt: skip
    return targets, answered


def run_input(target, answered, data, root):
    """Run one input in a separate directory. Raises any error that would crash the product."""
    directory = root / "input"
    directory.mkdir()
    try:
        with (
            time_limit("an input", LIMIT_S),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.suppress(*answered),
        ):
            target(data, directory)
    finally:
        shutil.rmtree(directory)


def fuzz_one(name, seconds, seed, root):
    """Fuzz one target in this process; libFuzzer ends it."""
    import atheris

    targets, answered = make_targets()
    logging.disable(logging.CRITICAL)
    target = targets[name]

    def test_one_input(data):
        run_input(target, answered, data, root)

    found = root / "found"
    found.mkdir()
    options = {
        "max_total_time": seconds,
        "seed": seed,
        "rss_limit_mb": LIMIT_MIB,
        "max_len": MAX_INPUT_BYTES,
        "timeout": 4 * LIMIT_S,
        "print_final_stats": 1,
        "artifact_prefix": f"{root}/fault-",
    }
    flags = [f"-{key}={value}" for key, value in options.items()]
    atheris.Setup([sys.argv[0], *flags, str(found), str(CORPUS / name)], test_one_input)
    atheris.Fuzz()


def fuzz_all(_, arguments):
    """Fuzz every target in a separate process, and keep failing inputs in the corpus."""
    seed = arguments.seed
    names = arguments.only or list(make_targets()[0])
    seconds = max(1, round(arguments.minutes * 60 / len(names)))
    executions = {}
    faults = []
    for name in names:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
            command = [sys.executable, __file__, "--target", name, "--seconds", str(seconds)]
            done = subprocess.run(
                [*command, "--seed", str(seed), "--root", directory], capture_output=True, text=True
            )
            output = done.stdout + done.stderr
            count = re.search(r"number_of_executed_units: (\d+)", output)
            executions[name] = int(count[1]) if count else 0
            for number, artifact in enumerate(sorted(Path(directory).glob("fault-*"))):
                shutil.copy(artifact, CORPUS / name / f"fault_{seed}_{number}")
            if done.returncode:
                errors = re.findall(r"=== Uncaught Python exception: ===\n(.*)", output)
                faults.append(f"{name}: {errors[0] if errors else output[-300:]}")
        print(
            f"{name}: {executions[name]} inputs",
            *faults[-1:] if done.returncode else (),
            flush=True,
        )
    return {
        "executions": executions,
        "inputs": sum(executions.values()),
        "faults": faults,
        "atheris": version("atheris"),
    }


def main(argv):
    parser = parser_of(__doc__, minutes=10.0, seed=1)
    parser.add_argument("--only", nargs="*", default=[], help="targets (default: all)")
    parser.add_argument("--replay", type=Path, metavar="FILE")
    for name in ("--target", "--root", "--seconds"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.replay:
        targets, answered = make_targets()
        name = arguments.replay.parent.name
        with tempfile.TemporaryDirectory() as directory:
            run_input(targets[name], answered, arguments.replay.read_bytes(), Path(directory))
        return 0

    if arguments.target:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        seconds = int(arguments.seconds)
        root = Path(arguments.root)
        fuzz_one(arguments.target, seconds, arguments.seed, root)
    return run_campaign("fuzz", parser, argv, fuzz_all)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
