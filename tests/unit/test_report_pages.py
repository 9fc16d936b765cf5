"""Page, text and JSON of a report have equal numbers, contain nothing external, and withstand any
name.
"""

import base64
import json
import math
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from functools import cache
from io import StringIO

import jsonschema
import numpy as np
import pytest
from page_text import Page
from report_curves import changed, checkpoints, sft_run, swift_run
from repository import REPOSITORY
from rich.console import Console
from small_files import read_json

from trainer.tools.report.analyse import analyse
from trainer.tools.report.page import as_page
from trainer.tools.report.plots import thinned
from trainer.tools.report.result import Report, as_json
from trainer.tools.report.run_log import RunLog, Series, ServingCheck
from trainer.tools.report.sections import sections
from trainer.tools.report.side_by_side import side_by_side
from trainer.tools.report.terminal import print_report, print_section

SCHEMA = read_json(REPOSITORY / "docs/report.schema.json")
MAX_PAGE_BYTES = 1_500_000
HOSTILE = 'x/<script>alert("1")</script>&\x1b[31m[red]$\\frac{1}{0}$'

Run = tuple[Report, RunLog]
SPIKE = 1379


@cache
def overfitting_run():
    """Fine-tuning that overfits from step 750 on, with one spike, slow data and a failed proof."""
    log = sft_run(3)
    losses, norms = (log.series[key].values.copy() for key in ("train/loss", "train/grad_norm"))
    losses[SPIKE], norms[SPIKE] = 6.0, 31.0
    speed = {"throughput__train__tokens_per_s": 38_540.0, "throughput__train__mfu": 0.41}
    waits = {"time__train__data_s": np.linspace(0.1, 0.9, 2000)}
    log = changed(log, train__loss=losses, train__grad_norm=norms, **waits, **speed)
    evals = np.arange(250, 2001, 250)
    held_out = np.array([1.72, 1.40, 1.30, 1.33, 1.40, 1.50, 1.60, 1.70])
    proof = ServingCheck(2000, "vllm 1", 1.1, 1.9, 0.01, False, ("config.json: rope_theta",))
    series = {**log.series, "val/loss": Series(evals, held_out)}
    log = replace(log, series=series, checkpoints=checkpoints(evals), proofs=(proof,))
    return analyse(log), log


@cache
def policy_run():
    log = swift_run(3)
    return analyse(log), log


@pytest.fixture(params=[overfitting_run, policy_run], ids=["sft", "grpo"])
def run(request):
    return request.param()


def metric(report, key, **changes):
    """Return another metric like the first one of the report."""
    return replace(report.metrics[0], key=key, **changes)


def text_of(run, *, width=120):
    console = Console(file=StringIO(), width=width)
    print_report(console, *run)
    return console.file.getvalue()


FIXED = {"verdict", "level", "status", "phase"}
"""Fields whose values come from this trainer."""


def hostile(value):
    """Return a value with `HOSTILE` in place of each text from a log."""
    if isinstance(value, str):
        return HOSTILE
    if isinstance(value, tuple | list):
        return tuple(map(hostile, value))
    if isinstance(value, Mapping) and value:
        return dict.fromkeys([HOSTILE], hostile(next(iter(value.values()))))
    if is_dataclass(value):
        names = {field.name for field in fields(value)} - FIXED
        return replace(value, **{name: hostile(getattr(value, name)) for name in names})
    return value


def test_json_keeps_its_schema_with_values_of_numpy_or_not_finite(run):
    report, log = run
    odd = {"value": math.nan, "threshold": math.inf, "steps": (np.int64(1), np.int64(2))}
    finding = replace(report.findings[0], **odd)
    anomaly = replace(report.anomalies[0], ratio=math.nan, percent=np.float64(2.5))
    hurt = replace(report, findings=(finding,), top=(finding,), anomalies=(anomaly,))
    for one in (report, analyse(replace(log, series={})), hurt):
        tree = json.loads(json.dumps(as_json(one), allow_nan=False))
        jsonschema.validate(tree, SCHEMA)
    assert tree["findings"][0]["steps"] == [1, 2] and tree["findings"][0]["value"] is None
    assert (tree["anomalies"][0]["ratio"], tree["anomalies"][0]["percent"]) == (None, 2.5)
    assert "– (limit inf)" in text_of((hurt, log)) and "nan" not in text_of((hurt, log)).lower()


def test_pages_need_nothing_from_outside():
    html = as_page([overfitting_run(), policy_run()])
    tags = Page(html).tags
    names = {tag for tag, _ in tags}
    assert names & {"script", "link", "iframe", "object", "base", "form"} == set()
    addresses = [str(attrs["src"]) for _, attrs in tags if "src" in attrs]
    heads = {address.split(",")[0] for address in addresses}
    assert heads == {"data:image/svg+xml;base64"} and len(addresses) > 10
    assert re.search(r"https?:|//[a-z]|@import|url\(", html) is None
    for address in addresses:
        image = base64.b64decode(address.split(",")[1]).decode()
        assert "<script" not in image and "<image" not in image
        assert set(re.findall(r'href="(.)', image)) <= {"#"}
    assert not any(name.startswith("on") for _, attrs in tags for name in attrs)


def test_names_from_the_log_cannot_become_markup(run):
    evil_run = hostile(run)
    html = as_page([evil_run])
    page = Page(html)
    assert "script" not in {tag for tag, _ in page.tags} and "\x1b" not in html
    assert page.words.count('<script>alert("1")</script>&') > 10
    assert "\x1b" not in text_of(evil_run) and "[red]" in text_of(evil_run)


LONG = np.random.default_rng(1).normal(1, 0.1, 100_000)


@pytest.mark.parametrize(
    "values",
    [[2.0], [math.nan], [math.nan, 1.0, math.inf], [0.0] * 5, [-1.0, 1e300], LONG],
    ids=lambda values: f"{len(values)} from {values[0]:.1f}",
)
@pytest.mark.filterwarnings("error")
def test_any_series_can_be_drawn_on_a_small_page(values):
    report, log = overfitting_run()
    odd = Series(np.arange(1, len(values) + 1), np.array(values, np.float64))
    broken = replace(log, series=dict.fromkeys(log.series, odd))
    assert len(as_page([(report, broken)]).encode()) < MAX_PAGE_BYTES


@pytest.mark.parametrize("size", [1, 801, 12_345])
def test_thinned_curves_keep_every_spike(size):
    values = np.random.default_rng(size).normal(size=size)
    kept = thinned(Series(np.arange(size), values))
    assert len(kept) <= 800 and bool((np.diff(kept.steps) > 0).all())
    assert {values.min(), values.max()} <= set(kept.values.tolist())


@pytest.mark.covers("S1.27 S1.25")
def test_plots_are_of_what_matters_and_not_of_constants():
    report, log = overfitting_run()
    names = ("reward_mean", "accuracy_mean", "budget_violation_rate")
    flat = metric(report, "train/entropy", minimum=1.0, maximum=1.0)
    others = (*(metric(report, key) for key in names), flat, metric(report, "my/metric"))
    report = replace(report, metrics=(*others, *report.metrics))
    drawn = [plot.title for one in sections(report, log) for plot in one.plots]
    assert drawn[0] == "Loss" and {"train/lr", "train/grad_norm", *names} <= set(drawn)
    assert not {"train/entropy", "my/metric"} & set(drawn)


@pytest.mark.parametrize("width", [80, 120])
def test_the_terminal_says_verdict_then_what_to_do_within_its_width(width):
    report, log = overfitting_run()
    many = tuple(metric(report, f"guard/{n}") for n in range(100))
    words = "words " * 20
    more = tuple(replace(report.findings[-1], id=f"f{n}", title=words) for n in range(30))
    report = replace(report, metrics=report.metrics + many, findings=report.findings + more)
    text = text_of((report, log), width=width)
    assert max(map(len, text.splitlines())) <= width and len(text.splitlines()) < 150
    places = [text.index(part) for part in ("FAIL ", "Do: Use the", "What next", "\nAnomalies")]
    assert places == sorted(places)
    assert f"… {len(report.findings) - 3 - 6} more" in text and "guard/" not in text


@pytest.mark.covers("S0.28")
def test_runs_side_by_side_differ_in_speed_loss_and_configuration():
    report, log = overfitting_run()
    doubled = {key: Series(one.steps, 2 * one.values) for key, one in log.series.items()}
    other = replace(log, series=doubled, config={**log.config, "optim.lr": 4e-5, "new": True})
    runs = [(report, log), (replace(report, title="b"), other)]
    compared = side_by_side(runs)
    wanted = ("train/loss", "throughput/train/tokens_per_s")
    rows = [row for row in compared.rows if row[0].startswith(wanted)]
    assert len(rows) == 16 and all(row[3] == pytest.approx(2 * row[2]) for row in rows)
    assert {"optim.lr", "new"} < {row[0] for row in compared.rows if not row[1]}
    console = Console(file=StringIO(), width=100)
    print_section(console, compared)
    text = console.file.getvalue()
    assert "38,540" in text and "77,080" in text and "77,080" in as_page(runs)


def test_equal_runs_side_by_side_are_equal_whatever_steps_they_validate_at():
    """Rows hold logged validation losses, and medians of the same training steps of all runs."""
    report, log = overfitting_run()
    losses = log.series["val/loss"]
    every_second = replace(log, series={**log.series, "val/loss": losses[1::2]})
    thinner = {key: one[one.steps % 10 == 0] for key, one in log.series.items()}
    more = {"val/loss": Series(losses.steps[3:], losses.values[3:])}
    short = replace(log, series={**log.series, **more})
    rows = side_by_side([(report, log), (report, every_second), (report, short)]).rows
    metrics = [row for row in rows if row[1]]
    assert all(row[2] == row[3] == row[4] for row in metrics)
    held_out = {row[1]: row[2] for row in metrics if row[0] == "val/loss"}
    assert held_out == {1000: 1.33, 1500: 1.5, 2000: 1.7}
    (spiked,) = {row[0] for row in metrics} & {"train/loss, median of 9"}
    assert all(row[2] < 3 for row in metrics if row[0] == spiked)
    sparse = side_by_side([(report, log), (report, replace(log, series=thinner))]).rows
    assert all(row[1] % 10 == 0 and row[2] == row[3] for row in sparse if row[1])
