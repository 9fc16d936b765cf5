"""Readers of training logs: the same curves in several formats, and names, units and facts of
each.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from log_formats import (
    WRITERS,
    Curves,
    make_curves,
    write_jsonl,
    write_lines,
    write_own,
    write_swift,
)

from trainer.report.readers import UnreadableLogError, read_run
from trainer.report.readers.parsing import canonical, parse_number
from trainer.report.run_log import RunLog, Series

CONFIG_SOURCES = {"ms-swift", "transformers"}


def assert_same_curves(log: RunLog, curves: Curves, *, rtol: float = 0.0) -> None:
    for key, wanted in curves.items():
        found = log.series[key]
        assert found.steps.tolist() == wanted.steps.tolist(), key
        np.testing.assert_allclose(found.values, wanted.values, rtol=rtol, atol=0, err_msg=key)


@pytest.mark.parametrize("name", WRITERS)
def test_the_same_curves_read_alike_in_every_format(tmp_path: Path, name: str) -> None:
    curves = make_curves()
    target = WRITERS[name](tmp_path, curves)
    # TensorBoard stores the learning rate in thousandths and in 32 bits.
    rtol = 1e-7 if name == "tensorboard" else 1e-15
    for path in (target, tmp_path):
        log = read_run(path)
        assert log.source == name.removesuffix("-console")
        assert_same_curves(log, curves, rtol=rtol)
        assert (
            log.num_unparsed,
            log.num_disordered_rows,
            log.num_lost_steps,
            log.num_attempts,
        ) == (0, 0, 0, 1)
        assert log.num_rows >= 204
        assert bool(log.config) == (log.source in CONFIG_SOURCES)


@pytest.mark.parametrize("name", WRITERS)
def test_nan_and_infinity_survive(tmp_path: Path, name: str) -> None:
    curves = dict(make_curves(num_steps=60))
    curves["train/loss"].values[[3, 7, 9]] = np.nan, np.inf, -np.inf
    log = read_run(WRITERS[name](tmp_path, curves))
    np.testing.assert_allclose(
        log.series["train/loss"].values, curves["train/loss"].values, rtol=1e-7
    )


@pytest.mark.covers("S2.1", "S2.3", "S2.4", "S2.5", "S2.6", "S2.20")
def test_swift_grpo_metrics_keep_their_names(tmp_path: Path) -> None:
    steps = np.arange(5, 6001, 5, dtype=np.int64)
    keys = (
        "train/loss", "train/lr", "train/grad_norm", "kl", "clip_ratio/low_mean", "reward", "reward_std",
        "rewards/Format/mean", "completions/min_length", "completions/clipped_ratio", "memory/max_reserved_gib",
    )  # fmt: skip
    curves = {
        key: Series(steps, np.linspace(0, 1 + place, len(steps))) for place, key in enumerate(keys)
    }
    curves["progress/epoch"] = Series(steps, steps / 3000)
    log = read_run(write_swift(tmp_path, curves))
    assert_same_curves(log, curves)
    assert (log.total_steps, log.span_s) == (6000, 3 * 5995.0)
    assert log.config["train_type"] == "lora"
    assert log.config["summary.last_model_checkpoint"] == "/out/checkpoint-200"
    # Strings: "46.67%" and "2h 20m 0s", of which the step time is the difference.
    assert log.series["progress/pct"].values[559] == 46.67
    assert log.series["progress/elapsed_s"].values[559] == 8400
    assert set(log.series["train/time(s)"].values) == {3.0}


def test_a_swift_output_directory_gives_its_newest_version(tmp_path: Path) -> None:
    for version, steps in (("v9-20260101-000000", 60), ("v10-20260102-000000", 80)):
        (tmp_path / version).mkdir()
        write_swift(tmp_path / version, make_curves(num_steps=steps))
    assert read_run(tmp_path).total_steps == 80


def test_swift_iteration_column_and_restart_with_an_elapsed_time_that_begins_again(
    tmp_path: Path,
) -> None:
    times = [(1, "10s"), (2, "20s"), (3, "30s"), (2, "9s"), (3, "19s"), (4, "29s")]
    rows = [
        {"iteration": f"{s}/4", "loss": float(n), "elapsed_time": t}
        for n, (s, t) in enumerate(times)
    ]
    log = read_run(write_lines(tmp_path / "logging.jsonl", rows))
    assert log.source == "ms-swift"
    assert log.series["train/loss"].values.tolist() == [0, 3, 4, 5]
    assert (log.num_attempts, log.num_lost_steps, log.num_disordered_rows) == (2, 2, 0)
    assert log.series["train/time(s)"].values.tolist() == [10, 10]


@pytest.mark.covers("S1.4", "S1.7")
def test_tags_and_csv_columns_of_the_monitoring_guide_read_alike(tmp_path: Path) -> None:
    columns = [
        "loss",
        "reward_mean",
        "reward_std",
        "accuracy_mean",
        "latency_mean",
        "budget_violation_rate",
    ]
    text = "epoch," + ",".join(columns) + "\n1,0.5,-0.1,0.2,0.1,90,0.4\n2,0.25,0.1,0.2,0.2,80,0.3\n"
    (tmp_path / "training_history.csv").write_text(text)
    (tmp_path / "validation_history.csv").write_text("epoch,loss,accuracy_mean\n2,0.5,0.25\n")
    log = read_run(tmp_path)
    assert log.series["val/accuracy_mean"].steps.tolist() == [2]
    assert log.series["train/latency_mean"].values.tolist() == [90, 80]
    assert log.series["progress/epoch"].values.tolist() == [1, 2]
    assert any("steps are epochs" in note for note in log.notes)
    for column in columns:
        tag = "/".join(["Train", "_".join(word.capitalize() for word in column.split("_"))])
        assert canonical(tag)[0] in log.series
    assert canonical("Train/Reward_Mean") == ("train/reward_mean", 1.0)
    assert canonical("Val/Loss") == ("val/loss", 1.0)
    (tmp_path / "renamed.csv").write_text(text)
    assert read_run(tmp_path / "renamed.csv").series["train/reward_mean"].values.tolist() == [
        -0.1,
        0.1,
    ]


def test_an_epoch_table_that_tells_the_last_step_of_each_epoch_has_steps(tmp_path: Path) -> None:
    (tmp_path / "training_history.csv").write_text(
        "epoch,loss,steps,last_step\n1,0.5,8,8\n2,0.25,8,16\n"
    )
    (tmp_path / "validation_history.csv").write_text("epoch,loss,step\n1,1.0,8\n")
    log = read_run(tmp_path)
    assert (log.series["train/loss"].steps.tolist(), log.series["val/loss"].steps.tolist()) == (
        [8, 16],
        [8],
    )
    assert log.series["progress/epoch"].values.tolist() == [1, 2]
    assert log.notes == ()


@pytest.mark.covers("S0.5", "S4.10", "S4.15", "S4.23")
@pytest.mark.parametrize(
    ("name", "key", "factor"),
    [
        ("train/lr(1e-3)", "train/lr", 1e-3),
        ("train/lr_1e-3", "train/lr", 1e-3),
        ("train/time_s", "train/time(s)", 1.0),
        ("eval_loss", "val/loss", 1.0),
        ("eval/loss", "val/loss", 1.0),
        ("eval_token_acc", "val/token_accuracy", 1.0),
        ("train/learning_rate", "train/lr", 1.0),
        ("train/completions/mean_length", "completions/mean_length", 1.0),
        ("sft_train/loss@sum", "train/loss", 1.0),
        ("actor/total_loss", "train/loss", 1.0),
        ("actor/sft_loss", "train/loss", 1.0),
        ("actor/lr", "train/lr", 1.0),
        ("token/response_length/mean", "tokens/response_length/mean", 1.0),
        ("mfu(%)", "throughput/train/mfu", 0.01),
        ("train/loss", "train/loss", 1.0),
        ("my own metric", "my own metric", 1.0),
    ],
)
def test_names_of_other_trainers(name: str, key: str, factor: float) -> None:
    assert canonical(name) == (key, factor)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0.5", 0.5), (" -1e-3 ", -1e-3), ("46.67%", 46.67), ("2800/6000", 2800), ("1h 2m 3s", 3723), ("3s", 3),
        ("1d 0h 0m 1s", 86401), ("0:01:30", 90), ("1 day, 2:03:04", 93784), ("2 days, 0:00:00.5", 172800.5),
        ("", None), ("now", None), ("1/2/3", None), ("5 apples", None), ("-", None), ("2026-01-01 "
                                                                                      "00:00:00", None),
    ],
)  # fmt: skip
def test_numbers_in_strings(text: str, number: float | None) -> None:
    assert parse_number(text) == number


def test_an_exact_name_wins_over_its_mirror_in_other_units(tmp_path: Path) -> None:
    rows = [
        {"step": s, "data": {"train/lr(1e-3)": 1.0, "train/lr": 2e-3, "train/lr_1e-3": 9.0}}
        for s in (1, 2)
    ]
    log = read_run(write_lines(tmp_path / "verl.jsonl", rows))
    assert {key: series.values.tolist() for key, series in log.series.items()} == {
        "train/lr": [2e-3, 2e-3]
    }


def test_a_name_of_ours_without_a_number_does_not_hide_its_mirror(tmp_path: Path) -> None:
    rows = [{"step": step, "train/lr": "warm", "train/lr(1e-3)": 2.0} for step in (1, 2)]
    log = read_run(write_lines(tmp_path / "log.jsonl", rows))
    assert {key: series.values.tolist() for key, series in log.series.items()} == {
        "train/lr": [2e-3, 2e-3]
    }


def test_transformers_state_comes_from_the_newest_checkpoint_while_the_run_goes_on(
    tmp_path: Path,
) -> None:
    for step in (9, 10):
        path = tmp_path / f"checkpoint-{step}"
        path.mkdir()
        history = [{"step": s, "loss": s / 10, "epoch": 0.1} for s in range(1, step + 1)]
        (path / "trainer_state.json").write_text(
            json.dumps({"max_steps": 20, "log_history": history})
        )
    (tmp_path / "checkpoint-10" / "model.safetensors").write_bytes(b"x")
    (tmp_path / "checkpoint-10" / "training_args.bin").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    log = read_run(tmp_path)
    assert len(log.series["train/loss"]) == 10
    assert any("read from checkpoint-10" in note for note in log.notes)
    assert any("logging_nan_inf_filter" in note for note in log.notes)
    assert [(state.step, state.is_complete) for state in log.checkpoints] == [
        (9, False),
        (10, True),
    ]
    assert log.checkpoints[0].faults == ("no weights",)


def test_rows_out_of_order_are_sorted_and_counted_and_the_later_row_of_a_step_wins(
    tmp_path: Path,
) -> None:
    rows = [{"step": s, "loss": float(n)} for n, s in enumerate([1, 2, 4, 3, 5, 5, 6])]
    log = read_run(write_lines(tmp_path / "log.jsonl", rows))
    assert log.series["train/loss"].steps.tolist() == [1, 2, 3, 4, 5, 6]
    assert log.series["train/loss"].values.tolist() == [0, 1, 3, 2, 5, 6]
    assert log.num_disordered_rows == 2


def test_nested_objects_booleans_and_texts(tmp_path: Path) -> None:
    rows = [
        {"global_step": s, "note": "warm", "ok": True, "opt": {"lr": 0.5, "g": [1]}, "x": None}
        for s in (1, 2)
    ]
    log = read_run(write_lines(tmp_path / "log.jsonl", rows))
    assert {key: series.values.tolist() for key, series in log.series.items()} == {
        "opt/lr": [0.5, 0.5]
    }


def test_our_own_log_is_preferred_to_copies_in_the_same_directory(tmp_path: Path) -> None:
    write_jsonl(tmp_path, make_curves(num_steps=50))
    write_own(tmp_path, make_curves(num_steps=60))
    assert read_run(tmp_path).source == "fsdp-sft"


def test_what_is_no_log_is_refused_with_cause_place_and_fix(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    (tmp_path / "empty").mkdir()
    (tmp_path / "story.txt").write_text("once upon a time\n")
    (tmp_path / "table.csv").write_text("a,b\n1,2\n")
    (tmp_path / "other.json").write_text("[1, 2]")
    (tmp_path / "metrics.jsonl").write_text("")
    causes = {
        "missing": "it does not exist",
        "empty": "it is empty",
        "story.txt": "holds no line like 'step:1",
        "table.csv": "no column step or epoch, only a, b",
        "other.json": "has no log_history",
        "metrics.jsonl": "metrics.jsonl",
    }
    for name, cause in causes.items():
        with pytest.raises(UnreadableLogError) as caught:
            read_run(tmp_path / name)
        message = str(caught.value)
        assert (
            str(tmp_path / name) in message
            and cause in message
            and "give a run directory or one of" in message
        )
    assert not missing.exists()
