"""Tests of the changes that a resume refuses, warns about, or permits, one for each class. Every
difference is shown.
"""

import pytest

from trainer.checkpoint.lineage import REFUSED, WARNED, compare, describe_run
from trainer.config import RESUME_ALLOW, Config, ConfigError, keys_of
from trainer.train.start.compose import load_config

VALUES = {"data": "d1", "train_batch_size": 8, "seed": 1, "tokenizer": "t1", "model_config": "m1"}
VALUES |= {"validation": "v1", "other_parts": "o1", "torch": "2.13"}


def fingerprints(*overrides, **values):
    return describe_run(load_config(list(overrides)).resolved, **{**VALUES, **values})


def test_what_can_be_allowed_is_what_is_refused():
    assert set(RESUME_ALLOW) == set(REFUSED)
    assert {key for key in WARNED if "." in key} <= set(keys_of(Config))


@pytest.mark.covers("S3.30")
@pytest.mark.parametrize("name", REFUSED)
def test_another_run_is_refused_by_name_unless_allowed(name):
    now = fingerprints(**{name: "other"})
    with pytest.raises(ConfigError, match=rf"{name}: .* -> other   <- refused") as caught:
        compare(fingerprints(), now)
    assert f"trainer.resume_allow=[{name}]" in str(caught.value)
    (accepted,) = compare(fingerprints(), now, allow=(name,))
    for text in (str(caught.value), accepted):
        assert f"{name}: " in text and REFUSED[name] in text


def test_every_refused_difference_must_be_allowed():
    with pytest.raises(ConfigError, match=r"resume_allow=\[data\]"):
        compare(fingerprints(), fingerprints(seed=2, data="d2"), allow=("seed",))


@pytest.mark.parametrize(
    ("override", "lines"),
    [
        ("data.max_length=1024", ["data.max_length: 2048 -> 1024"]),
        ("optim.betas=[0.9,0.999]", ["optim.betas: [0.9, 0.95] -> [0.9, 0.999]"]),
        ("optim.clip_grad=0.5", ["optim.clip_grad: 1.0 -> 0.5"]),
        (
            "trainer.checkpoint.export_dtype=float32",
            ["trainer.checkpoint.export_dtype: bfloat16 -> float32"],
        ),
        ("trainer.save_freq=7", []),
        ("trainer.logger=[]", []),
        ("data.num_workers=3", []),
        ("data.micro_batch_size_per_gpu=2", []),
    ],
)
def test_what_may_change_the_numbers_is_shown_and_the_rest_is_free(override, lines):
    assert compare(fingerprints(), fingerprints(override)) == lines


def test_a_missing_fingerprint_is_not_compared():
    saved = {key: value for key, value in fingerprints().items() if key != "seed"}
    assert compare(saved, fingerprints(seed=9)) == []
