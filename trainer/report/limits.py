"""The limits that findings are judged by, by name: `report --config` overrides single ones."""

from collections.abc import Mapping
from pathlib import Path

from trainer.config import did_you_mean
from trainer.detection.watches import OVERFITTING

_OWN: Mapping[str, float] = {
    # loss_zero
    "zero_points": 10,  # this many losses of exactly 0 are a fault
    # loss_start_high: usual first loss of a pretrained language model, nat/token
    "loss_start_low": 1.5,
    "loss_start_high": 3.0,
    "loss_start_fault": 5.0,  # above this, data and model do not fit together
    # loss_diverging
    "diverging_ratio": 1.25,  # median of 32 points over the best median of 64
    "diverging_rise": 0.1,  # and at least this much above it, nat
    "diverging_points": 32,  # and for this many points
    # loss_oscillating
    "oscillation": 0.5,  # noise over level, from here on violent
    "oscillation_range": 2.0,  # a controller's loss stays within plus or minus this
    # loss_spike
    "loss_extreme": 20,  # times the usual loss: extreme
    # loss_final
    "loss_final_low": 0.5,  # usual last loss
    "loss_final_high": 1.5,
    "loss_final_memorised": 0.1,  # below this the samples are known by heart
    # jitter_normal
    "jitter": 0.1,  # noise over level, from here on worth a word
    # grad_range
    "grad_low": 0.1,
    "grad_high": 10,
    "grad_share": 0.5,  # share of points outside that range
    # grad_high
    "grad_unstable": 100,
    "grad_unstable_points": 10,
    "grad_explosion": 20,  # times its own median
    # grad_vanish
    "grad_vanished": 0.001,
    "grad_vanished_share": 0.01,  # of its own median
    "grad_vanished_points": 20,
    # grad_unclipped
    "clipped_share": 0.5,
    # lr_schedule
    "lr_jump_up": 0.05,  # share of the peak; a rate may not rise so far at once after its warm-up
    "lr_jump_down": 0.25,  # nor fall so far at once, where that is no schedule of steps
    # lr_too_high
    "lr_high": 0.8,  # share of the peak that counts as high
    "lr_overlap": 0.5,  # share of anomalies at a high learning rate
    # val_rising
    "val_final_low": 0.8,
    "val_final_high": 2.0,
    "val_rises": 3,  # validations rising in a row
    "val_rises_fail": 5,
    # val_train_disagree
    "gap": 0.5,  # validation minus training loss, over validation loss
    # time_growth
    "time_growth": 0.1,
    "slowdown": 0.5,  # tokens per second or step time this much worse, and to the end
    # time_high
    "time_high": 30,  # s
    "time_spike": 6,  # times the median
    # data_bound: share of a step spent waiting for data
    "data_warn": 0.1,
    "data_fail": 0.3,
    # compile_first
    "compile_ratio": 3,  # first steps against the median
    # gpu_util
    "gpu_util": 80,  # %
    # memory
    "memory_high": 0.95,
    "leak": 0.01,  # growth per 1000 steps
    # ckpt_complete
    "size_spread": 0.1,  # a checkpoint's size against its siblings'
    # truncation
    "truncated": 0.05,
    # length_shift
    "length_shift": 0.3,
    "length_steps": 50,
    "shortest_jump": 2,  # the shortest answer of a batch against its median
    # kl
    "kl_low": 0.01,
    "kl_high": 5,
    "kl_fault": 10,
    # clipped_ratio
    "clipped_ratio": 0.3,
    "cap_share": 0.2,
    # clip_ratio
    "clip_ratio_low": 0.1,
    "clip_ratio_high": 0.3,
    # reward_drop
    "reward_drop": 0.5,
    # reward_trend
    "reward_scatter": 2,  # times its spread: rewards scatter
    # reward_hacking
    "reward_flat": 0.05,  # change over the run, as a share of its range
    # adv_shape
    "adv_mean": 0.1,
    "adv_std_low": 0.5,
    "adv_std_high": 2,
    "adv_std_dead": 0.05,
    "equal_groups": 0.9,  # share of groups without a difference to learn from
    # entropy_collapse
    "entropy_share": 0.2,
    # accuracy
    "accuracy_zero_epochs": 21,  # in a row, as the next one
    # budget
    "latency_budget": 0,  # ms; 0: as the configuration says
    "violation": 0.5,
    "violation_epochs": 21,
    "violation_final_warn": 0.1,
    "violation_final_note": 0.05,
    # reward_clip
    "reward_clip": 0.2,
    # value_network
    "value_rise": 10,  # times its level, to the end
    # restarts
    "lost_steps": 0.05,
    "goodput": 0.9,
    # not_learning
    "constant_range": 0.01,  # a metric whose range is below this share of its median is constant
    # of several checks
    "trend_p": 0.05,  # Mann-Kendall: a trend is significant below this
    "rising_p": 0.01,  # the same for rises that raise an alarm
    "first_steps": 100,  # "the start" of a run, for trends and checklists
    "rising_epochs": 10,  # loss or reward going the wrong way for more epochs than this
    "min_epochs": 20,  # a controller is not judged before
    "min_points": 100,
    "min_evals": 3,
    # anomalies
    "level_points": 32,  # the usual level of a metric is the median of this many points before
    "spread_points": 128,  # its usual spread around that level is taken from this many
    "onset_z": 4,  # a departure sets in here
    "metric_z": 6,  # a metric has left its usual range
    "loss_z": 8,  # the same for a loss, together with the two below
    "loss_ratio": 1.5,
    "loss_rise": 0.1,  # nat; replaces the ratio where losses have both signs
    "grad_ratio": 5,
    "kl_ratio": 5,
    "kl_rise": 1.0,
    "merge_points": 3,  # departures at most so many log points apart are one interval
    "lr_jump": 3,  # times the rate of the point before: a jump, not a schedule
    # rewards, accuracies, speed: a fall below the best, in standard deviations of its median
    "collapse_sigma": 6,
    "collapse_share": 0.25,  # and as a share of their range over the run
}
LIMITS: Mapping[str, float] = {
    name: float(limit) for name, limit in {**OVERFITTING, **_OWN}.items()
}
"""Those above, and those that the guard judges validations by too."""


def merged(overrides: Mapping[str, float] | None) -> dict[str, float]:
    """All limits, those of `overrides` in place of the defaults. Raises `ValueError` for an
    unknown name.
    """
    _check_names(overrides or {}, "among the thresholds given")
    return {**LIMITS, **(overrides or {})}


def read_thresholds(path: Path) -> dict[str, float]:
    """Limits from a file of `name: number` lines; comments begin with #.

    Raises `ValueError` naming file and line for anything else, and for a name that no finding
    reads.
    """
    limits: dict[str, float] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if content := line.split("#", 1)[0].strip():
            name, _, value = content.partition(":")
            try:
                limits[name.strip()] = float(value)
            except ValueError as error:
                raise ValueError(
                    f"{path}, line {number}: {content!r} is not `name: number`"
                ) from error
    _check_names(limits, f"in {path}")
    return limits


def _check_names(limits: Mapping[str, float], place: str) -> None:
    for name in limits:
        if name not in LIMITS:
            hint = did_you_mean(name, LIMITS) or "the report's section Limits lists all"
            raise ValueError(f"unknown threshold {name!r} {place}: {hint}")
