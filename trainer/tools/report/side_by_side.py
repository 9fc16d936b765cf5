"""Compares several runs: verdicts, metrics at the same steps, and configurations."""

from collections.abc import Sequence
from functools import reduce

import numpy as np

from trainer.tools.report.analysed_run import AnalysedRun
from trainer.tools.report.formatting import MISSING
from trainer.tools.report.result import Report
from trainer.tools.report.run_log import RunLog
from trainer.tools.report.sections import Section
from trainer.tools.report.statistics import rolling

NUM_STEPS = 8
WINDOW = 9
"""A row of a training metric shows the median over this many steps, and names the middle step."""
COMPARED = "val_reward val_accuracy val_loss reward accuracy loss tokens_per_s time"
"""The roles to compare. Results come first because they are more informative than the loss of a
policy.
"""

Run = tuple[Report, RunLog]
Row = tuple[object, ...]


def side_by_side(runs: Sequence[Run]) -> Section:
    """Return a table with one column per run.

    Its rows are the verdicts, metrics at steps that all runs logged, and the options that differ.
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
    """Return rows of a metric at steps that all runs logged, spread evenly over them.

    Validation results are as logged. Other metrics are medians of the same `WINDOW` steps in all runs.
    """
    analysed = [AnalysedRun(log, report.profile) for report, log in runs]
    curves = [run.find(role) for run in analysed]
    steps = reduce(np.intersect1d, [curve.steps for curve in curves])
    width = min(1 if role.startswith("val_") else WINDOW, len(steps))
    if not width:
        return []
    columns = [curve.values[np.isin(curve.steps, steps)] for curve in curves]
    values = [np.median(rolling(column, width, 1), axis=1) for column in columns]
    centres = steps[(width - 1) // 2 :]
    name = analysed[0].name(role) + (f", median of {width}" if width > 1 else "")
    places = np.unique(np.linspace(0, len(values[0]) - 1, NUM_STEPS).astype(int))
    return [(name, centres[at], *(column[at] for column in values)) for at in places]
