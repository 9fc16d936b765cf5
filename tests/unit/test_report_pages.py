"""Page, text and JSON of a report: the same numbers, nothing from outside, nothing that a
hostile name can break.
"""

import json
import math
import re
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from page_text import Page, numbers_in, schema_faults
from report_examples import examples, series, summary
from rich.console import Console

from trainer.report.formatting import number, step
from trainer.report.page import as_page
from trainer.report.result import RaisedRate, Report, as_json
from trainer.report.run_log import RunLog, Series
from trainer.report.sections import around, sections
from trainer.report.side_by_side import side_by_side
from trainer.report.terminal import print_report, print_section

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "report.schema.json").read_text())
MAX_PAGE_BYTES = 1_500_000
HOSTILE = 'x/<script>alert("1")</script>&\x1b[31m[red]'

Run = tuple[Report, RunLog]


@pytest.fixture(params=["sft", "grpo"])
def run(request: pytest.FixtureRequest) -> Run:
    return examples()[request.param]


def text_of(run: Run, *, width: int = 120) -> str:
    console = Console(file=StringIO(), width=width)
    print_report(console, run[0])
    return console.file.getvalue()  # type: ignore[attr-defined]


def bare(run: Run, **changes: Any) -> Run:
    """A run that logged nothing and was not judged."""
    report, log = run
    lists = (
        "top",
        "findings",
        "metrics",
        "trends",
        "anomalies",
        "serving",
        "checklist",
        "insufficient",
    )
    empty: dict[str, Any] = dict.fromkeys(lists, ())
    parts = dict.fromkeys(("generalisation", "learning_rate", "throughput"))
    return replace(report, **empty, **parts, thresholds={}, closing=""), replace(
        log, series={}, **changes
    )


def test_text_and_page_show_the_same_numbers(run: Run) -> None:
    page = numbers_in(Page(as_page([run])).words)
    assert numbers_in(text_of(run)) - page == set()


def test_page_shows_the_numbers_of_the_json(run: Run) -> None:
    words = numbers_in(Page(as_page([run])).words.replace("(", " ").replace("×", " "))
    tree = as_json(run[0])
    expected = [finding[key] for finding in tree["findings"] for key in ("value", "threshold")]
    expected += [
        anomaly[key] for anomaly in tree["anomalies"] for key in ("peak_value", "z", "ratio")
    ]
    expected += [
        mover["peak_value"] for anomaly in tree["anomalies"] for mover in anomaly["movers"]
    ]
    expected += [
        metric[key]
        for metric in tree["metrics"]
        for key in ("first", "last", "median", "minimum", "maximum")
    ]
    expected += [
        value for trend in tree["trends"] for value in (trend["early"], trend["slope_per_step"])
    ]
    expected += [
        value for value in (tree["generalisation"] or {}).values() if isinstance(value, float)
    ]
    missing = {number(value) for value in expected if value is not None} - words
    assert len(expected) > 50 and missing == set()
    steps = {step(at) for anomaly in tree["anomalies"] for at in [anomaly["peak_step"]]}
    assert steps <= words


def test_json_keeps_its_schema(run: Run) -> None:
    assert schema_faults(json.loads(json.dumps(as_json(run[0]), allow_nan=False)), SCHEMA) == []


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda tree: tree.pop("verdict"), "$ lacks 'verdict'"),
        (lambda tree: tree.update(extra=1), "$ has an unknown 'extra'"),
        (
            lambda tree: tree["findings"][0].update(level="bad"),
            "$.findings[0].level is 'bad', none of",
        ),
        (
            lambda tree: tree["findings"][0].update(steps=[1.5]),
            "$.findings[0].steps[0] is a float, not integer",
        ),
        (lambda tree: tree.update(schema="x"), "$ is"),
    ],
)
def test_json_that_breaks_the_schema_is_caught(change: Any, fault: str) -> None:
    change(tree := as_json(examples()["sft"][0]))
    (found,) = schema_faults(tree, SCHEMA)
    assert found.startswith(fault.replace("$ is", "$.schema is"))


def test_numbers_that_are_not_finite_become_null_and_a_dash(run: Run) -> None:
    report, log = run
    finding = replace(report.findings[0], value=math.nan, threshold=math.inf)
    anomaly = replace(report.anomalies[0], ratio=math.nan, z=math.inf)
    hurt = replace(
        report,
        findings=(finding,),
        top=(finding,),
        anomalies=(anomaly,),
        thresholds={"a": math.nan},
    )
    tree = json.loads(json.dumps(as_json(hurt), allow_nan=False))
    assert (tree["findings"][0]["value"], tree["anomalies"][0]["z"], tree["thresholds"]["a"]) == (
        None,
        None,
        None,
    )
    assert schema_faults(tree, SCHEMA) == []
    assert (
        "– (limit inf)" in Page(as_page([(hurt, log)])).words
        and "nan" not in text_of((hurt, log)).lower()
    )


def test_numpy_numbers_in_a_report_become_plain_ones(run: Run) -> None:
    finding = replace(run[0].findings[0], value=np.float64(2.5), steps=(np.int64(1), np.int64(2)))  # type: ignore[arg-type]
    assert json.loads(json.dumps(as_json(replace(run[0], findings=(finding,)))))["findings"][0][
        "steps"
    ] == [1, 2]


def test_the_page_needs_nothing_from_outside(run: Run) -> None:
    html = as_page([run])
    tags = Page(html).tags
    assert {tag for tag, _ in tags} & {
        "script",
        "link",
        "img",
        "iframe",
        "object",
        "base",
        "form",
    } == set()
    addresses = {
        attrs[name] for _, attrs in tags for name in ("href", "src", "xlink:href") if name in attrs
    }
    assert addresses and all(str(address).startswith("#") for address in addresses)
    assert re.search(r"https?:|//[a-z]|@import|url\(", html) is None
    assert not any(name.startswith("on") for _, attrs in tags for name in attrs)
    anchors = [attrs["id"] for _, attrs in tags if "id" in attrs]
    assert {str(address)[1:] for address in addresses} <= set(anchors) and len(set(anchors)) == len(
        anchors
    )


def test_names_from_the_log_cannot_become_markup(run: Run) -> None:
    report, log = run
    odd = series(np.arange(1, 50), np.linspace(1, 2, 49))
    metrics = tuple(
        summary(HOSTILE, odd, group=group, meaning=HOSTILE) for group in ("reward", "other")
    )
    mover = replace(report.anomalies[0].movers[0], metric=HOSTILE)
    anomaly = replace(
        report.anomalies[0], metric=HOSTILE, movers=(mover,), chain=(HOSTILE, "b"), steps=(20, 22)
    )
    finding = replace(
        report.findings[0],
        id=HOSTILE,
        title=HOSTILE,
        metric=HOSTILE,
        evidence=(HOSTILE,),
        remedy=HOSTILE,
    )
    phases = {f"time/train/{HOSTILE}_s": odd, "time/train/a_s": odd}
    evil = replace(
        report, title=HOSTILE, source=HOSTILE, headline=HOSTILE, facts={HOSTILE: HOSTILE}, closing=HOSTILE,
        top=(finding,), findings=(finding,), metrics=metrics, anomalies=(anomaly,), insufficient=((HOSTILE, HOSTILE),),
        thresholds={HOSTILE: 1.0},
    )  # fmt: skip
    html = as_page(
        [(evil, replace(log, series={**log.series, HOSTILE: odd, **phases}, path=Path(HOSTILE)))]
    )
    page = Page(html)
    assert "script" not in {tag for tag, _ in page.tags} and "\x1b" not in html
    assert page.words.count('<script>alert("1")</script>&') > 10
    text = text_of((evil, log))
    assert "\x1b" not in text and "[red]" in text


@pytest.mark.parametrize(
    "values", [[], [2.0], [math.nan], [math.nan, 1.0, math.inf], [0.0] * 5, [-1.0, 1e300]]
)
def test_any_series_can_be_drawn(run: Run, values: list[float]) -> None:
    report, log = run
    odd = Series(np.arange(1, len(values) + 1), np.array(values, np.float64))
    broken = replace(log, series=dict.fromkeys(log.series, odd))
    html = as_page([(report, broken)])
    assert "NaN" not in html and "nan%" not in html and len(html) < MAX_PAGE_BYTES


def test_a_run_without_anything_still_has_a_page(run: Run) -> None:
    empty = bare(run)
    assert "<section" not in as_page([empty]) and empty[0].verdict in text_of(empty)
    assert schema_faults(as_json(empty[0]), SCHEMA) == []


def test_a_page_of_a_million_rows_stays_small(run: Run) -> None:
    report, log = run
    generator = np.random.default_rng(1)
    steps, values = np.arange(1, 1_000_001), generator.normal(1, 0.1, 1_000_000)
    long = replace(log, series={key: Series(steps, values) for key in log.series})
    assert len(as_page([(report, long)]).encode()) < MAX_PAGE_BYTES


def test_pages_of_several_runs_keep_their_anchors_apart() -> None:
    ids = [
        attrs["id"] for _, attrs in Page(as_page(list(examples().values()))).tags if "id" in attrs
    ]
    assert len(set(ids)) == len(ids) and sum(id_.endswith("-loss") for id_ in ids) == 2


@pytest.mark.covers("S1.27")
def test_the_loss_plot_has_raw_smoothed_and_validation_curves_with_what_happened() -> None:
    html = as_page([examples()["sft"]])
    loss = html[html.index('id="run1-loss"') : html.index('id="run1-anomalies"')]
    for css in ("s1 raw", "s1 mid", "s1 bold", "s2 bold"):
        assert f'<path class="{css}"' in loss
    assert loss.count('<circle class="s2"') == 8 and loss.count('class="band" x=') == 1
    assert loss.count("checkpoint of step") == 4 and "★ best 1.3" in loss
    assert "val 1.6</text>" in loss


def test_an_anomaly_of_a_single_step_can_be_seen() -> None:
    report, log = examples()["sft"]
    html = as_page(
        [(replace(report, anomalies=(replace(report.anomalies[0], steps=(1380, 1380)),)), log)]
    )
    widths = re.findall(r'class="band" x="[\d.]+%" width="([\d.]+)%"', html)
    assert widths and all(float(width) > 0 for width in widths)


@pytest.mark.covers("S1.25")
def test_rewards_accuracy_and_violations_are_drawn_by_epoch() -> None:
    report, log = examples()["grpo"]
    epochs = np.arange(1, 31)
    curves = {
        "reward_mean": series(epochs, np.linspace(-0.5, 0.3, 30)),
        "accuracy_mean": series(epochs, np.linspace(0, 0.3, 30)),
        "budget_violation_rate": series(epochs, np.linspace(0.5, 0.1, 30)),
    }
    metrics = tuple(summary(key, one, group="reward") for key, one in curves.items())
    controller = replace(report, profile="controller", metrics=metrics, anomalies=())
    words = Page(as_page([(controller, replace(log, series=curves))])).words
    assert all(key in words for key in curves) and words.count("epoch 10") == 3


def test_the_terminal_says_verdict_then_what_to_do_within_eighty_columns() -> None:
    text = text_of(examples()["sft"], width=80)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80 and len(lines) <= 40
    assert (
        text.index("FAIL ")
        < text.index("Do: Use the checkpoint of step 1000")
        < text.index("\nAnomalies")
    )
    assert text.count("Do: ") == 3 and "best, recommended" in text


@pytest.mark.parametrize("width", [80, 120])
def test_a_screen_shows_forty_lines_and_the_loss_first_among_many_metrics(width: int) -> None:
    report, log = examples()["sft"]
    guards = tuple(
        summary(f"guard/{n}", log.series["train/lr"], group="optimisation") for n in range(100)
    )
    findings = tuple(
        replace(report.findings[-1], id=f"f{n}", title=f"{n} " + "words " * 20) for n in range(30)
    )
    healthy = replace(report, metrics=guards + report.metrics, top=(), findings=findings)
    text = text_of((healthy, log), width=width)
    assert len(text.splitlines()) <= 40 and text.splitlines()[-1].startswith(
        "The rest: --html FILE"
    )
    assert "0 words" in text and "… 2" in text and "115 were logged" in text
    assert "\ntrain/loss " in text and "guard/" not in text


def test_a_table_without_rows_has_no_header() -> None:
    report, log = examples()["sft"]
    assert report.generalisation is not None
    unjudged = replace(report.generalisation, verdicts={}, values={})
    bare_run = (replace(report, generalisation=unjudged), log)
    assert "Generalisation: Validation loss: best 1.3" in text_of(bare_run)
    assert "verdict  mark" not in text_of(bare_run) and ">verdict</th>" not in as_page([bare_run])
    assert ">verdict</th>" in as_page([(report, log)])


@pytest.mark.parametrize(
    ("gap", "told"), [(0.25, "0.25 above"), (-0.25, "0.25 below"), (math.nan, None)]
)
def test_a_validation_below_training_is_not_called_above(gap: float, told: str | None) -> None:
    report, log = examples()["sft"]
    assert report.generalisation is not None
    text = text_of(
        (replace(report, generalisation=replace(report.generalisation, gap=gap)), log), width=200
    )
    assert (
        f"; validation is {told} training at the end." in text
        if told
        else "training at the end" not in text
    )


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


@pytest.mark.parametrize("lacks", [(), *((part,) for part in UNKNOWN)])
def test_what_is_not_known_is_left_out_of_every_sentence(lacks: tuple[str, ...]) -> None:
    report, log = examples()["sft"]
    assert report.learning_rate is not None
    rate = replace(report.learning_rate, raised=(RaisedRate((40, 60), 1e-5, 3e-5, is_over=False),))
    scores = {
        "eval/code": {500: {"mean": 0.5, "low": 0.4, "high": 0.6}, 750: {"mean": 0.75}},
        "eval/qa": {},
    }
    full = replace(report, learning_rate=rate, evaluations=scores)
    told = replace(full, **{part: replace(getattr(full, part), **UNKNOWN[part]) for part in lacks})
    text = str([section for section in sections(told) if section.id != "top"])
    assert (
        not re.search(r"None[^,)]|nan\b|Undefined|[a-zA-Z] –", text)
        and schema_faults(as_json(told), SCHEMA) == []
    )
    assert "'0.5 [0.4, 0.6]', '–'" in text and "'0.75', '–'" in text
    assert "Raised 3 times, to 3e-5, at steps 40–60, to the end." in text
    assert ("It gains 0.3 over the last." in text) == ("generalisation" not in lacks)
    assert ("MFU 41.0 %; goodput 97.0 %." in text) == ("throughput" not in lacks)
    assert ("of the anomalies fell into that time" in text) == ("learning_rate" not in lacks)
    assert len(as_page([(told, log)])) > len(text)


def test_rows_around_a_step_are_those_of_metrics_that_moved() -> None:
    section = around(examples()["grpo"][1], at=3145, window=10)
    assert section.table is not None and section.table.header[:2] == ("step", "train/loss")
    assert {"kl", "rewards/Format/mean"} <= set(
        section.table.header
    ) and "memory(GiB)" not in section.table.header
    assert [row[0] for row in section.table.rows] == ["3135", "3140", "3145", "3150", "3155"]
    assert around(examples()["grpo"][1], at=90_000, window=5).lead == "No rows there."


@pytest.mark.covers("S0.28")
def test_runs_side_by_side_differ_in_speed_loss_and_configuration() -> None:
    report, log = examples()["sft"]
    assert report.throughput is not None
    faster = replace(
        report, title="b", throughput=replace(report.throughput, tokens_per_s=2 * 38_540.0)
    )
    doubled = {
        **log.series,
        "train/loss": Series(log.series["train/loss"].steps, 2 * log.series["train/loss"].values),
    }
    other = replace(log, series=doubled, config={**log.config, "optim.lr": 4e-5, "new": True})
    runs, losses, configs = side_by_side([(report, log), (faster, other)])
    assert runs.notes == ("2: b has 2 times the tokens per second of 1: sft-7b.",)
    assert losses.table is not None and {row[-1] for row in losses.table.rows} == {"100.0 %"}
    assert configs.table is not None and {row[0] for row in configs.table.rows} == {
        "optim.lr",
        "new",
    }
    console = Console(file=StringIO(), width=100)
    for section in (runs, losses, configs):
        print_section(console, section)
    assert "1.3 @ 1000" in console.file.getvalue()  # type: ignore[attr-defined]


def test_equal_speed_is_not_told_as_a_factor(run: Run) -> None:
    twin = replace(run[0], throughput=examples()["sft"][0].throughput)
    runs, *_ = side_by_side([(twin, run[1])] * 2)
    assert runs.notes == (f"2: {twin.title} is as fast as 1: {twin.title}, in tokens per second.",)


def test_runs_without_common_metrics_can_still_be_set_side_by_side(run: Run) -> None:
    empty = bare(run, config={})
    (runs,) = side_by_side([empty, empty])
    assert runs.table is not None and ("anomalies", "0", "0") in runs.table.rows
