"""Page, text and JSON of a report: the same numbers, nothing from outside, and no name of a log can
break them.
"""

import base64
import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from page_text import Page, numbers_in
from report_curves import changed, checkpoints, sft_run, swift_run
from rich.console import Console

from trainer.tools.report.analyse import analyse
from trainer.tools.report.formatting import number
from trainer.tools.report.page import as_page
from trainer.tools.report.result import MetricSummary, RaisedRate, Report, as_json
from trainer.tools.report.run_log import RunLog, Series, ServingCheck
from trainer.tools.report.sections import sections
from trainer.tools.report.side_by_side import side_by_side
from trainer.tools.report.smoothing import smooth, thinned
from trainer.tools.report.terminal import print_report, print_section

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "report.schema.json").read_text())
MAX_PAGE_BYTES = 1_500_000
HOSTILE = 'x/<script>alert("1")</script>&\x1b[31m[red]$\\frac{1}{0}$'

Run = tuple[Report, RunLog]
BEST, SPIKE = 750, 1379


@cache
def overfitting_run() -> Run:
    """Fine-tuning that overfits from step 750 on, with one spike, slow data and a failed proof."""
    log = sft_run(3)
    losses, norms = (log.series[key].values.copy() for key in ("train/loss", "train/grad_norm"))
    losses[SPIKE], norms[SPIKE] = 6.0, 31.0
    speed = {"throughput__train__tokens_per_s": 38_540.0, "throughput__train__mfu": 0.41}
    waits = {"time__train__data_s": np.linspace(0.1, 0.9, 2000)}
    log = changed(log, train__loss=losses, train__grad_norm=norms, **waits, **speed)
    evals = np.arange(250, 2001, 250)
    held_out = np.array([1.72, 1.40, 1.30, 1.33, 1.40, 1.50, 1.60, 1.70])
    log = replace(
        log,
        series={**log.series, "val/loss": Series(evals, held_out)},
        checkpoints=checkpoints(evals),
        proofs=(ServingCheck(2000, "vllm 1", 1.1, 1.9, 0.01, False, ("config.json: rope_theta",)),),
    )
    return analyse(log), log


@cache
def policy_run() -> Run:
    log = swift_run(3)
    return analyse(log), log


@pytest.fixture(params=[overfitting_run, policy_run], ids=["sft", "grpo"])
def run(request: pytest.FixtureRequest) -> Run:
    found: Run = request.param()
    return found


def metric(report: Report, key: str, **changes: Any) -> MetricSummary:
    """Return another metric like the first one of the report."""
    return replace(report.metrics[0], key=key, **changes)


def text_of(run: Run, *, width: int = 120) -> str:
    console = Console(file=StringIO(), width=width)
    print_report(console, *run)
    return console.file.getvalue()  # type: ignore[attr-defined]


def bare(run: Run) -> Run:
    """Return a run that logged nothing and was not judged."""
    report, log = run
    lists = "top findings metrics anomalies serving checklist insufficient"
    empty: dict[str, Any] = dict.fromkeys(lists.split(), ())
    parts = dict.fromkeys(("generalisation", "learning_rate", "throughput"))
    report = replace(report, **empty, **parts, thresholds={}, closing="")
    return report, replace(log, series={}, config={})


def floats(tree: object) -> Iterator[float]:
    """Yield all numbers of a tree that are no whole ones."""
    if isinstance(tree, dict | list | tuple):
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield from floats(item)
    elif isinstance(tree, float):
        yield tree


def test_text_page_and_json_show_the_same_numbers(run):
    words = Page(as_page([run])).words
    page = numbers_in(words.replace("(", " ").replace("×", " "))
    assert numbers_in(text_of(run)) - numbers_in(words) == set()
    tree = as_json(run[0])
    wanted = ("findings", "anomalies", "metrics", "generalisation", "thresholds")
    expected = [value for name in wanted for value in floats(tree[name])]
    percents = {anomaly["percent"] for anomaly in tree["anomalies"]}
    missing = {number(value) for value in expected if value not in percents} - page
    onsets = {number(m["z"]) for anomaly in tree["anomalies"] for m in anomaly["movers"]}
    assert len(expected) > 50 and missing - onsets == set()


def test_json_keeps_its_schema(run):
    finding = replace(run[0].findings[0], value=np.float64(2.5), steps=(np.int64(1), np.int64(2)))  # type: ignore[arg-type]
    for report in (run[0], bare(run)[0], replace(run[0], findings=(finding,))):
        tree = json.loads(json.dumps(as_json(report), allow_nan=False))
        jsonschema.validate(tree, SCHEMA)
    assert tree["findings"][0]["steps"] == [1, 2]


def test_numbers_that_are_not_finite_become_null_and_a_dash(run):
    report, log = run
    finding = replace(report.findings[0], value=math.nan, threshold=math.inf)
    anomaly = replace(report.anomalies[0], ratio=math.nan, z=math.inf)
    hurt = replace(report, findings=(finding,), top=(finding,), anomalies=(anomaly,))
    tree = json.loads(json.dumps(as_json(hurt), allow_nan=False))
    assert tree["findings"][0]["value"] is None and tree["anomalies"][0]["z"] is None
    jsonschema.validate(tree, SCHEMA)
    assert "– (limit inf)" in Page(as_page([(hurt, log)])).words
    assert "nan" not in text_of((hurt, log)).lower()


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
    anchors = [attrs["id"] for _, attrs in tags if "id" in attrs]
    assert len(set(anchors)) == len(anchors) > 10


def test_names_from_the_log_cannot_become_markup(run):
    report, log = run
    odd = Series(np.arange(1, 50), np.linspace(1, 2, 49))
    hostile = metric(report, HOSTILE, meaning=HOSTILE)
    mover = replace(report.anomalies[0].movers[0], metric=HOSTILE)
    anomaly = replace(report.anomalies[0], metric=HOSTILE, movers=(mover,), chain=(HOSTILE, "b"))
    texts = dict.fromkeys(("id", "title", "metric", "remedy", "cause"), HOSTILE)
    finding = replace(report.findings[0], **texts, evidence=(HOSTILE,))  # type: ignore[arg-type]
    evil = replace(
        report, title=HOSTILE, source=HOSTILE, headline=HOSTILE, facts={HOSTILE: HOSTILE}, closing=HOSTILE,
        top=(finding,), findings=(finding,), metrics=(hostile,), anomalies=(anomaly,),
        insufficient=((HOSTILE, HOSTILE),), thresholds={HOSTILE: 1.0},
    )  # fmt: skip
    html = as_page([(evil, replace(log, series={HOSTILE: odd}, path=Path(HOSTILE)))])
    page = Page(html)
    assert "script" not in {tag for tag, _ in page.tags} and "\x1b" not in html
    assert page.words.count('<script>alert("1")</script>&') > 10
    assert "\x1b" not in text_of((evil, log)) and "[red]" in text_of((evil, log))


MILLION = np.random.default_rng(1).normal(1, 0.1, 1_000_000)


@pytest.mark.parametrize(
    "values",
    [[2.0], [math.nan], [math.nan, 1.0, math.inf], [0.0] * 5, [-1.0, 1e300], MILLION],
    ids=lambda values: f"{len(values)} from {values[0]:.1f}",
)
@pytest.mark.filterwarnings("error")
def test_any_series_can_be_drawn_on_a_small_page(run, values):
    report, log = run
    odd = Series(np.arange(1, len(values) + 1), np.array(values, np.float64))
    broken = replace(log, series=dict.fromkeys(log.series, odd))
    assert len(as_page([(report, broken)]).encode()) < MAX_PAGE_BYTES


def test_a_run_without_anything_still_has_a_page(run):
    report, log = bare(run)
    assert "<section" not in as_page([(report, log)]) and report.verdict in text_of((report, log))
    (compared,) = side_by_side([(report, log)] * 2)
    assert compared.table is not None and ("anomalies", "0", "0") in compared.table.rows


@pytest.mark.parametrize("size", [1, 7, 800, 801, 12_345])
def test_thinned_curves_keep_every_spike(size):
    values = np.random.default_rng(size).normal(size=size)
    kept = thinned(Series(np.arange(size), values))
    assert len(kept) <= 800 and bool((np.diff(kept.steps) > 0).all())
    assert {values.min(), values.max()} <= set(kept.values.tolist())


def test_smoothing_is_the_corrected_exponential_mean():
    values, mean, expected = np.random.default_rng(3).normal(size=500), 0.0, []
    for count, value in enumerate(values, 1):
        mean = 0.9 * mean + 0.1 * value
        expected.append(mean / (1 - 0.9**count))
    found = smooth(Series(np.arange(501), np.append(values, np.nan)))
    np.testing.assert_allclose(found.values, expected, rtol=0, atol=1e-6)


@pytest.mark.covers("S1.27", "S1.25")
def test_plots_are_of_what_matters_and_not_of_constants():
    report, log = overfitting_run()
    flat = metric(report, "train/entropy", minimum=1.0, maximum=1.0)
    odd = metric(report, "my/metric")
    names = ("reward_mean", "accuracy_mean", "budget_violation_rate")
    rewards = [metric(report, key) for key in names]
    report = replace(report, metrics=(*rewards, *report.metrics, flat, odd))
    drawn = [plot.title for one in sections(report, log) for plot in one.plots]
    assert drawn[0] == "Loss" and {"train/lr", "train/grad_norm"} <= set(drawn)
    assert {one.key for one in rewards} <= set(drawn)
    assert not {"train/entropy", "my/metric"} & set(drawn)


@pytest.mark.parametrize("width", [80, 120])
def test_the_terminal_says_verdict_then_what_to_do_within_its_width(width):
    report, log = overfitting_run()
    many = tuple(metric(report, f"guard/{n}") for n in range(100))
    words = "words " * 20
    more = tuple(replace(report.findings[-1], id=f"f{n}", title=words) for n in range(30))
    report = replace(report, metrics=report.metrics + many, findings=report.findings + more)
    text = text_of((report, log), width=width)
    assert max(map(len, text.splitlines())) <= width and len(text.splitlines()) < 120
    places = [text.index(part) for part in ("FAIL ", "Do: Use the", "What next", "\nAnomalies")]
    assert places == sorted(places) and text.count("Do: ") == 3
    num_others = len(report.findings) - 3 - 6
    assert f"… {num_others} more" in text and "guard/" not in text
    assert f"{len(report.metrics)} were logged" in text


UNKNOWN: dict[str, dict[str, Any]] = {
    "generalisation": {
        "gap": math.nan,
        "overfit_step": None,
        "recommended_step": None,
        "recommended_path": None,
    },
    "learning_rate": {"anomalies_at_high_share": None},
    "throughput": dict.fromkeys(("tokens_per_s", "mfu", "goodput")),
}


@pytest.mark.parametrize("lacks", ["", *UNKNOWN])
def test_what_is_not_known_is_left_out_of_every_sentence(lacks):
    report, log = overfitting_run()
    assert report.learning_rate is not None and report.generalisation is not None
    gap = number(report.generalisation.gap)
    rate = replace(report.learning_rate, raised=(RaisedRate((40, 60), 1e-5, 3e-5, is_over=False),))
    scores = {
        "eval/code": {500: {"mean": 0.5, "low": 0.4, "high": 0.6}, 750: {"mean": 0.75}},
        "eval/qa": {},
    }
    report = replace(report, learning_rate=rate, evaluations=scores)
    if lacks:
        report = replace(report, **{lacks: replace(getattr(report, lacks), **UNKNOWN[lacks])})
    text = str([section for section in sections(report, log) if section.id != "top"])
    assert not re.search(r"None[^,)]|nan\b|Undefined|[a-zA-Z] –", text)
    jsonschema.validate(as_json(report), SCHEMA)
    assert "'eval/code', '500', '0.5', '0.4', '0.6'" in text
    assert "'eval/code', '750', '0.75', '–', '–'" in text
    assert "Raised 3 times, to 3e-5, at steps 40–60, to the end." in text
    is_known = lacks != "generalisation"
    assert ("It gains 0.4 over the last." in text) == is_known
    assert (f"; validation is {gap} above training at the end." in text) == is_known
    assert ("MFU 41.0 %. Goodput 97.0 %." in text) == (lacks != "throughput")
    assert ("of the anomalies fell into that time" in text) == (lacks != "learning_rate")


@pytest.mark.covers("S0.28")
def test_runs_side_by_side_differ_in_speed_loss_and_configuration():
    report, log = overfitting_run()
    assert report.throughput is not None
    speed = replace(report.throughput, tokens_per_s=77_080.0)
    loss = log.series["train/loss"]
    doubled = log.series | {"train/loss": Series(loss.steps, 2 * loss.values)}
    other = replace(log, series=doubled, config={**log.config, "optim.lr": 4e-5, "new": True})
    runs = [(report, log), (replace(report, title="b", throughput=speed), other)]
    results, losses, configs = side_by_side(runs)
    assert results.table is not None
    assert ("tokens per second", "38,540", "77,080") in results.table.rows
    assert losses.table is not None and {row[-1] for row in losses.table.rows} == {
        f"+{row[1]}" for row in losses.table.rows
    }
    assert configs.table is not None
    assert {row[0] for row in configs.table.rows} == {"optim.lr", "new"}
    console = Console(file=StringIO(), width=100)
    for section in (results, losses, configs):
        print_section(console, section)
    assert f"1.3 @ {BEST}" in console.file.getvalue()  # type: ignore[attr-defined]
    assert f"1.3 @ {BEST}" in as_page(runs)
