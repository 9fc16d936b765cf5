"""`accept`: what is wrong on a machine is named by its line, what it cannot tell is said, nothing is left behind.

Faults are put into the ranks from here: into probes by a `sitecustomize` on their path, into runs as forked ranks.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import whole_runs

from trainer.acceptance import lines
from trainer.acceptance.accept import shareable
from trainer.acceptance.evidence import ONE_RANK
from trainer.acceptance.lines import FAIL, LINES, NOT_POSSIBLE, OK, WARN, Judgement
from trainer.acceptance.probe import Probe
from trainer.cli import accept
from trainer.planner.roofline import CARDS, GATHER, MATMUL, MEMORY, DeviceOperation
from trainer.resume_proof import killed_runs
from trainer.resume_proof.killed_runs import KilledRun, RunFailedError
from trainer.resume_proof.proof import Trial

ROOT = Path(__file__).parents[2]
TRIAL = Trial(num_ranks=8, steps=8, kills=1, seed=1, overrides=(), run_dir=Path("run"), is_on_gpu=True)
SABOTAGE = """
import os
if "RANK" in os.environ:
    from transformers.models.qwen2 import modeling_qwen2
    from trainer.model import attention
    real = attention.grouped_attention
    attention.grouped_attention = lambda query, *more: real(query * 1.01, *more)
    half = modeling_qwen2.rotate_half
    modeling_qwen2.rotate_half = lambda x: half(x) * 1.05
"""
Patch = pytest.MonkeyPatch
Before = Callable[[], None]


def drop_gradient() -> None:
    """What rank 1 has found does not arrive."""
    _tamper(lambda tensor: tensor.zero_() if os.environ["RANK"] == "1" else tensor)


def add_in_any_order() -> None:
    """Some results of a reduction have another last bit in every process."""
    _tamper(lambda tensor: tensor.mul_(1 + 1e-7 * os.urandom(1)[0]))


def _tamper(change: Callable[[Any], Any]) -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

    real = DefaultReduceScatter.__call__

    def reduce(self: Any, output_tensor: Any, input_tensor: Any, *more: Any, **options: Any) -> Any:
        change(input_tensor)
        return real(self, output_tensor, input_tensor, *more, **options)

    DefaultReduceScatter.__call__ = reduce  # type: ignore[method-assign]


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: Patch) -> Path:
    """Where temporary files go; empty again when the command is done."""
    directory = tmp_path / "tmp"
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    monkeypatch.setenv("TMPDIR", str(directory))
    return directory


def judged(lines: list[str], tmp_path: Path, *words: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """(exit code, {line: its entry in the JSON})."""
    shared = tmp_path / "shared.json"
    options = [word for name in lines for word in ("--only", name)]
    code = accept.main([*words, *options, f"--json={shared}"])
    return code, {entry["line"]: entry for entry in json.loads(shared.read_text())["lines"]}


@pytest.fixture
def forked(tmp_path: Path, monkeypatch: Patch) -> Callable[[Before | None], None]:
    """Runs become forked ranks with this fault in them."""

    def use(before: Before | None) -> None:
        def train(self: KilledRun, until: int | None = None) -> None:
            number, *words = self.words
            code, output = whole_runs.run(int(number), *words, log=self.log, before=before)
            assert code == 0, output

        monkeypatch.setattr(KilledRun, "train", train)

    return use


def test_a_dropped_gradient_is_named(forked: Callable[..., None], tmp_path: Path) -> None:
    """The self-check compares two ways of computing on the same ranks: both lack it."""
    forked(drop_gradient)
    words = ("2", *whole_runs.tiny_model(tmp_path), "--device=cpu")
    code, found = judged(["self-check", "ranks"], tmp_path, *words)
    assert code == 1
    assert {name: entry["verdict"] for name, entry in found.items()} == {"self-check": OK, "ranks": FAIL}
    assert found["ranks"]["numbers"]["train/grad_norm"] > 0.1


def test_a_sum_in_any_order_is_named(forked: Callable[..., None], tmp_path: Path) -> None:
    forked(add_in_any_order)
    words = ("2", *whole_runs.tiny_model(tmp_path), "--device=cpu")
    code, found = judged(["repeat", "resume"], tmp_path, *words)
    assert code == 1
    assert {name: entry["verdict"] for name, entry in found.items()} == {"repeat": FAIL, "resume": NOT_POSSIBLE}
    assert found["repeat"]["text"].startswith("two equal runs differ, first at step 1, train/grad_norm: straight ")


def test_sound_ranks_are_accepted(forked: Callable[..., None], tmp_path: Path) -> None:
    forked(None)
    words = ("2", *whole_runs.tiny_model(tmp_path), "--device=cpu")
    code, found = judged(["ranks", "packing", "repeat", "memory"], tmp_path, *words)
    verdicts = {name: entry["verdict"] for name, entry in found.items()}
    assert (code, verdicts) == (0, {"ranks": OK, "packing": OK, "repeat": OK, "memory": NOT_POSSIBLE})
    assert found["ranks"]["numbers"]["train/grad_norm"] > 0, "another number of ranks adds in another order"


def test_a_sabotaged_kernel_and_a_wrong_rope_are_named(tmp_path: Path) -> None:
    """In the real command, whose probe finds the fault on its Python path. The other kernels are sound."""
    (tmp_path / "sitecustomize.py").write_text(SABOTAGE)
    names = ["versions", "topology", *lines.KERNELS, "matmul", "collectives"]
    command = [sys.executable, "-m", "trainer.cli.accept", "1", "--device=cpu", "--json=shared.json"]
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    (tmp_path / "tmp").mkdir()
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path / "tmp")}
    env["PYTHONDONTWRITEBYTECODE"] = "1"
    words = [*command, *(word for name in names for word in ("--only", name))]
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stdout + done.stderr
    found = json.loads((tmp_path / "shared.json").read_text())["lines"]
    assert [entry["line"] for entry in found] == names
    assert [entry["line"] for entry in found if entry["verdict"] == FAIL] == ["attention", "rotary"]
    assert [entry["line"] for entry in found if entry["verdict"] == NOT_POSSIBLE] == [
        "topology",
        "matmul",
        "collectives",
    ]
    assert "; fail: attention, rotary; " in done.stdout.splitlines()[-2]
    assert {path.name for path in tmp_path.iterdir()} == {"sitecustomize.py", "shared.json", "tmp"}
    assert not list((tmp_path / "tmp").iterdir())


FAKE = """
import os, signal, sys, tempfile, time
tempfile.mkdtemp()
if os.environ["FAKE"] == "interrupt":
    open(os.environ["FAKE_PID"], "w").write(str(os.getpid()))
    os.kill(os.getppid(), signal.SIGINT)
    time.sleep(60)
print("ERROR: self-check failed: the loss differs, see /home/someone/model")
sys.exit(2)
"""


@pytest.fixture
def fake(tmp_path: Path, temporary: Path, monkeypatch: Patch) -> Callable[[str], None]:
    """A script stands for the launcher."""
    (tmp_path / "fake.py").write_text(FAKE)
    monkeypatch.setattr(killed_runs, "LAUNCHER", (str(tmp_path / "fake.py"),))
    monkeypatch.setenv("FAKE_PID", str(tmp_path / "pid"))
    return lambda what: monkeypatch.setenv("FAKE", what)


def test_a_run_that_fails_is_told_once(fake: Callable[[str], None], tmp_path: Path, temporary: Path) -> None:
    fake("fail")
    code, found = judged(["self-check", "repeat", "resume"], tmp_path, "2", "--device=cpu")
    assert code == 1 and not list(temporary.iterdir())
    assert found["self-check"]["verdict"] == FAIL
    assert found["self-check"]["text"] == "ERROR: self-check failed: the loss differs, see (path)"
    assert [found[name]["verdict"] for name in ("repeat", "resume")] == [NOT_POSSIBLE] * 2
    assert "needs the straight run, which failed" in found["repeat"]["text"]


def test_an_interrupted_command_leaves_nothing(
    fake: Callable[[str], None], tmp_path: Path, temporary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake("interrupt")
    inherited = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        assert accept.main(["2", "--device=cpu", "--only=self-check", f"--json={tmp_path}/shared.json"]) == 130
    finally:
        signal.signal(signal.SIGINT, inherited)
    assert capsys.readouterr().err.endswith("interrupted: no verdict\n")
    assert not list(temporary.iterdir()) and not (tmp_path / "shared.json").exists()
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


def test_runs_are_kept_where_the_user_says(fake: Callable[[str], None], tmp_path: Path, temporary: Path) -> None:
    fake("fail")
    words = ["2", "--device=cpu", "--only=self-check", f"--keep={tmp_path}/kept"]
    assert accept.main(words) == 1
    assert (tmp_path / "kept" / "straight.log").exists() and not list(temporary.iterdir())
    assert accept.main(words) == 73, "what is there already is not written into"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--only=speeed"], "invalid choice: 'speeed'"),
        (["eight"], "'eight' is neither a number of ranks nor"),
        (["2", "data.train_batchsize=8"], "did you mean"),
        (["--device=tpu"], "invalid choice: 'tpu'"),
    ],
)
def test_mistakes_are_2(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert accept.main(words) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err


def probe(**changes: Any) -> Probe:
    """Of a sound H100 among eight."""
    sound: dict[str, Any] = {
        "device": "NVIDIA H100 80GB HBM3",
        "memory_gib": 79.2,
        "capability": "9.0",
        "cuda": "12.8",
        "nccl": "2.27.3",
        "peers": [n for n in range(8) if n],
        "kernel_errors": dict.fromkeys(lines.KERNELS, 0.3),
        "kernel_failures": {},
        "matmul_dtype": "bfloat16",
        "matmul_tflops": CARDS["H100"].matmul_tflops,
        "all_gather_gb_s": CARDS["H100"].link_gb_s,
        "reduce_scatter_gb_s": CARDS["H100"].link_gb_s,
    }
    return Probe(**sound | changes)


GPU_CASES: list[tuple[str, dict[str, Any], str, str]] = [
    ("topology", {}, OK, "8 x NVIDIA H100 80GB HBM3 79 GiB, CUDA 12.8, NCCL 2.27.3; every card reaches"),
    ("topology", {"device": "NVIDIA H100 PCIe"}, WARN, "the slowest card sets the pace"),
    ("topology", {"peers": [0]}, WARN, "cards [3] do not reach all others"),
    ("attention", {}, OK, "largest error 0.3 of"),
    (
        "attention",
        {"kernel_errors": dict.fromkeys(lines.KERNELS, 1.2)},
        FAIL,
        "error 1.2 of what rounding may be, on rank 3",
    ),
    ("head", {"kernel_failures": {"head": "RuntimeError: no kernel"}}, FAIL, "on rank 3: RuntimeError: no kernel"),
    ("matmul", {}, OK, "100% of what others measured on H100"),
    ("matmul", {"matmul_tflops": 300.0}, WARN, "on the slowest rank, 3: 38% of"),
    ("matmul", {"device": "NVIDIA L4", "matmul_tflops": 90.0}, NOT_POSSIBLE, "no data of NVIDIA L4"),
    ("collectives", {}, OK, "100% of what H100 on a board of eight should reach"),
    ("collectives", {"reduce_scatter_gb_s": 20.0}, WARN, "reduce-scatter 20 GB/s a rank: 6% of"),
]


@pytest.mark.parametrize(("line", "changes", "verdict", "text"), GPU_CASES)
def test_lines_of_cards(line: str, changes: dict[str, Any], verdict: str, text: str) -> None:
    """Of eight cards the fourth is another."""
    evidence: Any = SimpleNamespace(trial=TRIAL, probes=[*[probe()] * 3, probe(**changes), *[probe()] * 4])
    found = LINES[line][1](evidence)
    assert found.verdict == verdict and text in found.text, found


def speed(*, kind: str = MATMUL, tokens_per_s: float = 90_000.0, reserved_gib: float = 30.0) -> Any:
    """Evidence of a plan of one operation that takes one second on an H100, for 100,000 tokens on eight ranks."""
    flops = int(CARDS["H100"].matmul_tflops * 1e12) if kind == MATMUL else 0
    counts = Counter({DeviceOperation((0, "forward"), "product", kind, flops, 0): 1 if flops else 10**6})
    counts[DeviceOperation((0, "forward"), "gather", GATHER, 0, 8)] = 1
    workload = SimpleNamespace(num_tokens=12_500, num_micro_batches=1)
    plan = SimpleNamespace(operations=counts, workload=workload, num_ranks=8, peak_bytes=20 * 2**30)
    row = {"throughput/train/tokens_per_s": tokens_per_s, "throughput/train/mfu": 0.4}
    row |= {"memory/max_reserved_gib": reserved_gib, "memory/cpu/rss_gib": 1.0}
    model = SimpleNamespace(ulysses_sequence_parallel_size=1)
    return SimpleNamespace(
        trial=TRIAL,
        probes=[probe()] * 8,
        timed=SimpleNamespace(rows=lambda: [row] * 4),
        plan=SimpleNamespace(plan=plan, needed_gib=25.0),
        config=SimpleNamespace(model=model),
    )


def test_speed_and_memory_are_judged_by_the_plan() -> None:
    judge_speed, judge_memory = LINES["speed"][1], LINES["memory"][1]
    found = judge_speed(speed())
    assert found.verdict == OK and found.text.startswith("90,000 tokens/s, MFU 40.0%: 90% of the 100,000 predicted")
    assert judge_speed(speed(tokens_per_s=40_000.0)).verdict == WARN
    small = judge_speed(speed(kind=MEMORY))
    assert small.verdict == NOT_POSSIBLE and "only waits for launches" in small.text
    assert judge_memory(speed(reserved_gib=24.0)).verdict == OK
    assert judge_memory(speed(reserved_gib=30.0)).verdict == WARN


def test_a_model_too_large_for_one_card_is_no_failure() -> None:
    class Large:
        trial, straight = TRIAL, None

        @property
        def one_rank(self) -> KilledRun:
            raise RunFailedError("  torch.OutOfMemoryError: CUDA out of memory", name=ONE_RANK, code=1)

    evidence: Any = Large()
    assert LINES["ranks"][1](evidence).verdict == NOT_POSSIBLE


def test_a_loss_that_is_no_number_is_not_equal() -> None:
    row = {"train/loss": 1.0, "train/grad_norm": 1.0}
    sound, broken = (
        SimpleNamespace(rows=lambda rows=rows: rows)
        for rows in ([row] * 4, [row, *[dict.fromkeys(row, float("nan"))] * 3])
    )
    fsdp = SimpleNamespace(param_dtype="float32")
    config = SimpleNamespace(model=SimpleNamespace(fsdp_config=fsdp))
    evidence: Any = SimpleNamespace(trial=replace(TRIAL, num_ranks=2), straight=sound, one_rank=broken, config=config)
    assert LINES["ranks"][1](evidence).verdict == FAIL


def test_what_is_shared_names_nobody(monkeypatch: Patch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "gpu-17")
    monkeypatch.setattr("getpass.getuser", lambda: "alice")
    overrides = ("model.partial_pretrain=/data/alice/model", "trainer.experiment_name=alices", "optim.lr=1e-5")
    overrides += ("model.fsdp_config.param_dtype=float32", "data.train_files=[secret.jsonl]")
    text = "alice@gpu-17: cannot read ~/x.py, '/data/it' or /tmp/a: 3 GB/s"
    document = shareable(
        replace(TRIAL, overrides=overrides), {"speed": Judgement(FAIL, text, {"x": float("nan")})}, wall_s=1
    )
    said = json.dumps(document, allow_nan=False)
    assert not [word for word in ("alice", "gpu-17", "/data", "/tmp", "x.py", "secret", "alices") if word in said]
    assert "3 GB/s" in said and '"optim.lr=1e-5"' in said and "param_dtype=float32" in said
