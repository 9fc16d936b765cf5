"""What `auto` stands for: the fastest that fits, the same whenever it is asked, and on a resume what there was."""

import dataclasses
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import checkpoint_fakes
import pytest
import torch
from test_memory_plan import a_plan
from toy import write_model_config

from trainer.checkpoint.manifest import MANIFEST, parse_manifest
from trainer.cli import plan
from trainer.config import MAX_TOKENS, RECOMPUTE, ConfigError
from trainer.launch.ranks import NodeLayout, chosen_words
from trainer.planner import choose
from trainer.planner.fake_step import Workload
from trainer.planner.forecast import GIB, Change, Forecast, default_memory_gib
from trainer.planner.roofline import MATMUL, MEMORY, Card, DeviceOperation
from trainer.run.compose import load_config
from trainer.runtime import distributed

CARD = Card("card", 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 80.0, launch_us=0.0)
AUTO = [f"{MAX_TOKENS}=auto", f"{RECOMPUTE}=auto"]
GIB_PER_TOKEN = {"false": 10.0, "selective": 6.0, "true": 1.0, "offload": 0.5}
WORK_PER_TOKEN = {"false": 3.0, "selective": 3.1, "true": 4.0, "offload": 4.0}


def forecasts(memory_gib: float, asked: list[Change], *, once: float = 0.0) -> Callable[[Change], Forecast]:
    """Memory and time grow with the tokens of a micro-batch; `once`: seconds more for each micro-batch."""

    def forecast(change: Change) -> Forecast:
        asked.append(change)
        words = dict(word.split("=") for word in change.overrides)
        number, how = int(words.get(MAX_TOKENS, 4)), words.get(RECOMPUTE, "false")
        phase = (0, "forward", 0)
        operations = Counter(
            {
                DeviceOperation(phase, "products", MATMUL, int(1e12 * WORK_PER_TOKEN[how] * number), 0): 1,
                DeviceOperation(phase, "once", MEMORY, 0, int(1e9 * once)): 1,
            }
        )
        found = a_plan(8, int(GIB_PER_TOKEN[how] * number * GIB))
        found = dataclasses.replace(found, workload=Workload((1,) * number, 1), operations=operations)
        return Forecast(found, memory_gib, is_cuda=True)

    return forecast


def taken(memory_gib: float, *words: str, once: float = 0.0) -> tuple[str, int]:
    """What is taken by 8 ranks with 16 documents of one token each, and how many plans it took."""
    asked: list[Change] = []
    config = load_config(["data.max_length=1", "data.train_batch_size=128", *words])
    tried = choose.search(config, 8, CARD, forecasts(memory_gib, asked, once=once))
    assert len(tried) == len(asked)
    return " ".join(word.split("=")[1] for word in choose.best(tried).change.overrides), len(tried)


def test_the_fastest_that_fits_is_taken() -> None:
    """Nothing recomputed while that fits; more of it where longer micro-batches make up for it."""
    assert taken(1000.0, *AUTO) == ("16 false", 5)
    assert taken(60.0, *AUTO) == ("4 false", 7)
    assert taken(60.0, *AUTO, once=4.0) == ("8 selective", 7)
    assert taken(60.0, *AUTO, once=100.0) == ("16 true", 7)
    assert taken(60.0, *AUTO, "model.compile=true", once=4.0) == ("8 selective", 7)
    assert taken(60.0, *AUTO, "model.compile=true", "trainer.device=cpu", once=4.0) == ("4 false", 6)
    assert taken(60.0, AUTO[0], f"{RECOMPUTE}=true", once=4.0)[0] == "4", "the recomputation is not asked for"
    assert taken(30.0, AUTO[1])[0] == "selective"
    assert taken(60.0, *AUTO, "data.micro_batch_size_per_gpu=3") == ("3 false", 3)


def test_the_memory_is_not_filled_to_the_brim() -> None:
    needed_gib = 10.0 * 16 * 1.05 + 3.0
    assert taken(needed_gib * 1.02, *AUTO)[0] != "16 false"
    assert taken(needed_gib / choose.MARGIN + 0.1, *AUTO)[0] == "16 false"
    assert taken(needed_gib / choose.MARGIN - 0.1, *AUTO)[0] != "16 false"


def test_nothing_that_is_faster_is_left_out() -> None:
    """Against all of them, planned."""
    for memory_gib in (13.0, 30.0, 60.0, 100.0):
        for once in (0.0, 4.0, 20.0, 100.0):
            found = taken(memory_gib, *AUTO, once=once)[0]
            forecast = forecasts(memory_gib, [], once=once)
            speeds = {}
            for how in GIB_PER_TOKEN:
                for number in (1, 2, 4, 8, 16):
                    change = Change(8, (f"{MAX_TOKENS}={number}", f"{RECOMPUTE}={how}"))
                    candidate = choose._candidate(how, change, forecast(change), CARD)
                    if candidate.fits:
                        speeds[f"{number} {how}"] = candidate.tokens_per_s
            assert speeds[found] == pytest.approx(max(speeds.values()))


def a_model(path: Path) -> list[str]:
    write_model_config(path)
    words = [f"model.partial_pretrain={path}", "data.max_length=32", "data.train_batch_size=8"]
    return [*words, f"trainer.default_local_dir={path / 'run'}", "trainer.device=cpu", *AUTO]


def test_without_a_card_it_is_the_least_recomputation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = a_model(tmp_path)
    words.append("data.train_batch_size=4")
    assert choose.automatic(load_config(words), 4, num_here=2) == [f"{MAX_TOKENS}=32", f"{RECOMPUTE}=false"]
    share_gib = default_memory_gib(load_config(words), 2)  # two of the four are here
    how = "the least recomputation, then the longest"
    assert f"of what takes at most 95% of {share_gib:.1f} GiB {how}" in capsys.readouterr().err
    monkeypatch.setattr(choose, "default_memory_gib", lambda *_: 0.1)
    assert choose.main(["4", "2", *words]) == 2
    said = capsys.readouterr().err.splitlines()
    nearest = f"{MAX_TOKENS}=32 {RECOMPUTE}="
    assert said[-1].startswith(f"ERROR: nothing fits 95% of 0.1 GiB; the nearest, {nearest}")


def test_a_resume_takes_what_the_checkpoint_was_trained_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the card or the planner say by then; other ranks, or weights alone, choose anew."""
    words = a_model(tmp_path)
    monkeypatch.setattr(choose, "search", lambda *_: pytest.fail("planned again"))
    (tmp_path / "run").mkdir()
    checkpoint_fakes.save(tmp_path / "run", 3)
    manifest = tmp_path / "run" / "global_step_3" / MANIFEST
    saved = parse_manifest(manifest.read_text())
    fsio_bytes = dataclasses.replace(saved, fingerprints={MAX_TOKENS: "None", RECOMPUTE: "True", "seed": "1"}).to_json()
    manifest.write_text(fsio_bytes)
    assert choose.automatic(load_config(words), 2, num_here=2) == [f"{MAX_TOKENS}=null", f"{RECOMPUTE}=true"]
    assert "as global_step_3 was trained" in capsys.readouterr().err
    alone = choose.automatic(load_config([*words, f"{MAX_TOKENS}=64"]), 2, num_here=2)
    assert alone == [f"{RECOMPUTE}=true"]
    assert choose.recorded(load_config(words), 4) is None
    path = [f"trainer.resume_from_path={manifest.parent}", "trainer.resume_mode=resume_path"]
    weights_alone = [*path, "trainer.checkpoint.load_contents=[model]"]
    assert choose.recorded(load_config([*words, *path]), 2) is not None
    assert choose.recorded(load_config([*words, *weights_alone]), 2) is None


def test_the_launcher_hands_the_words_to_every_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\necho "$@" >{tmp_path}/asked; echo a=1; echo b=2; exit $(cat {tmp_path}/code)')
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    (tmp_path / "code").write_text("0")
    assert chosen_words(8, NodeLayout(num_nodes=2), ["x=auto"]) == ["a=1", "b=2"]
    assert (tmp_path / "asked").read_text() == "-m trainer.planner.choose 16 8 x=auto\n"
    (tmp_path / "code").write_text("2")
    with pytest.raises(ConfigError, match="the reason stands above"):
        chosen_words(8, NodeLayout(), ["x=auto"])


def test_the_plan_shows_what_it_would_take_and_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [word for word in a_model(tmp_path) if word != "trainer.device=cpu"]
    assert plan.main(["2", *words, "--card", "H100"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "auto: of what takes at most 95% of 79.1 GiB the fastest at the rates of H100"
    assert [line.split("tokens/s  ")[1] for line in lines[1:4]] == [
        f"{MAX_TOKENS}={number} {RECOMPUTE}=false{mark}" for number, mark in ((32, ""), (64, ""), (128, " <- taken"))
    ]
    assert "micro-batch: up to 128 tokens" in lines[5]


def test_machines_that_chose_otherwise_do_not_train_together(monkeypatch: pytest.MonkeyPatch) -> None:
    def gathered(found: list[object], own: object) -> None:
        found[:] = [own, ("other", None, {"a": "2"})]

    monkeypatch.setattr(distributed.dist, "all_gather_object", gathered)
    with pytest.raises(
        ConfigError, match=r"(?s)different inputs.*\n  a: 1 on .* \(rank 0\), 2 on other \(rank 1\)\nFix: "
    ):
        distributed._require_all(torch.device("cpu"), 2, card=None, facts={"a": "1"})


@pytest.mark.parametrize("word", [f"{MAX_TOKENS}=automatic", f"{MAX_TOKENS}=0", f"{RECOMPUTE}=automatic"])
def test_only_auto_is_automatic(word: str) -> None:
    with pytest.raises(ConfigError, match=r"must be (auto, null or at least 1|one of .*auto)"):
        load_config([word])
