"""`doctor`: each planted fault is found by one check, with its fix, and a good machine has none."""

import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import resource
import shlex
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from checkpoint_fakes import save

from trainer.checkpoint import fsio
from trainer.cli import doctor
from trainer.config import ConfigError
from trainer.doctor import checkup, machine, recipe
from trainer.planner import forecast
from trainer.planner.forecast import Forecast
from trainer.quickstart import MODEL_DIR
from trainer.run.compose import load_config
from trainer.run.inputs import prepare_data_alone

GIB = 2**30
ROW = '{{"messages": [{{"role": "user", "content": "Hi {0}"}}, {{"role": "assistant", "content": "Bye {0}"}}]}}\n'


class Scene:
    """A good machine and recipe, in the working directory; its methods plant faults."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.patch, self.limits = patch, {resource.RLIMIT_CORE: 0, resource.RLIMIT_NOFILE: 65536}
        Path("rows.jsonl").write_text("".join(ROW.format(number) for number in range(4)))
        Path("val.jsonl").write_text(ROW.format("there"))
        for name in [name for name in os.environ if name.startswith(("WANDB", "NCCL", "GLOO", "SLURM", "NNODES"))]:
            patch.delenv(name)
        patch.setattr(machine.resource, "getrlimit", lambda kind: (self.limits.get(kind, 8 << 20), 1 << 30))
        patch.setattr(psutil, "net_if_addrs", lambda: {"lo": [], "eth0": []})
        patch.setattr(machine, "RDMA_DEVICES", Path("rdma"))
        self.free()

    def free(self, size_bytes: int = 100 * GIB, shared_bytes: int = GIB) -> None:
        self.patch.setattr(fsio, "free_bytes", lambda path: shared_bytes if "shm" in str(path) else size_bytes)

    def limit(self, **changes: int) -> None:
        self.limits |= {getattr(resource, name): value for name, value in changes.items()}

    def cards(self, number: int = 2, *, has_all: bool = True) -> None:
        self.patch.setattr(checkup, "count_gpus", lambda: number)
        self.patch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
        self.patch.setattr(torch.cuda, "mem_get_info", lambda card: ((80 if has_all else 8) * GIB, 80 * GIB))
        self.patch.setattr(torch.cuda, "get_device_name", lambda card: "H100")
        self.patch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 3))

    def no_cards(self, reason: str) -> None:
        def count_gpus() -> int:
            raise ConfigError(reason)

        self.patch.setattr(checkup, "count_gpus", count_gpus)

    def cores(self, number: int) -> None:
        self.cards()
        self.patch.setattr(os, "sched_getaffinity", lambda pid: set(range(number)))

    def refuse(self, kind: str, place: str) -> None:
        def observer(operation: fsio.Operation) -> None:
            if operation.kind == kind and place in str(operation.path):
                raise OSError(30, "Read-only file system")

        self.patch.setattr(fsio, "observer", observer)
        Path(place).mkdir()

    def without(self, module: str) -> None:
        found = importlib.util.find_spec
        self.patch.setattr(importlib.util, "find_spec", lambda name: None if name == module else found(name))

    def uninstall(self, name: str) -> None:
        version = importlib.metadata.version

        def of(asked: str) -> str:
            if asked == name:
                raise importlib.metadata.PackageNotFoundError
            return version(asked)

        self.patch.setattr(importlib.metadata, "version", of)

    def offline(self) -> None:
        def refuse(*args: object, **kwargs: object) -> None:
            raise OSError("Network is unreachable")

        self.patch.setattr("huggingface_hub.HfApi.model_info", refuse)
        self.patch.setattr(socket, "getaddrinfo", refuse)

    def env(self, **values: str) -> None:
        for name, value in values.items():
            self.patch.setenv(name, value)

    def clock(self) -> None:
        real = machine.time
        self.patch.setattr(
            machine, "time", SimpleNamespace(time=lambda: 0.0, strftime=real.strftime, gmtime=real.gmtime)
        )

    def write(self, name: str, text: str) -> None:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)

    def model(self, **changes: object) -> None:
        shutil.copytree(MODEL_DIR, "model")
        tree = json.loads(Path("model/config.json").read_text()) | changes
        Path("model/config.json").write_text(json.dumps(tree))
        Path("model/model.safetensors").touch()

    def checkpoint(self) -> None:
        Path("run").mkdir()
        save(Path("run").absolute(), 2)

    def leaking(self) -> None:
        shutil.copy("rows.jsonl", "val.jsonl")
        prepare_data_alone(load_config(WORDS))

    def memory(self, gib: float) -> None:
        self.patch.setattr(forecast, "default_memory_gib", lambda config, num_ranks: gib)

    def host(self, gib: int) -> None:
        self.cards()
        self.patch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=gib * GIB / 1000))


WORDS = ["data.train_files=rows.jsonl", "data.val_files=val.jsonl", "data.cache_dir=tokens"]
WORDS += ["trainer.default_local_dir=run", "trainer.device=auto"]
MINE = "model.partial_pretrain=./model"
LIVE = json.dumps({"pid": os.getpid(), "host": socket.gethostname()})
ENDLESS = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ '\\n' }}{% endfor %}"
Plant = Callable[[Scene], object]
FAULTS: dict[str, tuple[str, Plant, str, str]] = {
    # name: words, what is done, the check that finds it (! fails, ? warns), words of what it says and how to mend it
    "tokenizers is missing": ("", lambda s: s.uninstall("tokenizers"), "!requirements", "pip install 'tokenizers"),
    "too few cards": ("8", lambda s: s.cards(4), "!cards", "start at most 4"),
    "torch and driver": ("", lambda s: s.no_cards("the driver is too old"), "!cards", "too old"),
    "no card": ("trainer.device=cuda", lambda s: None, "?cards", "on the machine that trains"),
    "a busy card": ("", lambda s: s.cards(has_all=False), "?cards", "CUDA_VISIBLE_DEVICES"),
    "which machine": ("", lambda s: s.env(NNODES="2"), "!cards", "NODE_RANK is not set"),
    "few cores": ("", lambda s: s.cores(2), "?cores", "--cpus-per-task=8"),
    "little shm": ("", lambda s: (s.cards(), s.free(shared_bytes=64 << 20)), "?/dev/shm", "--shm-size=1g"),
    "few open files": ("", lambda s: s.limit(RLIMIT_NOFILE=256), "?limits", "ulimit -n 65536"),
    "locked memory": ("", lambda s: (s.cards(), s.write("rdma/mlx5_0", "")), "?limits", "ulimit -l unlimited"),
    "core files": ("", lambda s: s.limit(RLIMIT_CORE=resource.RLIM_INFINITY), "?limits", "ulimit -c 0"),
    "clock in 1970": ("", lambda s: s.clock(), "?clock", "1970-01-01"),
    "no such interface": (
        "",
        lambda s: (s.cards(), s.env(NCCL_SOCKET_IFNAME="ib0")),
        "!network",
        "unset NCCL_SOCKET_IFNAME",
    ),
    "no such machine": (
        "",
        lambda s: (s.offline(), s.env(NNODES="2", NODE_RANK="0", MASTER_ADDR="head")),
        "?network",
        "MASTER_ADDR=head",
    ),
    "rule": ("'trainer.guard.rules=[\"train/loss >\"]'", lambda s: None, "!guard", "train/loss >"),
    "mlflow is missing": ("trainer.logger=[mlflow]", lambda s: s.without("mlflow"), "!trackers", "pip install"),
    "no template": ("data.chat_template=no.jinja", lambda s: None, "!template", "No such file"),
    "peft is missing": (
        f"{MINE} model.lora_rank=8",
        lambda s: (s.model(), s.without("peft")),
        "!adapters",
        "pip install 'peft",
    ),
    "no adapter": (
        f"{MINE} model.lora_adapter_path=no",
        lambda s: s.model(),
        "!adapters",
        "adapter_config.json is not there",
    ),
    "Hub, no network": ("model.partial_pretrain=a/b", lambda s: s.offline(), "!model", "run 'hf download a/b'"),
    "no model": ("model.partial_pretrain=./nope", lambda s: None, "!model", "there is no such directory"),
    "another run": (
        "",
        lambda s: s.write("run/run.json", '{"project_name": "p", "experiment_name": "e"}'),
        "!run directory",
        "trainer.experiment_name",
    ),
    "no file": ("data.train_files=no.jsonl", lambda s: None, "!files", "give an existing path"),
    "format": ("data.train_files=rows.csv", lambda s: s.write("rows.csv", "a,b"), "!files", "convert it"),
    "read-only": ("", lambda s: s.refuse("create", "run"), "!directories", "trainer.default_local_dir=run"),
    "read-only cache": ("", lambda s: s.refuse("create", "tokens"), "!directories", "data.cache_dir=tokens"),
    "no rename": ("", lambda s: s.refuse("rename", "run"), "!directories", "choose a directory"),
    "no fsync": ("", lambda s: s.refuse("fsync", "run"), "!directories", "choose a directory"),
    "no locks": ("", lambda s: s.patch.setattr(recipe, "try_lock", lambda file: False), "?directories", "with locks"),
    "trains now": ("", lambda s: s.write("run/.train.lock", LIVE), "!resume", "wait for it or stop it"),
    "pointer": ("", lambda s: s.write("run/latest_checkpointed_iteration.txt", "x"), "!resume", "Restore one of them"),
    "moved pointer": (
        "",
        lambda s: (s.checkpoint(), s.write("run/latest_checkpointed_iteration.txt", "x")),
        "?resume",
        "checkpoint ls",
    ),
    "no resume": (
        "trainer.resume_mode=disable",
        lambda s: Path("run/global_step_3").mkdir(parents=True),
        "!resume",
        "use resume_mode=auto",
    ),
    "no key": (
        "trainer.logger=[wandb]",
        lambda s: s.env(WANDB_MODE="online", NETRC="none", WANDB_CONFIG_DIR="none"),
        "!login",
        "WANDB_MODE=offline",
    ),
    "quantized": (MINE, lambda s: s.model(quantization_config={}), "!architecture", "bfloat16 or float32 weights"),
    "too long": (MINE, lambda s: s.model(max_position_embeddings=512), "?architecture", "data.max_length=512"),
    "broken row": ("", lambda s: s.write("rows.jsonl", "{\n"), "!rows", "rows.jsonl:1: broken JSON"),
    "left out": ("data.on_bad_row=skip", lambda s: s.write("rows.jsonl", "{\n"), "?rows", "it is left out"),
    "template": ("data.chat_template=t", lambda s: s.write("t", "{% if %}"), "!rows", "template is broken in line 1"),
    "no end": ("data.chat_template=t", lambda s: s.write("t", ENDLESS), "!rows", "never learn to stop"),
    "tokens": ("data.chat_template=llama3", lambda s: None, "!rows", "model.new_tokens="),
    "no tokenizer": (
        MINE,
        lambda s: (s.model(), s.write("model/tokenizer.json", "{")),
        "!rows",
        "copy a whole one there",
    ),
    "leak": ("", lambda s: s.leaking(), "?cache", "take them out of one side"),
    "big model": ("", lambda s: s.memory(0.5), "!memory and disk", "the smallest change that fits"),
    "little memory": ("", lambda s: s.host(1), "!memory and disk", "async_save=false"),
    "full disk": ("", lambda s: s.free(1 << 20), "!memory and disk", "run: 6 checkpoints"),
    "tight disk": ("", lambda s: s.free(200 << 20), "?memory and disk", "lower trainer.max_ckpt_to_keep"),
}


@pytest.fixture(scope="module")
def planned() -> Forecast:
    return forecast.forecaster(load_config(WORDS), 80.0)(forecast.Change(2))


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planned: Forecast) -> Scene:
    def forecaster(config: object, memory_gib: float) -> Callable[[object], Forecast]:
        return lambda change: dataclasses.replace(planned, memory_gib=memory_gib)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(forecast, "forecaster", forecaster)
    return Scene(monkeypatch)


def complaints(words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[dict[str, str]]]:
    """The exit code, and all that is not ok."""
    first, *rest = shlex.split(words if words[:1].isdecimal() else f"2 {words}")
    code = doctor.main([first, *WORDS, *rest, "--json"])
    return code, [said for said in json.loads(capsys.readouterr().out)["checks"] if said["level"] != "ok"]


def test_a_good_machine_has_nothing_to_mend_and_nothing_is_left_on_it(
    scene: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    assert complaints("", capsys) == (0, [])
    assert sorted(path.name for path in Path().iterdir()) == ["rows.jsonl", "val.jsonl"]
    prepare_data_alone(load_config(WORDS))
    scene.checkpoint()
    scene.cards()
    assert doctor.main([*WORDS]) == 0
    out = capsys.readouterr().out
    assert "continues from run/global_step_2" in out and "prepared: 4 samples, 1 for validation" in out
    assert "[[Bye 0<|im_end|>]]" in out and "H100; torch" in out and "NCCL 2.29.3" in out


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_with_its_fix_and_nothing_else(
    name: str, scene: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    words, plant, check, piece = FAULTS[name]
    plant(scene)
    code, found = complaints(words, capsys)
    level = {"!": "fail", "?": "warn"}[check[0]]
    assert {(said["check"], said["level"]) for said in found} == {(check[1:], level)}
    assert any(piece in f"{said['what']} {said['fix']}" for said in found), found
    assert code == (level == "fail")


def test_what_is_no_configuration_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["2", "data.train_fils=x"]) == 2
    assert "did you mean 'data.train_files'" in capsys.readouterr().err


def test_what_needs_a_broken_part_is_named_instead_of_blamed_too(
    scene: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor.main([*WORDS, "model.partial_pretrain=./nope"]) == 1
    assert capsys.readouterr().out.endswith("is mended: architecture, rows, cache, memory and disk\n")
