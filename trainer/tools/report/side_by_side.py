"""Compares several runs: verdicts, metrics at the same steps, and configurations."""

from collections.abc import Sequence

import numpy as np

from trainer.tools.report.analysed_run import AnalysedRun
from trainer.tools.report.formatting import MISSING
from trainer.tools.report.result import Report
from trainer.tools.report.run_log import RunLog
from trainer.tools.report.sections import Section
from trainer.tools.report.statistics import smooth

NUM_STEPS = 8
COMPARED = "val_reward val_accuracy val_loss reward accuracy loss tokens_per_s time"
"""The roles to compare. Results come first because they say more than the loss of a policy."""

Run = tuple[Report, RunLog]
Row = tuple[object, ...]


def side_by_side(runs: Sequence[Run]) -> Section:
    """Return a table with one column per run.

    Its rows are the verdicts, smoothed metrics at steps that all runs cover, and the options that
    differ.
    """
    names = [f"{place}: {report.title}" for place, (report, _) in enumerate(runs, 1)]
    verdicts = [f"{report.verdict}: {report.headline}" for report, _ in runs]
    rows: list[Row] = [("verdict", "", *verdicts)]
    for role in COMPARED.split():
        rows += _same_steps(runs, role)
    configs = [log.config for _, log in runs]
    for key in sorted(set().union(*configs)):
        values = [str(config.get(key, MISSING)) for config in configs]
        if len(set(values)) > 1:
            rows.append((key, "", *values))
    return Section("Side by side", rows, ("metric or option", "step", *names))


def _same_steps(runs: Sequence[Run], role: str) -> list[Row]:
    """Return rows of a smoothed metric at equally spaced steps in the range that all runs cover."""
    analysed = [AnalysedRun(log, report.profile) for report, log in runs]
    curves = [smooth(series) for run in analysed if (series := run.find(role))]
    if len(curves) < len(runs):
        return []
    first = max(curve.steps[0] for curve in curves)
    last = min(curve.steps[-1] for curve in curves)
    steps = np.unique(np.linspace(first, max(first, last), NUM_STEPS).astype(int))
    values = [np.interp(steps, curve.steps, curve.values) for curve in curves]
    return [(analysed[0].name(role), *row) for row in zip(steps, *values, strict=True)]
