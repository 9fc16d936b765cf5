"""Floors (docs/architecture.md) and waits: each check runs over the tree, and what it must
catch.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import source_rules as rules

from trainer.data.token_cache import TOKEN_MODULES

REPOSITORY = Path(__file__).resolve().parents[2]
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
    "trainer.mirror.__main__",
    "trainer.checkpoint_tools.listing",
    "trainer.launch.requirements",
    "trainer.__main__",
)
STEP_FILES = (
    "trainer/batch.py",
    "trainer/loop/fit.py",
    "trainer/loop/parts.py",
    "trainer/loop/run.py",
    "trainer/loop/step.py",
    "trainer/data/loader.py",
    "trainer/data/batch_plan.py",
    "trainer/model/attention.py",
    "trainer/model/experts.py",
    "trainer/model/head.py",
    "trainer/model/packed_lm.py",
    "trainer/model/parallelize.py",
    "trainer/guard/guard.py",
    "trainer/monitor/memory.py",
    "trainer/monitor/clock.py",
    "trainer/loop/meter.py",
    "trainer/monitor/packet.py",
    "trainer/monitor/validation.py",
    "trainer/optim/adamw.py",
    "trainer/optim/clip.py",
    "trainer/optim/schedule.py",
    "trainer/runtime/seeding.py",
)
ALLOWED_WAITS = {
    "trainer/batch.py:PackedBatch.share": "in a worker of the loader: the tensors lie in host "
    "memory",
    "trainer/batch.py:PackedBatch.__getstate__": "in a worker of the loader: the tensors lie in "
    "host memory",
    "trainer/monitor/packet.py:Packet.read": "the one wait of a training or a validation step",
    "trainer/runtime/seeding.py:GeneratorState.load_state_dict": "restores a checkpoint, before "
    "the first step",
}
ALLOWED_LOADS = {
    "trainer/tools/evaluate/program_runner.py": "runs what a model wrote against tests: that is its "
    "purpose",
}


def python_files(*roots: str) -> dict[str, str]:
    """Path relative to the repository -> source text."""
    paths = sorted(path for root in roots for path in (REPOSITORY / root).rglob("*.py"))
    return {str(path.relative_to(REPOSITORY)): path.read_text(encoding="utf-8") for path in paths}


@pytest.fixture(scope="module")
def sources() -> rules.Sources:
    return {rules.module_name(path): text for path, text in python_files("trainer").items()}


def test_every_file_stands_on_a_floor(sources: rules.Sources) -> None:
    assert {rules.place_of(module).floor for module in sources} == {0, 1, 2, 3, 4, 5}


def test_no_file_imports_upward(sources: rules.Sources) -> None:
    assert rules.upward_imports(sources) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("trainer.runtime.log", "from trainer.data import rows"),
        ("trainer.data.rows", "def read():\n    from trainer.checkpoint import fsio"),
        ("trainer.data.rows", "from ..checkpoint import fsio"),
        (
            "trainer.data.rows",
            "import importlib\nimportlib.import_module('trainer.tracking.facade')",
        ),
    ],
)
def test_an_upward_import_is_caught(module: str, source: str) -> None:
    assert len(rules.upward_imports({module: source})) == 1


def test_tools_stand_apart(sources: rules.Sources) -> None:
    assert rules.misplaced_tools(sources) == []
    tools = {module.split(".")[2] for module in sources if module.startswith("trainer.tools.")}
    assert tools == set(rules.TOOLS)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("trainer.launch.checks", "def f():\n    from trainer.tools.plan.memory import planner"),
        ("trainer.tools.plan.memory", "from trainer.tools.verify import runs"),
        ("trainer.tools.plan.memory", "from trainer.loop import step"),
    ],
)
def test_a_misplaced_tool_is_caught(module: str, source: str) -> None:
    assert len(rules.misplaced_tools({module: source})) == 1


def test_no_import_cycle(sources: rules.Sources) -> None:
    assert rules.import_cycle(sources) == []


def test_a_cycle_through_a_function_is_caught() -> None:
    looped = {
        "trainer.data.a": "from trainer.data import b",
        "trainer.data.b": "def late():\n    from trainer.data.c import x",
        "trainer.data.c": "import trainer.data.a",
        "trainer.data.d": "from trainer.data.a import y",
    }
    assert set(rules.import_cycle(looped)) == {"trainer.data.a", "trainer.data.b", "trainer.data.c"}


def test_what_must_start_at_once_imports_no_torch() -> None:
    program = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    slow = {"torch", "transformers", "torchdata"} & sys.modules.keys()
    assert not slow, f"{name} imports {slow}"
"""
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", program, *FREE_OF_TORCH]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_text_is_read_and_written_as_utf8() -> None:
    files = python_files("trainer").items()
    assert [line for path, text in files for line in rules.text_without_encoding(path, text)] == []


@pytest.mark.parametrize(
    ("call", "is_caught"),
    [
        ("path.read_text()", True),
        ("open(path)", True),
        ("open(path, 'w')", True),
        ("path.open('a+')", True),
        ("path.read_text(encoding='utf-8')", False),
        ("open(path, 'rb')", False),
        ("os.open(path, os.O_RDONLY)", False),
    ],
)
def test_text_in_the_encoding_of_the_locale_is_caught(call: str, is_caught: bool) -> None:
    assert bool(list(rules.text_without_encoding("a.py", call))) == is_caught


def test_the_step_waits_for_the_device_only_where_listed() -> None:
    files = python_files("trainer")
    found = {
        f"{path}:{owner}": line
        for path in STEP_FILES
        for owner, line in rules.device_waits(files[path])
    }
    assert {place: line for place, line in found.items() if place not in ALLOWED_WAITS} == {}
    assert set(ALLOWED_WAITS) <= set(found), "the list names a place that no longer waits"


@pytest.mark.parametrize(
    "source",
    [
        "def f(x):\n    return x.item()",
        "def f(x):\n    torch.cuda.synchronize()",
        "def f(x):\n    wait = torch.cuda.synchronize\n    wait()",
        "def f(x):\n    return x.to('cpu')",
        "def f(x):\n    return x.to(device='cpu', non_blocking=True)",
    ],
)
def test_a_wait_for_the_device_is_caught(source: str) -> None:
    assert [owner for owner, _ in rules.device_waits(source)] == ["f"]


def test_nothing_loads_what_could_run_code() -> None:
    found = {
        path: lines
        for path, text in python_files("trainer").items()
        if (lines := rules.unsafe_loads(path, text))
    }
    assert {path: lines for path, lines in found.items() if path not in ALLOWED_LOADS} == {}
    assert set(ALLOWED_LOADS) == set(found), (
        "the list names a file that no longer runs or loads any"
    )


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.load(path)",
        "torch.load(path, weights_only=False)",
        "from torch import load",
        "pickle.load(file)",
        "np.load(path, allow_pickle=True)",
        "AutoConfig.from_pretrained(path, trust_remote_code=True)",
        "eval(text)",
    ],
)
def test_an_unsafe_load_is_caught(source: str) -> None:
    assert len(rules.unsafe_loads("a.py", source)) == 1


def test_the_name_of_a_token_cache_covers_every_module_that_decides_tokens(
    sources: rules.Sources,
) -> None:
    """`TOKEN_MODULES` are `prepare` and all that it imports of its package, directly or
    not.
    """
    package = "trainer.data."
    found: set[str] = set()
    waiting = {"trainer.data.prepare"}
    while waiting:
        found |= waiting
        targets = {
            entry.target
            for module in waiting
            for entry in rules.imports_of(module, sources[module], sources)
        }
        waiting = {target for target in targets if target.startswith(package)} - found
    assert sorted(TOKEN_MODULES) == sorted(module.removeprefix(package) for module in found)
