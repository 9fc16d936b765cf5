"""The table of metrics: keys are found, values of ranks are combined, and every logged key has an
entry.
"""

import math
import re
from dataclasses import replace

import pytest
from acceptance.table import all_lines
from repository import REPOSITORY

from trainer.tools.report.vocabulary import meaning
from trainer.tracking import Tracking, metrics, read_metrics
from trainer.tracking.metrics import FOREIGN, METRICS

RL_KEYS = """
S0.11 train/reward_total_mean train/reward_total_std train/reward_total_min train/reward_total_max
S0.12 train/reward_correct_mean train/reward_format_mean train/tag_count_reward_mean
S0.13 eval/reward_total_mean eval/reward_total_std eval/reward_total_min eval/reward_total_max
 eval/reward_correct_mean eval/reward_format_mean eval/tag_count_reward_mean
S0.15 train/adv_mean train/adv_std train/adv_min train/adv_max
S0.17 train/entropy
S0.22 time/train/rollout_s time/train/reward_s time/train/advantages_s
S0.25 time/eval/rollout_s time/eval/reward_s
S0.32 weights/sync_s weights/version weights/bytes
S1.16 reward
S2.3 kl clip_ratio clip_ratio/low_mean clip_ratio/high_max clip_ratio/region_mean
S2.4 reward reward_std rewards/Format/mean rewards/AnswerMatchCosine/std
S2.5 completions/min_length completions/mean_length completions/max_length
 completions/clipped_ratio
S2.13 rewards/Format/mean
S2.14 rewards/AnswerMatchCosine/mean rewards/PlaneMatchString/mean
S2.15 completions/mean_length
S2.16 completions/min_length
S2.17 completions/max_length
S2.18 completions/clipped_ratio
S2.19 clip_ratio
S4.1 val/score/mean val/score/max val/score/min
S4.2 critic/lr critic/loss critic/value critic/vpred critic/clipfrac critic/error
S4.3 critic/score/mean critic/score/max critic/score/min
S4.4 critic/rewards/mean critic/rewards/max critic/rewards/min
S4.5 critic/advantages/mean critic/advantages/max critic/advantages/min
S4.6 critic/returns/mean critic/returns/max critic/returns/min
S4.7 critic/values/mean critic/values/max critic/values/min
S4.8 tokens/response_length/mean tokens/response_length/max tokens/response_length/min
S4.9 tokens/prompt_length/mean tokens/prompt_length/max tokens/prompt_length/min
S4.10 actor/lr
S4.11 actor/ppo_ratio_high_clipfrac actor/ppo_ratio_low_clipfrac actor/ppo_ratio_clipfrac
S4.12 actor/ratio_mean actor/ratio_max actor/ratio_min
S4.13 actor/clipfrac
S4.14 actor/kl_loss
S4.15 actor/total_loss
S4.16 actor/approxkl actor/policykl
S4.17 critic/ref_log_prob/mean critic/old_log_prob/mean
S4.18 critic/entropy/mean
S4.19 critic/reward_clip_frac
S4.20 actor/pg_loss actor/weighted_pg_loss
S4.22 actor/sample_weights_mean actor/sample_weights_max actor/sample_weights_min
S4.23 actor/positive_sft_loss actor/negative_sft_loss
S4.26 time/rollout time/ref_log_probs_values_reward time/old_log_probs_values time/adv
S4.27 time/actor_train/generate/total time/actor_train/compute_log_probs/execute
"""
"""Each line: an acceptance line with mark F, then its keys as other trainers log them."""


def test_every_line_for_rl_has_its_keys_here():
    lines = {name for name, marks in all_lines().items() if "F" in marks}
    assert lines - set(RL_KEYS.split()) == set()


@pytest.mark.covers(
    "S0.11 S0.12 S0.13 S0.15 S0.22 S0.32 S1.16 S2.4 S2.5 S4.1 S4.2 S4.3 S4.4 S4.5 S4.6 S4.7 S4.8 "
    "S4.9 S4.10 S4.11 S4.12 S4.13 S4.14 S4.15 S4.16 S4.17 S4.18 S4.20 S4.22 S4.26 S0.17:F S0.25:F "
    "S2.13:F S2.14:F S2.15:F S2.16:F S2.17:F S2.18:F S2.19:F S4.19:F S4.23:F S4.27:F"
)
def test_keys_of_reinforcement_learning_are_known_and_can_be_logged(tmp_path):
    keys = {word for word in RL_KEYS.split() if not re.fullmatch(r"S[\d.]+", word)}
    assert [key for key in keys if meaning(key).key not in FOREIGN] == []
    tracking = Tracking("project", "experiment", [], {}, run_dir=tmp_path, total_steps=1)
    tracking.log(dict.fromkeys(keys, 0.5), step=1)
    tracking.finish(0)
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    assert keys <= row.keys()


@pytest.mark.covers("S0.5 S2.3:C")
@pytest.mark.parametrize(
    ("key", "entry"),
    [
        ("eval/loss", "val/loss"),
        ("eval/loss_by/code", "val/loss_by/<source>"),
        ("train/kl", "kl"),
        ("eval/rewards/Format/mean", "rewards/<name>/mean"),
        ("train/loss@max", "train/loss"),
        ("eval/loss@p99", "val/loss"),
        ("train/progress/step", None),
        ("", None),
        ("@sum", None),
        ("train/loss@often", None),
    ],
)
def test_keys_are_found_under_other_spellings(key, entry):
    found = meaning(key)
    assert (None if found.meaning == "Unknown metric." else found.key) == entry


@pytest.mark.parametrize(
    ("way", "values", "expected"),
    [
        ("sum", (1.0, 2.0), 3.0),
        ("mean", (1.0, 2.0), 1.5),
        ("max", (1.0, math.inf), math.inf),
        ("slowest", (1.0, 3.0, 2.0), 1),
        ("mean", (metrics.ABSENT, 4.0), 4.0),
        ("max", (1.0, math.nan), math.nan),
    ],
)
def test_values_of_ranks_become_one(way, values, expected):
    entry = replace(METRICS["train/nonfinite"], key="test/x", over_ranks=way)
    found = metrics.combine([entry], {"test/x": values})
    assert found["test/x"] == pytest.approx(expected, nan_ok=True)
    assert metrics.combine([entry], {"test/x": (metrics.ABSENT,)}) == {}


@pytest.mark.covers("S1.6")
def test_the_docs_say_how_to_open_tensorboard():
    text = (REPOSITORY / "docs/tracking.md").read_text(encoding="utf-8")
    assert "tensorboard --logdir=" in text and "--port=6006" in text
    assert "VS Code" in text and "Cursor" in text
