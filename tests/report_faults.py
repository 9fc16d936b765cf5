"""One change of a healthy log for each check that must fire on it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from report_curves import changed, controller_run, grpo_run, sft_run

from trainer.tools.report.analyse import analyse
from trainer.tools.report.readers import read_run
from trainer.tools.report.run_log import CheckpointState, LogEvent, RunLog, Series, ServingCheck

SEED = 11
RNG = np.random.default_rng(SEED)
Change = Callable[[RunLog], RunLog]


def told(report):
    """Id -> finding, the worst first."""
    return {finding.id: finding for finding in report.findings}


def of_rule(report, rule):
    """The worst finding of a rule."""
    return next(finding for finding in report.findings if finding.rule == rule)


def line(report, id_):
    """A line of the checklists."""
    return next(item for item in report.checklist if item.id == id_)


def judged(path):
    """The report on a log or a run directory."""
    return analyse(read_run(path))


def serious(report):
    """Return the findings that need attention."""
    return {id_: one for id_, one in told(report).items() if one.level in ("warn", "fail")}


def healthy(kind):
    return {"sft": sft_run, "grpo": grpo_run, "controller": controller_run}[kind](SEED)


def column(log, key):
    return log.series[key].values.copy()


def put(key, where, values):
    """Replace some points of a metric."""

    def change(log):
        new = column(log, key)
        new[where] = values
        return changed(log, **{key: new})

    return change


def fill(key, values):
    """Replace all points of a metric."""
    return put(key, slice(None), values)


def times(key, factors):
    """Multiply a metric."""
    return lambda log: changed(log, **{key: column(log, key) * factors})


def but(**fields):
    """Put different facts around a log."""
    return lambda log: replace(log, **fields)


def both(*changes):
    def change(log):
        for one in changes:
            log = one(log)
        return log

    return change


def validated(losses):
    """Replace the validation losses."""

    def change(log):
        steps = log.series["val/loss"].steps
        return replace(log, series={**log.series, "val/loss": Series(steps, losses)})

    return change


def sft(change):
    """A healthy fine-tuning run with a change."""
    return change(healthy("sft"))


def _format_hacking(log):
    n = log.num_rows
    flat = 0.4 + RNG.normal(0, 0.05, n)
    forms = np.linspace(0.3, 0.95, n) + RNG.normal(0, 0.01, n)
    return changed(log, **{"rewards/Format/mean": forms, "rewards/AnswerMatchCosine/mean": flat})


def _constant(log):
    return changed(log, **{"train/loss": 1.2, "train/grad_norm": 0.5, "val/loss": 1.2})


def _too_short(log):
    series = {key: one[:40] for key, one in log.series.items() if len(one) > 40}
    return replace(log, series=series, num_rows=40, total_steps=40, checkpoints=())


def _held_out_collapse(log):
    """The training reward continues to rise, while the reward of the held-out samples is lost from
    epoch 21 on.
    """
    rewards = np.concatenate([np.linspace(-0.6, 0.2, 20), np.linspace(0.1, -0.5, 10)])
    return changed(log, **{"val/reward_mean": rewards + 0.02 * np.sin(np.arange(30))})


def _value_network(log):
    losses = 0.3 * np.exp(0.1 * np.sin(np.arange(log.num_rows)))
    losses[800:] *= 150
    return changed(log, **{"critic/loss": losses})


STEPS = np.arange(1, 2001)
EVALS = np.linspace(1.6, 1.0, 20)
FLAT = 1.2 * np.exp(RNG.normal(0, 0.05, 2000))
NCCL = (LogEvent(700, "error", "NCCL timeout on rank 3", "error"),)

CHANGES = {
    "sft": {
        "loss_nonfinite": put("train/loss", 500, np.nan),
        "loss_zero": put("train/loss", slice(900, 920), 0.0),
        "loss_start_high": put("train/loss", slice(0, 10), 6.0),
        "loss_not_falling": fill("train/loss", FLAT),
        "loss_diverging": times("train/loss", 1 + 0.002 * (STEPS - 1500).clip(0)),
        "loss_oscillating": fill("train/loss", 1.2 * np.exp(RNG.normal(0, 0.9, 2000))),
        "loss_spike": put("train/loss", 1000, 5.0),
        "loss_final": times("train/loss", 0.05),
        "jitter_normal": times("train/loss", np.exp(RNG.normal(0, 0.25, 2000))),
        "grad_range": times("train/grad_norm", 40.0),
        "grad_high": put("train/grad_norm", slice(1000, 1015), 200.0),
        "grad_vanish": put("train/grad_norm", slice(1000, 1050), 1e-4),
        "lr_schedule": fill("train/lr", 1e-5),
        "loss_jump": times("train/loss", 1 + 0.2 * np.exp((900 - STEPS) / 200) * (STEPS > 900)),
        "lr_too_high": put("train/grad_norm", [300, 400, 500], 40.0),
        "val_rising": validated(np.concatenate([EVALS[:16], [1.2, 1.3, 1.35, 1.4]])),
        "overfit": validated(
            np.concatenate([np.linspace(1.6, 1.1, 10), np.linspace(1.12, 1.6, 10)])
        ),
        "time_growth": times("train/time(s)", np.linspace(1, 1.4, 2000)),
        "time_high": put("train/time(s)", slice(505, 507), 60.0),
        "time_periodic": put("train/time(s)", slice(99, None, 100), 9.0),
        "data_bound": fill("time/train/data_s", 0.5),
        "gpu_util": times("system/gpu_util", 0.6),
        "oom_nccl": but(events=NCCL),
        "memory": times("memory/cpu/rss_gib", np.linspace(1, 1.5, 2000)),
        "ckpt_complete": but(checkpoints=(CheckpointState(2000, Path("run"), 1, ("no weights",)),)),
        "run_complete": but(total_steps=3000),
        "truncation": fill("data/truncated_frac", 0.1),
        "insufficient": _too_short,
        "restarts": but(events=(LogEvent(700, "rollback", "the guard went back", "warn"),)),
        "val_leak": validated(EVALS - 0.6),
        "saves_failed": lambda log: changed(
            log, **{"checkpoint/failed_in_a_row": np.where(STEPS > 1700, 1.0, 0.0)}
        ),
        "not_learning": _constant,
        "serving": but(
            proofs=(
                ServingCheck(2000, "vllm 1", 1.1, 1.9, 0.01, False, ("config.json: rope_theta",)),
            )
        ),
    },
    "grpo": {
        "length_shift": put("completions/mean_length", slice(600, 640), 400.0),
        "kl": put("kl", slice(600, 603), 14.0),
        "clipped_ratio": put("completions/clipped_ratio", slice(600, 603), 0.6),
        "clip_ratio": times("clip_ratio/region_mean", 3.0),
        "reward_drop": both(put("kl", slice(600, 603), 9.0), put("reward", slice(601, 603), 0.3)),
        "reward_hacking": _format_hacking,
        "adv_shape": fill("train/adv_std", 0.01),
        "entropy_collapse": times("train/entropy", np.linspace(1, 0.05, 1200)),
        "entropy_rise": times("train/entropy", np.geomspace(1, 10, 1200)),
        "reward_clip": fill("critic/reward_clip_frac", 0.5),
        "value_network": _value_network,
    },
    "controller": {
        "reward_trend": times("reward_mean", np.linspace(1, -8, 30)),
        "accuracy": times("accuracy_mean", 0.0),
        "budget": fill("budget_violation_rate", 0.7),
        "val_results": _held_out_collapse,
    },
}
"""{kind of run: {check: change}}."""
