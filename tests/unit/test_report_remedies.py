"""The trainer accepts every key and value that the report advises for our own runs."""

import re
from dataclasses import replace
from functools import cache
from itertools import chain

from report_curves import OUR_CONFIG
from report_faults import healthy

from trainer.config import Config, keys_of
from trainer.tools.report.advice import ADVICE, REASONS, advise
from trainer.tools.report.analysed_run import AnalysedRun
from trainer.train.start.compose import load_config

KEY = re.compile(r"\b(?:data|model|optim|trainer)\.[a-z_]\w*(?:\.\w+)*")
OVERRIDE = re.compile(rf"({KEY.pattern})(?:=| to )([\d.e-]*\d|true|cosine|rollback)\b")
BARE = re.compile(r"(?<![.\w])\w+=")
"""An option without a section. Our options all have one."""


@cache
def remedies():
    """Every piece of advice, as shown for a run of this trainer."""
    texts = []
    for config in ({}, OUR_CONFIG):
        run = AnalysedRun(replace(healthy("grpo"), source="fsdp-sft", config=config), "grpo")
        texts += [advise(run, name, 1)[0] for name in (*ADVICE, *chain(*REASONS.values()))]
    return tuple(dict.fromkeys(texts))


def test_every_key_and_value_advised_is_one_of_the_trainer():
    unknown = {key for text in remedies() for key in KEY.findall(text)} - set(keys_of(Config))
    assert unknown == set()
    for key, value in sorted({pair for text in remedies() for pair in OVERRIDE.findall(text)}):
        load_config([f"{key}={value}"])


def test_no_option_of_another_framework_is_advised():
    assert [text for text in remedies() if BARE.search(text)] == []
