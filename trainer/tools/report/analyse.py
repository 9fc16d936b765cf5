"""The analysis of one log: trends, anomalies, all checks, and the verdict.

Callers need only `analyse`.
"""

from datetime import timedelta

import numpy as np

from trainer.runtime.text import readable
from trainer.tools.report.analysed_run import AnalysedRun, recognise_profile
from trainer.tools.report.checks import judge
from trainer.tools.report.checks_run import too_little
from trainer.tools.report.checks_speed import throughput
from trainer.tools.report.checks_validation import generalisation
from trainer.tools.report.formatting import counted, listed
from trainer.tools.report.judge import CHECKS, checklist, ordered
from trainer.tools.report.learning_rate import learning_rate
from trainer.tools.report.result import Finding, MetricSummary, Report
from trainer.tools.report.run_log import RunLog, Series
from trainer.tools.report.statistics import finite, is_falling, is_rising, slope
from trainer.tools.report.vocabulary import meaning, role_order
from trainer.tools.report.words import how_common, story

NUM_TOP = 3
SLACK_SHARE = 0.02
MOST_SLACK = 0.1
LEAST_SLACK = 10
"""A cause may seem to begin after its effect by the first share of the run, by the interval between
validations up to the second share, or by this many steps, whichever is largest.
"""
VERDICTS = {"fail": "FAIL", "warn": "ATTENTION"}
"""Level of the worst finding -> verdict."""


# logs hold 1e300 and zeros: a result that cannot be computed becomes inf or nan, without a warning
@np.errstate(all="ignore")
def analyse(log: RunLog, *, profile: str = "auto") -> Report:
    """Return the full report on a log."""
    kind = recognise_profile(log) if profile == "auto" else profile
    run = AnalysedRun(log, kind)
    found, unjudged = judge(run, CHECKS)
    findings = ordered(found, slack=_slack(run))
    worst = findings[0].level if findings else ""
    verdict = VERDICTS.get(worst) or ("INSUFFICIENT" if too_little(run) else "OK")
    rates = run.find("lr")
    return Report(
        title=(log.path if log.path.is_dir() else log.path.parent).absolute().name,
        source=log.source,
        path=log.path,
        profile=kind,
        verdict=verdict,
        headline=_headline(run, verdict, findings),
        facts=_facts(run),
        top=tuple([finding for finding in findings if finding.level != "info"][:NUM_TOP]),
        findings=findings,
        metrics=tuple(
            _summary(key, log.series[key])
            for key in sorted(log.series, key=role_order)
            if log.series[key]
        ),
        anomalies=run.anomalies,
        generalisation=generalisation(run),
        learning_rate=learning_rate(rates, run.anomalies, run.total_steps) if rates else None,
        throughput=throughput(run),
        checklist=checklist(run, findings, unjudged),
        insufficient=tuple(unjudged.items()),
        closing=_closing(run, verdict, findings),
    )


def _slack(run: AnalysedRun) -> int:
    """Return the number of steps by which a cause may seem to begin after its effect. Held-out
    results show a fault only at the next validation.
    """
    evals = run.find("val_loss") or run.find("val_reward")
    interval = int(np.median(np.diff(evals.steps))) if len(evals) > 1 else 0
    most = int(MOST_SLACK * run.last_step)
    return max(LEAST_SLACK, int(SLACK_SHARE * run.last_step), min(interval, most))


def _headline(run: AnalysedRun, verdict: str, findings: tuple[Finding, ...]) -> str:
    """Return the title of the first finding, or a sentence that explains why there is none."""
    if verdict == "INSUFFICIENT":
        return f"Too early to say: {too_little(run)}."
    if verdict == "OK":
        return _normal(run, findings)
    others = sum(finding.level in VERDICTS for finding in findings) - 1
    more = f" {counted(others, 'additional serious finding')}." if others else ""
    return findings[0].title + more


def _normal(run: AnalysedRun, findings: tuple[Finding, ...]) -> str:
    """Describe a healthy run by the results that improved. The loss of a controller is noise."""
    result = "violation" if run.profile == "controller" else "loss"
    good = [f"the {role} rose" for role in ("reward", "accuracy") if is_rising(run.levels(role))]
    good += [f"the {result} fell"] if is_falling(run.levels(result)) else []
    is_unusual = run.anomalies or any(finding.level == "note" for finding in findings)
    rest = "no check found a fault" if is_unusual else "every metric stayed in its usual range"
    return f"Normal: {listed([*good, rest])}."


def _facts(run: AnalysedRun) -> dict[str, str]:
    """Return the header lines for which the log has data."""
    log = run.log
    total = readable(sum(state.size_bytes for state in log.checkpoints))
    again = f"{log.num_attempts}, {log.num_lost_steps} steps trained again"
    facts = {
        "steps": f"{run.last_step} of {log.total_steps}" if log.total_steps else str(run.last_step),
        "time span": _duration(log.span_s),
        "attempts": again if log.num_attempts > 1 else "",
        "rows skipped": str(log.num_unparsed or ""),
        "checkpoints": f"{len(log.checkpoints)}, {total} in all" if log.checkpoints else "",
        "exit code": "" if log.exit_code is None else str(log.exit_code),
        "notes": " ".join(log.notes),
    }
    return {name: told for name, told in facts.items() if told}


def _duration(span_s: float | None) -> str:
    """Format a time span. Return "" if it is unknown, not a number, or impossibly long because a
    clock was wrong.
    """
    if span_s is None or not span_s < timedelta.max.total_seconds():
        return ""
    return str(timedelta(seconds=round(span_s)))


def _summary(key: str, series: Series) -> MetricSummary:
    entry = meaning(key)
    points = finite(series) or series[:1]
    low = np.argmin(points.values)
    high = np.argmax(points.values)
    return MetricSummary(
        key=key,
        group=entry.group,
        unit="" if entry.unit == "1" else entry.unit,
        meaning=entry.meaning,
        direction=entry.better,
        num_points=len(series),
        first=points.values[0],
        last=points.values[-1],
        minimum=points.values[low],
        minimum_step=int(points.steps[low]),
        maximum=points.values[high],
        maximum_step=int(points.steps[high]),
        trend=("flat", "rising", "falling")[slope(points).sign],
    )


def _closing(run: AnalysedRun, verdict: str, findings: tuple[Finding, ...]) -> str:
    """Describe what happened, how common it is, and the next steps."""
    if verdict == "OK" and run.log.exit_code == 0 and run.last_step >= run.total_steps:
        return "The run is complete. Score its checkpoints on your task before you use one."
    if verdict == "OK":
        return "Continue as configured. Look again at the next validation or after ten epochs."
    if verdict == "INSUFFICIENT":
        return "Let the run continue, then report again. The log shows no fault so far."
    urgent = [one.remedy for one in findings[:NUM_TOP] if one.level in VERDICTS and one.remedy]
    numbered = " ".join(f"{place}) {action}" for place, action in enumerate(urgent, 1))
    told = [story(run.anomalies), how_common(run)] if run.anomalies else []
    return " ".join(filter(None, [*told, f"Next: {numbered}"]))
