"""Levels of packages (docs/architecture.md) and waits for the device. Each check runs over the
tree, and over an example that it must reject.
"""

import pytest
import source_rules as rules
from processes import run_python
from repository import REPOSITORY

from trainer.data.token_cache import TOKEN_MODULES

FREE_OF_TORCH = (
    "trainer.config",
    "trainer.errors",
    "trainer.runtime.environment",
    "trainer.runtime.signals",
    "trainer.checkpoint.layout",
    "trainer.data.rows",
    "trainer.cli.__main__",
    "trainer.cli.checkpoint",
    "trainer.launch.checks",
    "trainer.tools.verify.checks",
    "trainer.tools.verify.runs",
    "trainer.launch.__main__",
    "trainer.tools.mirror.__main__",
    "trainer.cli.listing",
    "trainer.launch.requirements",
    "trainer.__main__",
)
STEP_FILES = (
    "trainer/data/batch.py",
    "trainer/train/fit.py",
    "trainer/train/parts.py",
    "trainer/train/run.py",
    "trainer/train/step.py",
    "trainer/data/loader.py",
    "trainer/data/batch_plan.py",
    "trainer/model/attention.py",
    "trainer/model/expert_exchange.py",
    "trainer/model/experts.py",
    "trainer/model/head.py",
    "trainer/model/packed_lm.py",
    "trainer/model/parallelize.py",
    "trainer/train/guard.py",
    "trainer/train/memory.py",
    "trainer/train/clock.py",
    "trainer/train/meter.py",
    "trainer/train/packet.py",
    "trainer/train/validation.py",
    "trainer/optim/adamw.py",
    "trainer/optim/clip.py",
    "trainer/optim/schedule.py",
    "trainer/runtime/seeding.py",
)
ALLOWED_WAITS = {
    "trainer/data/batch.py:_supervised": "on the host, before a batch is moved to its device",
    "trainer/data/batch.py:PackedBatch.__getstate__": "in a worker of the loader: the tensors lie in "
    "host memory",
    "trainer/model/expert_exchange.py:ExpertExchange.send": "the number of rows that other ranks send "
    "is the shape of what follows",
    "trainer/train/packet.py:Packet.read": "the one wait of a training or a validation step",
}
ALLOWED_LOADS = {
    "trainer/tools/evaluate/program_runner.py": "runs what a model wrote against tests: that is its "
    "purpose",
}


def python_files():
    """The trainer's source texts by path, relative to the repository."""
    paths = sorted((REPOSITORY / "trainer").rglob("*.py"))
    return {str(path.relative_to(REPOSITORY)): path.read_text(encoding="utf-8") for path in paths}


@pytest.fixture(scope="module")
def sources():
    return {rules.module_name(path): text for path, text in python_files().items()}


def test_every_file_stands_on_a_floor(sources):
    assert {rules.floor_of(module) for module in sources} == set(rules.FLOORS.values())


def test_imports_go_down_and_tools_stand_apart(sources):
    assert rules.wrong_imports(sources) == []
    tools = {module.split(".")[2] for module in sources if module.startswith("trainer.tools.")}
    assert tools == set(rules.TOOLS)


def test_no_import_cycle(sources):
    assert rules.import_cycle(sources) == []


def test_what_must_start_at_once_imports_no_torch():
    program = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    slow = {"torch", "transformers", "torchdata"} & sys.modules.keys()
    assert not slow, f"{name} imports {slow}"
"""
    done = run_python("-c", program, *FREE_OF_TORCH)
    assert done.returncode == 0, done.stderr


def test_the_step_waits_for_the_device_only_where_listed():
    files = python_files()
    found = {
        f"{path}:{owner}": line
        for path in STEP_FILES
        for owner, line in rules.device_waits(files[path])
    }
    assert {place: line for place, line in found.items() if place not in ALLOWED_WAITS} == {}
    assert set(ALLOWED_WAITS) <= set(found), "the list names a place that no longer waits"


def test_nothing_loads_what_could_run_code():
    found = {
        path: lines
        for path, text in python_files().items()
        if (lines := rules.unsafe_loads(path, text))
    }
    assert {path: lines for path, lines in found.items() if path not in ALLOWED_LOADS} == {}
    assert set(ALLOWED_LOADS) == set(found), (
        "the list names a file that no longer runs or loads any"
    )


def test_the_name_of_a_token_cache_covers_every_module_that_decides_tokens(sources):
    """`TOKEN_MODULES` are `prepare` and all modules of its package that it imports, directly or
    not.
    """
    package = "trainer.data."
    found = set()
    waiting = {"trainer.data.prepare"}
    while waiting:
        found |= waiting
        targets = {
            target
            for module in waiting
            for target, _ in rules.imports_of(module, sources[module], sources)
        }
        waiting = {target for target in targets if target.startswith(package)} - found
    assert sorted(TOKEN_MODULES) == sorted(module.removeprefix(package) for module in found)
