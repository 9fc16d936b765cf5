"""What the report advises for our own runs, the trainer accepts: every key and value it names."""

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from report_curves import OUR_CONFIG
from report_faults import FAULTS, healthy

from trainer.config import known_keys
from trainer.report.advice import ADVICE, watch
from trainer.report.analyse import analyse
from trainer.report.analysed_run import AnalysedRun
from trainer.run.compose import load_config

KEY = re.compile(r"\b(?:data|model|optim|trainer)\.[a-z_]\w*(?:\.\w+)*")
OVERRIDE = re.compile(rf"({KEY.pattern})(?:=| to )([\w.-]+\w)")
BARE = re.compile(r"\b\w+=")
"""Of any option: ours all have a section before them."""


@cache
def advice() -> tuple[str, ...]:
    """Every remedy of every fault, told of a run of our own."""
    texts: list[str] = []
    for _, _, build in FAULTS:
        report = analyse(replace(build(), source="fsdp-sft", config=OUR_CONFIG))
        texts += [finding.remedy for finding in report.findings]
    return tuple(dict.fromkeys(filter(None, texts)))


def every_remedy() -> Iterator[str]:
    """Those, and each sentence of advice for itself, with and without a known configuration."""
    yield from advice()
    for kind in ("sft", "grpo", "controller"):
        for config in ({}, OUR_CONFIG):
            run = AnalysedRun(
                replace(healthy(kind), source="fsdp-sft", config=config), kind, {"lr_jump": 3.0}
            )
            yield from (advice_of(run).text for advice_of in ADVICE)


def test_every_key_and_value_advised_is_one_of_the_trainer() -> None:
    texts = list(every_remedy())
    assert len(texts) > 60
    unknown = {key: text for text in texts for key in KEY.findall(text) if key not in known_keys()}
    assert unknown == {}
    overrides = {(key, value) for text in texts for key, value in OVERRIDE.findall(text)}
    assert {
        "optim.clip_grad",
        "trainer.test_freq",
        "trainer.guard.on_severe",
        "optim.lr_scheduler",
    } <= {key for key, _ in overrides}
    for key, value in sorted(overrides):
        if re.fullmatch(r"[\d.e-]+|true|false|[a-z]+", value) and value not in ("a", "tenth"):
            load_config([f"{key}={value}"])


def test_no_option_of_another_framework_is_advised() -> None:
    foreign = {
        text: words
        for text in every_remedy()
        for words in BARE.findall(text)
        if not re.search(rf"\.{words}", text)
    }
    assert foreign == {}


@pytest.mark.covers("S2.41")
def test_the_burst_of_another_framework_is_answered_in_words_and_its_own_options() -> None:
    run: Any = AnalysedRun(healthy("grpo"), "grpo", {"lr_jump": 3.0})
    assert watch(run).text == (
        "Validate and save often (eval_steps=100 and save_steps=100); at kl > 10 or a clipped "
        "ratio > 0.3 keep a snapshot and return to a checkpoint, or stop."
    )


def test_each_piece_of_advice_comes_with_its_principle_and_its_cost() -> None:
    told = set()
    for _, kind, build in FAULTS:
        log = build()
        run = AnalysedRun(log, kind, {"lr_jump": 3.0})
        sentences = {one.text: one.why for one in (advice_of(run) for advice_of in ADVICE)}
        for finding in analyse(log, profile=kind).findings:
            expected = {why for sentence, why in sentences.items() if sentence in finding.remedy}
            assert expected == set(finding.reasons), finding
            told |= expected
    assert len(told) >= 10 and all("; " in why for why in told)
