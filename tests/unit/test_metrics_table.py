"""The table of metrics: keys are found, ranks' values are combined, logged keys are in it."""

import ast
import math
import re
import warnings
from dataclasses import replace
from typing import Any

import pytest
from acceptance.table import all_lines

from trainer.tools.report.vocabulary import lookup, meaning
from trainer.tracking import Tracking, metrics, read_metrics
from trainer.tracking.metrics import FOREIGN, METRICS
from trainer.tracking.metrics.words import COMBINED, Metric

KNOWN = METRICS | FOREIGN
EXAMPLES = {
    "<source>": "web/pages",
    "<term>": "z",
    "<end>": "low",
    "<operation>": "rollout",
    "<block>": "model.layers.3",
    "<name>": "Format",
    "<infix>": "sft/do_checkpoint",
    "<device>": "7",
    "<split>": "val",
    "<statistic>": "max",
}
LOGGED = re.compile(
    r"(?:train|val|time|throughput|memory|optim|progress|data|guard|system|ckpt|checkpoint|obs)/[\w/()-]+"
)
LOGGING = ("train", "checkpoint", "optim", "data", "tracking/facade.py", "runtime")
RL_KEYS = {
    "S0.11": """
        train/reward_total_mean train/reward_total_std train/reward_total_min
        train/reward_total_max""",
    "S0.12": "train/reward_correct_mean train/reward_format_mean train/tag_count_reward_mean",
    "S0.13": """
        eval/reward_total_mean eval/reward_total_std eval/reward_total_min
        eval/reward_total_max eval/reward_correct_mean eval/reward_format_mean
        eval/tag_count_reward_mean""",
    "S0.15": "train/adv_mean train/adv_std train/adv_min train/adv_max",
    "S0.17": "train/entropy",
    "S0.22": "time/train/rollout_s time/train/reward_s time/train/advantages_s",
    "S0.25": "time/eval/rollout_s time/eval/reward_s",
    "S0.32": "weights/sync_s weights/version weights/bytes",
    "S1.16": "reward",
    "S2.3": "kl clip_ratio clip_ratio/low_mean clip_ratio/high_max clip_ratio/region_mean",
    "S2.4": "reward reward_std rewards/Format/mean rewards/AnswerMatchCosine/std",
    "S2.5": """
        completions/min_length completions/mean_length completions/max_length
        completions/clipped_ratio""",
    "S2.13": "rewards/Format/mean",
    "S2.14": "rewards/AnswerMatchCosine/mean rewards/PlaneMatchString/mean",
    "S2.15": "completions/mean_length",
    "S2.16": "completions/min_length",
    "S2.17": "completions/max_length",
    "S2.18": "completions/clipped_ratio",
    "S2.19": "clip_ratio",
    "S4.1": "val/score/mean val/score/max val/score/min",
    "S4.2": "critic/lr critic/loss critic/value critic/vpred critic/clipfrac critic/error",
    "S4.3": "critic/score/mean critic/score/max critic/score/min",
    "S4.4": "critic/rewards/mean critic/rewards/max critic/rewards/min",
    "S4.5": "critic/advantages/mean critic/advantages/max critic/advantages/min",
    "S4.6": "critic/returns/mean critic/returns/max critic/returns/min",
    "S4.7": "critic/values/mean critic/values/max critic/values/min",
    "S4.8": """
        tokens/response_length/mean tokens/response_length/max tokens/response_length/min""",
    "S4.9": "tokens/prompt_length/mean tokens/prompt_length/max tokens/prompt_length/min",
    "S4.10": "actor/lr",
    "S4.11": """
        actor/ppo_ratio_high_clipfrac actor/ppo_ratio_low_clipfrac actor/ppo_ratio_clipfrac""",
    "S4.12": "actor/ratio_mean actor/ratio_max actor/ratio_min",
    "S4.13": "actor/clipfrac",
    "S4.14": "actor/kl_loss",
    "S4.15": "actor/total_loss",
    "S4.16": "actor/approxkl actor/policykl",
    "S4.17": "critic/ref_log_prob/mean critic/old_log_prob/mean",
    "S4.18": "critic/entropy/mean",
    "S4.19": "critic/reward_clip_frac",
    "S4.20": "actor/pg_loss actor/weighted_pg_loss",
    "S4.22": "actor/sample_weights_mean actor/sample_weights_max actor/sample_weights_min",
    "S4.23": "actor/positive_sft_loss actor/negative_sft_loss",
    "S4.26": """
        time/rollout time/ref_log_probs_values_reward time/old_log_probs_values time/adv""",
    "S4.27": "time/actor_train/generate/total time/actor_train/compute_log_probs/execute",
}
"""Acceptance lines marked F -> keys that other trainers log."""


def found(key: str) -> Metric:
    metric = lookup(key)
    assert metric is not None, key
    return metric


def test_every_line_for_rl_has_its_keys_here():
    assert [line.id for line in all_lines() if "F" in line.marks and line.id not in RL_KEYS] == []


@pytest.mark.covers(
    "S0.11", "S0.12", "S0.13", "S0.15", "S0.22", "S0.32", "S1.16", "S2.4",
    "S2.5", "S4.1", "S4.2", "S4.3", "S4.4", "S4.5", "S4.6", "S4.7",
    "S4.8", "S4.9", "S4.10", "S4.11", "S4.12", "S4.13", "S4.14", "S4.15",
    "S4.16", "S4.17", "S4.18", "S4.20", "S4.22", "S4.26", "S0.17:F", "S0.25:F",
    "S2.13:F", "S2.14:F", "S2.15:F", "S2.16:F", "S2.17:F", "S2.18:F", "S2.19:F", "S4.19:F",
    "S4.23:F", "S4.27:F",
)  # fmt: skip
def test_keys_of_reinforcement_learning_are_known_and_can_be_logged(tmp_path):
    keys = {key for text in RL_KEYS.values() for key in text.split()}
    for key in keys:
        assert found(key).unit and found(key).meaning and found(key).key in FOREIGN, key
    tracking = Tracking("project", "experiment", [], {}, run_dir=tmp_path, total_steps=1)
    tracking.log(dict.fromkeys(keys, 0.5), step=1)
    tracking.finish(0)
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    assert keys <= row.keys()


@pytest.mark.covers("S0.3")
def test_entries_are_complete():
    assert len(KNOWN) == len(METRICS) + len(FOREIGN)
    assert [key for key in METRICS if "/" not in key] == []
    for metric in KNOWN.values():
        assert metric.meaning.endswith(".") and len(metric.meaning) > 10, metric.key
        assert metric.better in ("up", "down", "middle", "none"), metric.key
    for metric in METRICS.values():
        assert metric.source in METRICS
        assert metric.over_ranks in {*COMBINED, "global", "guard", "main"}


@pytest.mark.parametrize("key", [key for key in KNOWN if "<" in key])
def test_a_key_with_placeholders_is_found_by_what_is_logged(key):
    logged = key
    for placeholder, example in EXAMPLES.items():
        logged = logged.replace(placeholder, example)
    assert "<" not in logged and lookup(logged) is KNOWN[key]


@pytest.mark.covers("S0.8")
def test_validation_mirrors_training():
    """Each key of validation has a twin with the same unit and direction, or is listed here."""
    alone = {"loss_stderr", "best_loss", "best_step", "gap", "samples", "tokens", "total_s"}
    places = (
        ("val/", "train/"),
        ("time/eval/", "time/train/"),
        ("throughput/eval/", "throughput/train/"),
    )
    num_twins = 0
    for metric in KNOWN.values():
        for there, here in places:
            name = metric.key.removeprefix(there)
            if name == metric.key or name in alone or "score/" in name:
                continue
            twin = found(here + name)
            assert (twin.unit, twin.better) == (metric.unit, metric.better), metric.key
            num_twins += 1
    assert num_twins > 20


@pytest.mark.covers("S0.5", "S2.3:C")
@pytest.mark.parametrize(
    ("key", "entry"),
    [
        ("eval/loss", "val/loss"),
        ("eval/loss_by/code", "val/loss_by/<source>"),
        ("train/kl", "kl"),
        ("eval/rewards/Format/mean", "rewards/<name>/mean"),
        ("train/reward_mean", "reward_mean"),
        ("train/loss@max", "train/loss"),
        ("eval/loss@p99", "val/loss"),
        ("train/progress/step", None),
        ("train/source_losses", None),
        ("", None),
        ("@sum", None),
        ("train/loss@often", None),
        ("time/sft/total", None),
        ("rewards/Format/mean/more", None),
    ],
)
def test_keys_are_found_under_other_spellings(key, entry):
    metric = lookup(key)
    assert (metric and metric.key) == entry


def test_an_unknown_key_has_a_likely_group():
    assert (meaning("val/accuracy").group, meaning("val/accuracy").unit) == ("reward", "share")
    assert (meaning("memory/other").group, meaning("odd").group) == ("memory", "other")


def test_a_value_under_an_unknown_name_is_warned_of_and_logged_as_rank_0_has_it():
    metrics.take_for_row()
    with pytest.warns(metrics.UnknownMetricWarning, match="'train/los' is not in the table"):
        metrics.put("train/los", 1.5)
    assert metrics.take_for_row() == {"train/los": 1.5}


def test_a_placeholder_that_ranks_combine_needs_an_entry_for_its_key(monkeypatch):
    metrics.take_travelling()
    monkeypatch.setattr(metrics, "METRICS", dict(METRICS))
    entry = replace(METRICS["train/loss_max_rank"], key="test/loss_by/<source>", over_ranks="sum")
    metrics.METRICS[entry.key] = entry
    with (
        warnings.catch_warnings(),
        pytest.raises(ValueError, match=r"'test/loss_by/web' .*\nFix: "),
    ):
        warnings.simplefilter("ignore")  # as in a run, where it is an error too
        metrics.put("test/loss_by/web", 1.0)
    assert metrics.take_travelling() == metrics.take_for_row() == {}, "rank 0's value for all"
    metrics.METRICS["test/loss_by/web"] = replace(entry, key="test/loss_by/web")
    metrics.put("test/loss_by/web", 2.0)
    assert metrics.take_for_row() == {}
    assert metrics.take_travelling() == {"test/loss_by/web": 2.0}


@pytest.mark.parametrize(
    ("way", "values", "expected"),
    [
        ("sum", (1.0, 2.0), 3.0),
        ("mean", (1.0, 2.0), 1.5),
        ("max", (1.0, math.inf), math.inf),
        ("min", (1.0, 2.0), 1.0),
        ("slowest", (1.0, 3.0, 2.0), 1),
        ("mean", (metrics.ABSENT, 4.0), 4.0),
        ("slowest", (metrics.ABSENT, 4.0, metrics.ABSENT), 1),
        ("max", (math.nan, 1.0), math.nan),
        ("max", (1.0, math.nan), math.nan),
    ],
)
def test_values_of_ranks_become_one(way, values, expected):
    entry = replace(METRICS["train/nonfinite"], key="test/x", over_ranks=way)
    found = metrics.combine([entry], {"test/x": values})
    assert found["test/x"] == pytest.approx(expected, nan_ok=True)
    assert metrics.combine([entry], {"test/x": (metrics.ABSENT,)}) == {}


def keys_logged_in(source: str) -> set[str]:
    """Texts that look like keys of metrics; parts of f-strings do not count."""
    tree = list(ast.walk(ast.parse(source)))
    parts = {part for node in tree if isinstance(node, ast.JoinedStr) for part in node.values}
    texts: list[Any] = [n.value for n in tree if isinstance(n, ast.Constant) and n not in parts]
    return {text for text in texts if isinstance(text, str) and LOGGED.fullmatch(text)}


@pytest.mark.covers("S0.34")
def test_every_key_that_the_trainer_logs_is_in_the_table(repository):
    paths = [repository / "trainer" / name for name in LOGGING]
    assert all(path.exists() for path in paths), "a renamed path would be passed over"
    files = [file for path in paths for file in ([path] if path.is_file() else path.rglob("*.py"))]
    logged = {key for file in files for key in keys_logged_in(file.read_text(encoding="utf-8"))}
    assert len(logged) >= 15
    assert [key for key in sorted(logged) if metrics.find(key) is None] == []


@pytest.mark.covers("S1.6")
def test_the_docs_say_how_to_open_tensorboard(repository):
    text = (repository / "docs/tracking.md").read_text(encoding="utf-8")
    assert "tensorboard --logdir=" in text and "--port=6006" in text
    assert "VS Code" in text and "Cursor" in text
