"""Readers of training logs: equal curves in every format, and the names, units and facts of each
format.
"""

import json
import sys

import numpy as np
import pytest
from log_formats import SWIFT_NAMES, WRITERS, make_curves, write_swift
from small_files import write_lines

from trainer.tools.report.readers import UnreadableLogError, read_run
from trainer.tools.report.readers.parsing import canonical
from trainer.tools.report.run_log import Series
from trainer.tracking import Tracking


def values(log):
    return {key: series.by_step() for key, series in log.series.items()}


@pytest.mark.parametrize("name", WRITERS)
def test_the_same_curves_read_alike_in_every_format(tmp_path, name):
    curves = make_curves()
    curves["train/loss"].values[[3, 7, 9]] = np.nan, np.inf, -np.inf
    target = WRITERS[name](tmp_path, curves)
    # TensorBoard stores the learning rate in thousandths and in 32 bits.
    rtol = 1e-7 if name == "tensorboard" else 1e-15
    for path in (target, tmp_path):
        log = read_run(path)
        assert log.source == (name if name in ("fsdp-sft", "ms-swift") else name.split("-")[0])
        for key, wanted in curves.items():
            found = log.series[key]
            assert found.steps.tolist() == wanted.steps.tolist(), key
            np.testing.assert_allclose(found.values, wanted.values, rtol=rtol, err_msg=key)
        assert (log.num_unparsed, log.num_lost_steps, log.num_attempts) == (0, 0, 1)
        assert log.num_rows >= 204


@pytest.mark.covers("S2.1 S2.3 S2.4 S2.5 S2.6 S2.20")
def test_swift_grpo_metrics_keep_their_names_and_the_newest_version_counts(tmp_path):
    steps = np.arange(5, 6001, 5)
    keys = [*SWIFT_NAMES, "kl", "reward_std", "rewards/Format/mean", "completions/min_length"]
    ramp = Series(steps, np.linspace(0, 1, len(steps)))
    for version, curves in (("v9-2026", make_curves()), ("v10-2026", dict.fromkeys(keys, ramp))):
        (tmp_path / version).mkdir()
        write_swift(tmp_path / version, curves)
    log = read_run(tmp_path)
    assert all(np.array_equal(log.series[key].values, ramp.values) for key in keys)
    assert (log.total_steps, log.span_s) == (6000, 3 * 5995.0)
    assert log.config["train_type"] == "lora" and "logging_nan_inf_filter" in log.notes[1]
    # Strings: "46.67%" and "2h 20m 0s", of which the step time is the difference.
    assert log.series["progress/pct"].values[559] == 46.67
    assert log.series["progress/elapsed_s"].values[559] == 8400
    assert set(log.series["train/time(s)"].values) == {3.0}


def test_a_restart_without_marker_takes_back_later_steps(tmp_path):
    times = [(1, "10s"), (2, "20s"), (3, "30s"), (2, "9s"), (3, "19s"), (4, "29s")]
    rows = [
        {"iteration": f"{step}/4", "loss": float(n), "elapsed_time": time}
        for n, (step, time) in enumerate(times)
    ]
    late_validation = {"iteration": "2/4", "eval_loss": 9.0}
    log = read_run(write_lines(tmp_path / "logging.jsonl", [*rows, late_validation]))
    assert values(log)["train/loss"] == {1: 0, 2: 3, 3: 4, 4: 5}
    assert values(log)["val/loss"] == {2: 9}
    assert (log.num_attempts, log.num_lost_steps) == (2, 2)
    assert log.series["train/time(s)"].values.tolist() == [10, 10]


@pytest.mark.covers("S1.4 S1.7")
def test_histories_of_epochs_and_their_tags_read_alike(tmp_path):
    columns = "loss,reward_mean,reward_std,accuracy_mean,latency_mean,budget_violation_rate"
    text = f"epoch,{columns}\n1,0.5,-0.1,0.2,0.1,90,0.4\n2,0.25,0.1,0.2,0.2,80,0.3\n"
    (tmp_path / "training_history.csv").write_text(text)
    (tmp_path / "validation_history.csv").write_text("epoch,loss,accuracy_mean\n2,0.5,0.25\n")
    log = read_run(tmp_path)
    assert values(log)["val/accuracy_mean"] == {2: 0.25}
    assert values(log)["train/latency_mean"] == {1: 90, 2: 80}
    assert values(log)["progress/epoch"] == {1: 1, 2: 2}
    assert any("steps are epochs" in note for note in log.notes)
    for column in columns.split(","):
        tag = "/".join(["Train", "_".join(word.capitalize() for word in column.split("_"))])
        assert canonical(tag)[0] in log.series
    (tmp_path / "renamed.csv").write_text(text)
    assert values(read_run(tmp_path / "renamed.csv"))["reward_mean"] == {1: -0.1, 2: 0.1}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(
            "epoch,loss,steps,last_step\n1,0.5,8,8\n2,0.25,8,16\n",
            {"train/loss": {8: 0.5, 16: 0.25}, "progress/epoch": {8: 1, 16: 2}},
            id="our history has the steps of its epochs",
        ),
        pytest.param(
            '"Step","a - loss","a - loss__MAX","b - loss"\n1,0.5,9,0.7\n2,0.25,9,\n',
            {"train/loss": {1: 0.5, 2: 0.25}},
            id="of a panel with several runs the first is read",
        ),
        pytest.param("step;lr\n3;0.5\n\n", {"train/lr": {3: 0.5}}, id="semicolons, a blank line"),
    ],
)
def test_tables(tmp_path, text, expected):
    (tmp_path / "table.csv").write_text(text)
    log = read_run(tmp_path)
    assert (values(log), log.num_unparsed) == (expected, 0)


def test_transformers_state_comes_from_the_newest_checkpoint_while_the_run_trains(tmp_path):
    for step in (9, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()
        row = {"epoch": 0.1, "rewards": {"chosen": 0.25}}
        history = [row | {"step": s, "loss": s / 10} for s in range(1, step + 1)]
        state = json.dumps({"max_steps": 20, "log_history": history})
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(state)
        (tmp_path / f"checkpoint-{step}" / "training_args.bin").write_bytes(b"cos\nsystem\n(S'1'")
    log = read_run(tmp_path)
    assert len(log.series["train/loss"]) == 10 and log.total_steps == 20
    assert values(log)["rewards/chosen"][10] == 0.25
    assert [one.step for one in log.checkpoints] == [9, 10]


def test_numbers_in_strings_and_nested_objects_count_and_other_values_do_not(tmp_path):
    texts = {"0.5": 0.5, " -1e-3 ": -1e-3, "46.67%": 46.67, "2800/6000": 2800, "1h 2m 3s": 3723}
    texts |= {"3s": 3, "1d 0h 0m 1s": 86401}
    none = ("", "now", "1/2/3", "5 apples", True, None, [1])
    row = {text: text for text in texts} | {f"none {value}": value for value in none}
    row |= {"global_step": 1, "opt": {"lr": 0.5, "g": [1]}}
    log = read_run(write_lines(tmp_path / "log.jsonl", [row]))
    assert values(log) == {key: {1: number} for key, number in (texts | {"opt/lr": 0.5}).items()}


@pytest.mark.covers("S3.29")
def test_our_event_files_read_like_metrics_jsonl_over_a_restart(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    for attempt, steps in ((1, range(1, 7)), (2, range(5, 9))):
        tracking = Tracking("project", "exp", "tensorboard", {}, run_dir=tmp_path, total_steps=8)
        for step in steps:
            loss = np.nan if step == 7 else attempt + step / 128
            rates = {"train/lr(1e-3)": 0.125, "train/lr": 0.125e-3}
            tracking.log({"train/loss": loss, **rates}, step=step)
            if step % 2 == 0:
                tracking.log({"val/loss": float(step)}, step=step)
        tracking.finish(0)
    truth = read_run(tmp_path)
    log = read_run(tmp_path / "tensorboard")
    assert (truth.source, log.source) == ("fsdp-sft", "tensorboard")
    losses = [1 + step / 128 for step in range(1, 5)] + [2 + 5 / 128, 2 + 6 / 128, np.nan, 2.0625]
    np.testing.assert_equal(values(truth)["train/loss"], dict(enumerate(losses, 1)))
    assert values(truth)["train/lr"] == dict.fromkeys(range(1, 9), 0.125e-3)
    for key in ("train/loss", "val/loss"):
        np.testing.assert_equal(values(log)[key], values(truth)[key])
    assert (truth.num_attempts, truth.num_lost_steps, truth.num_unparsed) == (2, 2, 0)
    assert log.num_attempts == 2
    monkeypatch.setitem(sys.modules, "tensorboard.util.tensor_util", None)
    with pytest.raises(UnreadableLogError, match=r"pip install 'tensorboard>=2\.18'"):
        read_run(tmp_path / "tensorboard")


@pytest.mark.parametrize(
    ("name", "content", "cause"),
    [
        ("missing", None, "No such file"),
        ("story.txt", "once upon a time\n", "no metrics"),
        ("table.csv", "a,b\n1,2\n", "no column 'step' or 'epoch', only a, b"),
        ("other.json", "[1, 2]", "no metrics"),
        ("metrics.jsonl", "", "no metrics"),
        ("", None, "no log"),
    ],
)
def test_a_file_without_metrics_is_refused_with_cause_place_and_fix(tmp_path, name, content, cause):
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(UnreadableLogError) as caught:
        read_run(path)
    assert str(path) in str(caught.value) and cause in str(caught.value)
    assert "Fix: " in str(caught.value)
