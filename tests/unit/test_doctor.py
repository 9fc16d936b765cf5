"""`doctor` finds each injected fault with one check, prints its fix, and finds none on a good
machine.
"""

import json
import os
import shutil
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest
import torch
from checkpoint_fakes import save
from small_files import change_json

from trainer.checkpoint import fsio
from trainer.cli import doctor
from trainer.launch import checks as machine
from trainer.quickstart import MODEL_DIR
from trainer.tools.plan import memory
from trainer.tools.plan.memory import Change, planner
from trainer.tools.verify import checks
from trainer.train.start.compose import load_config, with_words

GIB = 2**30
ROW = '{{"messages": [{{"role": "user", "content": "Hi {0}"}}, {{"role": "assistant", "content": "Bye {0}"}}]}}\n'


class Scene:
    """A good machine and recipe, in the working directory. Its methods inject faults."""

    def __init__(self, patch):
        self.patch = patch
        self.write("rows.jsonl", "".join(ROW.format(number) for number in range(4)))
        self.write("val.jsonl", ROW.format("there"))
        for name in list(os.environ):
            if name.startswith(("WANDB", "NCCL", "GLOO", "SLURM", "NNODES")):
                patch.delenv(name)
        patch.setattr(machine.resource, "getrlimit", lambda kind: (8 << 20, GIB))
        patch.setattr(psutil, "net_if_addrs", lambda: {"lo": [], "eth0": []})
        patch.setattr(machine, "RDMA_DEVICES", Path("none"))
        self.free()

    def write(self, name, text):
        Path(name).write_text(text)

    def free(self, size_bytes=100 * GIB, shared_bytes=GIB):
        self.patch.setattr(
            fsio, "free_bytes", lambda path: shared_bytes if "shm" in str(path) else size_bytes
        )

    def cards(self, *, free_gib=80, host_gib=900):
        self.patch.setattr(machine, "gpus_for_run", lambda device: 2)
        self.patch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
        self.patch.setattr(memory, "host_memory_bytes", lambda: host_gib * GIB)
        self.patch.setattr(torch.cuda, "mem_get_info", lambda card: (free_gib * GIB, 80 * GIB))
        self.patch.setattr(torch.cuda, "get_device_name", lambda card: "H100")
        self.patch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 3))

    def model(self, **changes):
        shutil.copytree(MODEL_DIR, "model")
        change_json(Path("model/config.json"), **changes)
        self.write("model/model.safetensors", "")

    def checkpoint(self, pointer="2"):
        Path("run").mkdir()
        save(Path("run").absolute(), 2)
        self.write(POINTER, pointer)


WORDS = ["data.train_files=rows.jsonl", "data.val_files=val.jsonl", "data.cache_dir=tokens"]
WORDS += ["trainer.default_local_dir=run"]
BASE = load_config(WORDS)
MINE = "model.partial_pretrain=./model"
POINTER = "run/latest_checkpointed_iteration.txt"
FAULTS = {
    # name: words, what is done, the check that finds it (! fails, ? warns), words of what it says
    # and how to mend it
    "no card": (
        "trainer.device=cuda",
        lambda s: None,
        "?cards",
        "on the machine you will train on",
    ),
    "a busy card": ("", lambda s: s.cards(free_gib=8), "?cards", "CUDA_VISIBLE_DEVICES"),
    "little shm": (
        "",
        lambda s: (s.cards(), s.free(shared_bytes=64 << 20)),
        "?/dev/shm",
        "--shm-size=1g",
    ),
    "interface": (
        "",
        lambda s: (s.cards(), s.patch.setenv("NCCL_SOCKET_IFNAME", "ib0")),
        "!network",
        "unset NCCL_SOCKET_IFNAME",
    ),
    "no locks": (
        "",
        lambda s: s.patch.setattr(checks, "try_lock", Mock(side_effect=[False, True])),
        "!directories",
        "require_lock=false",
    ),
    "damaged pointer": ("", lambda s: s.checkpoint("x"), "?resume", "checkpoint ls"),
    "too long": (
        MINE,
        lambda s: s.model(max_position_embeddings=512),
        "?architecture",
        "data.max_length=512",
    ),
    "broken row": (
        "",
        lambda s: s.write("rows.jsonl", "{\n"),
        "!rows",
        "rows.jsonl:1: broken JSON",
    ),
    "big model": (
        "trainer.device=cpu",
        lambda s: s.cards(host_gib=0.5),
        "!memory and disk",
        "smallest change",
    ),
    "full disk": ("", lambda s: s.free(1 << 20), "!memory and disk", "at most 6 at once"),
}


@pytest.fixture(scope="module")
def planned():
    return planner(BASE)(Change(2))


@pytest.fixture
def scene(tmp_path, monkeypatch, planned):
    # hydra takes a tenth of a second to read the same files
    def composed(words):
        return with_words(BASE, words)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("trainer.train.start.compose.load_config", composed)
    monkeypatch.setattr(memory, "planner", lambda config: lambda change: planned)
    return Scene(monkeypatch)


def complaints(words, capsys):
    """The exit code, and all that is not ok."""
    code = doctor.main(["2", *WORDS, *words.split(), "--json"])
    checks = json.loads(capsys.readouterr().out)["checks"]
    return code, [said for said in checks if said["level"] != "ok"]


def test_a_good_machine_has_nothing_to_mend_and_nothing_is_left_on_it(scene, capsys):
    assert complaints("", capsys) == (0, [])
    assert sorted(path.name for path in Path().iterdir()) == ["rows.jsonl", "val.jsonl"]
    scene.checkpoint()
    scene.cards()
    assert doctor.main([*WORDS]) == 0
    out = capsys.readouterr().out
    assert "continues from run/global_step_2" in out and "[[Bye 0<|im_end|>]]" in out


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_with_its_fix_and_nothing_else(name, scene, capsys):
    words, plant, check, piece = FAULTS[name]
    plant(scene)
    code, found = complaints(words, capsys)
    level = {"!": "fail", "?": "warn"}[check[0]]
    assert {(said["check"], said["level"]) for said in found} == {(check[1:], level)}
    assert any(piece in f"{said['what']} {said['fix']}" for said in found), found
    assert code == (level == "fail")


def test_what_needs_a_broken_part_is_named_instead_of_blamed_too(scene, capsys):
    assert doctor.main([*WORDS, "model.partial_pretrain=./nope"]) == 1
    out = capsys.readouterr().out.splitlines()
    skipped = [line.split(":")[0] for line in out if line.startswith("skip")]
    assert skipped == ["skip  architecture", "skip  rows", "skip  memory and disk"]
