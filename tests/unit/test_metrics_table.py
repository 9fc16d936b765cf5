"""The table of metrics: every key is found, views of it agree, its page is up to date."""

import ast
import math
import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from acceptance.table import all_lines

from trainer import metrics
from trainer.config import known_keys
from trainer.metrics import METRICS
from trainer.metrics.words import (
    COMBINED,
    GROUPS,
    OVER_RANKS,
    PLACEHOLDERS,
    Metric,
    pattern,
    split_reducer,
)
from trainer.report.vocabulary import FOREIGN, Foreign, lookup
from trainer.tracking import Tracking, read_metrics

EXAMPLES = {
    "<source>": "web/pages",
    "<group>": "no_decay",
    "<block>": "model.layers.3",
    "<name>": "Format",
    "<infix>": "sft/do_checkpoint",
    "<device>": "7",
}
LOGGED = re.compile(
    r"(?:train|val|time|throughput|memory|optim|progress|data|guard|system|ckpt|checkpoint|obs)/[\w/()-]+"
)
LOGGING_FILES = (
    "loop",
    "run",
    "guard",
    "batch.py",
    "monitor",
    "checkpoint",
    "optim",
    "data",
    "tracking/facade.py",
    "runtime",
)
STATISTICS = ("mean", "max", "min")


def three(key: str) -> list[str]:
    return [f"{key}/{statistic}" for statistic in STATISTICS]


RL_KEYS = {
    "S0.11": [f"train/reward_total_{statistic}" for statistic in ("mean", "std", "min", "max")],
    "S0.12": [
        "train/reward_correct_mean",
        "train/reward_format_mean",
        "train/tag_count_reward_mean",
    ],
    "S0.13": [
        *(f"eval/reward_total_{statistic}" for statistic in ("mean", "std", "min", "max")),
        *("eval/reward_correct_mean", "eval/reward_format_mean", "eval/tag_count_reward_mean"),
    ],
    "S0.15": [f"train/adv_{statistic}" for statistic in ("mean", "std", "min", "max")],
    "S0.17": ["train/entropy"],
    "S0.22": ["time/train/rollout_s", "time/train/reward_s", "time/train/advantages_s"],
    "S0.25": ["time/eval/rollout_s", "time/eval/reward_s"],
    "S0.32": ["weights/sync_s", "weights/version", "weights/bytes"],
    "S1.16": ["reward"],
    "S2.3": [
        "kl",
        "clip_ratio",
        "clip_ratio/low_mean",
        "clip_ratio/high_max",
        "clip_ratio/region_mean",
    ],
    "S2.4": ["reward", "reward_std", "rewards/Format/mean", "rewards/AnswerMatchCosine/std"],
    "S2.5": [
        *("completions/min_length", "completions/mean_length", "completions/max_length"),
        "completions/clipped_ratio",
    ],
    "S2.13": ["rewards/Format/mean"],
    "S2.14": ["rewards/AnswerMatchCosine/mean", "rewards/PlaneMatchString/mean"],
    "S2.15": ["completions/mean_length"],
    "S2.16": ["completions/min_length"],
    "S2.17": ["completions/max_length"],
    "S2.18": ["completions/clipped_ratio"],
    "S2.19": ["clip_ratio"],
    "S4.1": three("val/score"),
    "S4.2": [f"critic/{name}" for name in ("lr", "loss", "value", "vpred", "clipfrac", "error")],
    "S4.3": three("critic/score"),
    "S4.4": three("critic/rewards"),
    "S4.5": three("critic/advantages"),
    "S4.6": three("critic/returns"),
    "S4.7": three("critic/values"),
    "S4.8": three("tokens/response_length"),
    "S4.9": three("tokens/prompt_length"),
    "S4.10": ["actor/lr"],
    "S4.11": [
        "actor/ppo_ratio_high_clipfrac",
        "actor/ppo_ratio_low_clipfrac",
        "actor/ppo_ratio_clipfrac",
    ],
    "S4.12": [f"actor/ratio_{statistic}" for statistic in STATISTICS],
    "S4.13": ["actor/clipfrac"],
    "S4.14": ["actor/kl_loss"],
    "S4.15": ["actor/total_loss"],
    "S4.16": ["actor/approxkl", "actor/policykl"],
    "S4.17": ["critic/ref_log_prob/mean", "critic/old_log_prob/mean"],
    "S4.18": ["critic/entropy/mean"],
    "S4.19": ["critic/reward_clip_frac"],
    "S4.20": ["actor/pg_loss", "actor/weighted_pg_loss"],
    "S4.22": [f"actor/sample_weights_{statistic}" for statistic in STATISTICS],
    "S4.23": ["actor/positive_sft_loss", "actor/negative_sft_loss"],
    "S4.26": [
        f"time/{name}"
        for name in ("rollout", "ref_log_probs_values_reward", "old_log_probs_values", "adv")
    ],
    "S4.27": ["time/actor_train/generate/total", "time/actor_train/compute_log_probs/execute"],
}
"""Lines marked F -> their keys as others log them."""
KNOWN: tuple[Metric | Foreign, ...] = (*METRICS.values(), *FOREIGN)


def found(key: str) -> Metric | Foreign:
    metric = lookup(key)
    assert metric is not None, key
    return metric


def test_every_line_for_rl_has_its_keys_here() -> None:
    assert [line.id for line in all_lines() if "F" in line.marks and line.id not in RL_KEYS] == []


@pytest.mark.covers("S0.11", "S0.12", "S0.13", "S0.15", "S0.22", "S0.32", "S1.16", "S2.4", "S2.5")
@pytest.mark.covers(
    "S4.1",
    "S4.2",
    "S4.3",
    "S4.4",
    "S4.5",
    "S4.6",
    "S4.7",
    "S4.8",
    "S4.9",
    "S4.10",
    "S4.11",
    "S4.12",
)
@pytest.mark.covers(
    "S0.17:F",
    "S0.25:F",
    "S2.13:F",
    "S2.14:F",
    "S2.15:F",
    "S2.16:F",
    "S2.17:F",
    "S2.18:F",
    "S2.19:F",
)
@pytest.mark.covers("S4.19:F", "S4.23:F", "S4.27:F")
@pytest.mark.covers("S4.13", "S4.14", "S4.15", "S4.16", "S4.17", "S4.18", "S4.20", "S4.22", "S4.26")
@pytest.mark.parametrize("line_id", RL_KEYS)
def test_keys_of_reinforcement_learning_are_declared_and_can_be_logged(
    line_id: str, tmp_path: Path
) -> None:
    data = {key: 0.5 * number for number, key in enumerate(RL_KEYS[line_id])}
    for key in data:
        metric = found(key)
        assert metric.unit and metric.meaning, key
        assert isinstance(metric, Foreign), f"{key}: this trainer computes it"
    tracking = Tracking("project", "experiment", [], {}, run_dir=tmp_path, total_steps=1)
    tracking.log(data, step=1)
    tracking.finish(0)
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    assert data.items() <= row.items()


def test_keys_are_unique_and_every_group_has_some() -> None:
    assert len({metric.key for metric in KNOWN}) == len(KNOWN) > 200
    assert {metric.group for metric in METRICS.values()} == set(GROUPS)


def test_configuration_keys_that_it_names_exist() -> None:
    assert [
        (m.key, key) for m in METRICS.values() for key in m.config if key not in known_keys()
    ] == []


def test_other_ways_to_combine_are_of_metrics_that_exist() -> None:
    assert [metric.key for metric in METRICS.values() if metric.source not in METRICS] == []


def test_meanings_are_sentences() -> None:
    wrong = [
        metric.key
        for metric in KNOWN
        if not metric.meaning.endswith(".") or len(metric.meaning) < 15
    ]
    assert wrong == []


@pytest.mark.parametrize(
    "metric", [metric for metric in KNOWN if "<" in metric.key], ids=lambda metric: metric.key
)
def test_a_key_with_placeholders_is_found_by_what_is_logged(metric: Metric | Foreign) -> None:
    key = metric.key
    for placeholder, example in EXAMPLES.items():
        key = key.replace(placeholder, example)
    assert "<" not in key
    assert [
        other.key for other in KNOWN if "<" in other.key and pattern(other.key).fullmatch(key)
    ] == [metric.key]
    assert lookup(key) is metric
    assert set(EXAMPLES) == set(PLACEHOLDERS)


@pytest.mark.covers("S0.8")
def test_validation_mirrors_training() -> None:
    """Each key of validation has its twin with the same unit and direction, but for what only
    validation has.
    """
    alone = {"loss_stderr", "best_loss", "best_step", "gap", "samples", "tokens", "total_s"}
    places = {
        "val/": "train/",
        "time/eval/": "time/train/",
        "throughput/eval/": "throughput/train/",
    }
    twins = [
        (metric, lookup(metric.key.replace(there, here, 1)))
        for metric in KNOWN
        for there, here in places.items()
        if metric.key.startswith(there)
        and metric.key.removeprefix(there) not in alone
        and "score/" not in metric.key
    ]
    assert len(twins) > 25
    for metric, twin in twins:
        assert twin is not None, f"{metric.key} has no twin in training"
        assert (twin.unit, twin.better) == (metric.unit, metric.better), metric.key


@pytest.mark.covers("S0.5")
def test_eval_is_another_spelling_of_val() -> None:
    assert found("eval/loss") is found("val/loss")
    assert found("eval/loss_by/code").key == "val/loss_by/<source>"


@pytest.mark.covers("S2.3:C")
@pytest.mark.parametrize(
    "key", ["kl", "clip_ratio/high_max", "rewards/Format/mean", "completions/mean_length"]
)
def test_names_of_reinforcement_learning_are_known_behind_train_and_val(key: str) -> None:
    assert {found(f"{place}/{key}") for place in ("train", "val", "eval")} == {found(key)}
    assert found("train/reward_mean").key == "reward_mean"
    assert [lookup(f"train/{ours}") for ours in ("progress/step", "train/loss", "val/loss")] == [
        None
    ] * 3


def test_a_suffix_names_the_reducer() -> None:
    assert found("train/loss@max") is found("train/loss") and found("eval/loss@p99") is found(
        "val/loss"
    )
    assert split_reducer("sft_train/loss@sum") == ("sft_train/loss", "sum")
    assert split_reducer("train/loss@often") == ("train/loss@often", None)
    assert split_reducer("@sum") == ("@sum", None)


@pytest.mark.parametrize(
    "key",
    [
        *(
            "train/losses",
            "",
            "train/loss@often",
            "train",
            "time/sft/total",
            "rewards/Format/mean/more",
        ),
        *("memory/sft/eval/begin/onload/reserved/0", "memory/sft/eval/start/onload/reserved/0x"),
    ],
)
def test_an_unknown_key_is_unknown(key: str) -> None:
    assert lookup(key) is None


def test_a_value_under_an_unknown_name_is_warned_of_and_logged_as_rank_0_has_it() -> None:
    metrics.take()
    for name in ("train/los", "rewards/Format/mean"):
        with pytest.warns(
            metrics.UnknownMetricWarning, match=f"'{name}' is not in the table: add its entry"
        ):
            metrics.put(name, 1.5)
    with pytest.raises(metrics.UnknownMetricWarning):
        metrics.put("train/los", 2)
    assert metrics.take_numbers() == {"train/los": 1.5, "rewards/Format/mean": 1.5}


def test_a_pattern_that_ranks_combine_is_refused_until_the_key_has_an_entry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    metrics.take()
    by_source = replace(
        METRICS["train/loss_max_rank"], key="test/loss_by/<source>", over_ranks="sum"
    )
    monkeypatch.setitem(METRICS, by_source.key, by_source)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as in a run, where it is an error too
        with pytest.raises(
            ValueError, match=r"'test/loss_by/web' .* 'test/loss_by/<source>' .*\nFix: "
        ):
            metrics.put("test/loss_by/web", 1.0)
    assert metrics.take() == {}, "rank 0's value was logged as that of all"
    monkeypatch.setitem(METRICS, "test/loss_by/web", replace(by_source, key="test/loss_by/web"))
    assert "test/loss_by/web" in metrics.travelling() and by_source.key not in metrics.travelling()
    metrics.put("test/loss_by/web", 2.0)
    assert metrics.take(("global", "main")) == {} and metrics.take() == {"test/loss_by/web": 2.0}


@pytest.mark.parametrize(
    ("way", "values", "expected"),
    [
        ("sum", (1.0, 2.0), 3.0),
        ("mean", (1.0, 2.0), 1.5),
        ("max", (1.0, math.inf), math.inf),
        ("min", (1.0, 2.0), 1.0),
        ("slowest", (1.0, 3.0, 2.0), 1),
        ("skew", (1.0, 3.0, 2.0), 1.5),
        ("mean", (metrics.ABSENT, 4.0), 4.0),
        ("slowest", (metrics.ABSENT, 4.0, metrics.ABSENT), 1),
        ("max", (math.nan, 1.0), math.nan),
        ("max", (1.0, math.nan), math.nan),
    ],
)
def test_values_of_ranks_become_one(way: Any, values: tuple[float, ...], expected: float) -> None:
    METRICS["test/x"] = replace(METRICS["train/nonfinite"], key="test/x", over_ranks=way)
    try:
        assert metrics.combined({"test/x": values})["test/x"] == pytest.approx(
            expected, nan_ok=True
        )
        assert metrics.combined({"test/x": (metrics.ABSENT,)}) == {}
    finally:
        del METRICS["test/x"]


def test_every_way_to_combine_is_one_that_can_be_computed() -> None:
    assert [way for way in COMBINED if not math.isfinite(metrics.combine(way, (1.0, 2.0)))] == []
    assert {metric.over_ranks for metric in METRICS.values()} == set(OVER_RANKS)
    assert set(COMBINED) | {"global", "main"} == set(OVER_RANKS)


def keys_logged_in(source: str) -> set[str]:
    """Texts that look like keys of metrics; parts of f-strings do not count."""
    tree = ast.parse(source)
    parts = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for part in node.values
    }
    constants = (
        node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in parts
    )
    texts = (node.value for node in constants if isinstance(node.value, str))
    return {text for text in texts if LOGGED.fullmatch(text)}


@pytest.mark.covers("S0.3")
def test_keys_are_hierarchical() -> None:
    assert [key for key in METRICS if "/" not in key] == []


@pytest.mark.covers("S0.34")
def test_every_key_that_the_trainer_logs_is_in_the_table(repository: Path) -> None:
    paths = [repository / "trainer" / name for name in LOGGING_FILES]
    files = [
        file for path in paths for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])
    ]
    logged = {key for file in files for key in keys_logged_in(file.read_text(encoding="utf-8"))}
    assert len(logged) >= 15
    assert [key for key in sorted(logged) if metrics.find(key) is None] == []


def test_a_logged_key_is_recognised() -> None:
    assert keys_logged_in(
        "x = {'train/lr(1e-3)': 1, 'a b/c': 2, f'val/{n}': 3}; y = 'see val/loss'"
    ) == {"train/lr(1e-3)"}


@pytest.mark.covers("S1.6")
def test_the_docs_say_how_to_open_tensorboard(repository: Path) -> None:
    text = (repository / "docs/tracking.md").read_text(encoding="utf-8")
    assert "tensorboard --logdir=" in text and "--port=6006" in text
    assert "VS Code" in text and "Cursor" in text
