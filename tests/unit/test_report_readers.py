"""Readers of training logs: the same curves in every format, and names, units and facts of each."""

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

from trainer.tools.report.readers import UnreadableLogError, read_run
from trainer.tools.report.readers import tensorboard as reader
from trainer.tools.report.readers.parsing import canonical
from trainer.tools.report.run_log import RunLog, Series
from trainer.tracking import Tracking


def assert_same_curves(log: RunLog, curves: Curves, *, rtol: float = 0.0) -> None:
    for key, wanted in curves.items():
        found = log.series[key]
        assert found.steps.tolist() == wanted.steps.tolist(), key
        np.testing.assert_allclose(found.values, wanted.values, rtol=rtol, atol=0, err_msg=key)


def values(log: RunLog) -> dict[str, dict[int, float]]:
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
        assert_same_curves(log, curves, rtol=rtol)
        assert (log.num_unparsed, log.num_lost_steps) == (0, 0)
        assert log.num_attempts == 1 and log.num_rows >= 204
        assert bool(log.config) == (log.source in {"ms-swift", "transformers"})


@pytest.mark.covers("S2.1", "S2.3", "S2.4", "S2.5", "S2.6", "S2.20")
def test_swift_grpo_metrics_keep_their_names(tmp_path):
    steps = np.arange(5, 6001, 5, dtype=np.int64)
    keys = (
        "train/loss", "train/lr", "train/grad_norm", "kl", "clip_ratio/low_mean", "reward", "reward_std",
        "rewards/Format/mean", "completions/min_length", "completions/clipped_ratio", "memory/max_reserved_gib",
    )  # fmt: skip
    curves = {key: Series(steps, np.linspace(0, 1, len(steps))) for key in keys}
    curves["progress/epoch"] = Series(steps, steps / 3000)
    log = read_run(write_swift(tmp_path, curves))
    assert_same_curves(log, curves)
    assert (log.total_steps, log.span_s) == (6000, 3 * 5995.0)
    assert log.config["train_type"] == "lora"
    # Strings: "46.67%" and "2h 20m 0s", of which the step time is the difference.
    assert log.series["progress/pct"].values[559] == 46.67
    assert log.series["progress/elapsed_s"].values[559] == 8400
    assert set(log.series["train/time(s)"].values) == {3.0}


def test_a_swift_output_directory_gives_its_newest_version(tmp_path):
    for version, steps in (("v9-20260101-000000", 60), ("v10-20260102-000000", 80)):
        (tmp_path / version).mkdir()
        write_swift(tmp_path / version, make_curves(num_steps=steps))
    assert read_run(tmp_path).total_steps == 80


def test_a_restart_without_marker_takes_back_later_steps(tmp_path):
    times = [(1, "10s"), (2, "20s"), (3, "30s"), (2, "9s"), (3, "19s"), (4, "29s")]
    rows = [
        {"iteration": f"{s}/4", "loss": float(n), "elapsed_time": t}
        for n, (s, t) in enumerate(times)
    ]
    log = read_run(write_lines(tmp_path / "logging.jsonl", rows))
    assert log.source == "ms-swift"
    assert log.series["train/loss"].values.tolist() == [0, 3, 4, 5]
    assert (log.num_attempts, log.num_lost_steps) == (2, 2)
    assert log.series["train/time(s)"].values.tolist() == [10, 10]


def test_a_row_out_of_order_is_no_restart(tmp_path):
    rows = [{"step": s, "loss": float(n)} for n, s in enumerate([1, 2, 4, 3, 5, 5, 6])]
    rows += [{"step": 2, "eval_loss": 9.0}]
    log = read_run(write_lines(tmp_path / "log.jsonl", rows))
    assert values(log)["train/loss"] == {1: 0, 2: 1, 3: 3, 4: 2, 5: 5, 6: 6}
    assert log.num_attempts == 1


@pytest.mark.covers("S1.4", "S1.7")
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


def test_our_histories_have_the_steps_of_their_epochs(tmp_path):
    (tmp_path / "training_history.csv").write_text(
        "epoch,loss,steps,last_step\n1,0.5,8,8\n2,0.25,8,16\n"
    )
    (tmp_path / "validation_history.csv").write_text("epoch,loss,step\n1,1.0,8\n")
    log = read_run(tmp_path)
    assert values(log)["train/loss"] == {8: 0.5, 16: 0.25} and values(log)["val/loss"] == {8: 1.0}
    assert values(log)["progress/epoch"] == {8: 1, 16: 2} and log.notes == ()


def test_of_a_panel_with_several_runs_one_is_read(tmp_path):
    text = "Step,a - train/loss,a - train/loss__MAX,b - train/loss\n1,0.5,9,0.7\n2,0.25,9,\n"
    (tmp_path / "export.csv").write_text(text)
    log = read_run(tmp_path)
    assert values(log) == {"train/loss": {1: 0.5, 2: 0.25}}
    assert log.notes == ("columns of 1 other runs than a are left out",)


@pytest.mark.covers("S0.5", "S4.10", "S4.15", "S4.23")
@pytest.mark.parametrize(
    ("name", "key", "factor"),
    [
        ("train/lr(1e-3)", "train/lr", 1e-3),
        ("train/time_s_", "train/time(s)", 1.0),
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
        ("my own metric", "my own metric", 1.0),
    ],
)
def test_names_of_other_trainers(name, key, factor):
    assert canonical(name) == (key, factor)


def test_an_exact_name_wins_over_its_mirror_unless_it_holds_no_number(tmp_path):
    for ours, expected in ((2e-3, 2e-3), ("warm", 1e-3)):
        rows = [{"step": s, "data": {"train/lr(1e-3)": 1.0, "train/lr": ours}} for s in (1, 2)]
        log = read_run(write_lines(tmp_path / "verl.jsonl", rows))
        assert values(log) == {"train/lr": {1: expected, 2: expected}}


def test_transformers_state_comes_from_the_newest_checkpoint_while_the_run_goes_on(
    tmp_path,
):
    for step in (9, 10):
        path = tmp_path / f"checkpoint-{step}"
        path.mkdir()
        history = [{"step": s, "loss": s / 10, "epoch": 0.1} for s in range(1, step + 1)]
        state = {"max_steps": 20, "log_history": history}
        (path / "trainer_state.json").write_text(json.dumps(state))
        (path / "training_args.bin").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    (tmp_path / "checkpoint-10" / "model.safetensors").write_bytes(b"x")
    log = read_run(tmp_path)
    assert len(log.series["train/loss"]) == 10 and log.total_steps == 20
    assert any("read from checkpoint-10" in note for note in log.notes)
    assert any("logging_nan_inf_filter" in note for note in log.notes)
    assert [(one.step, one.faults) for one in log.checkpoints] == [(9, ("no weights",)), (10, ())]


def test_numbers_in_strings_and_nested_objects_count_and_other_values_do_not(
    tmp_path,
):
    texts = {"0.5": 0.5, " -1e-3 ": -1e-3, "46.67%": 46.67, "2800/6000": 2800, "1h 2m 3s": 3723}
    texts |= {"3s": 3, "1d 0h 0m 1s": 86401}
    none = ("", "now", "1/2/3", "5 apples", True, None, [1])
    row = {text: text for text in texts} | {f"none {value}": value for value in none}
    row |= {"global_step": 1, "opt": {"lr": 0.5, "g": [1]}}
    log = read_run(write_lines(tmp_path / "log.jsonl", [row]))
    assert values(log) == {key: {1: number} for key, number in (texts | {"opt/lr": 0.5}).items()}


def logged(run_dir: Path, *, steps: range, exit_code: int = 0) -> None:
    """Log one attempt of a run through our facade."""
    tracking = Tracking("project", "exp", "tensorboard", {}, run_dir=run_dir, total_steps=8)
    for step in steps:
        tracking.log({"train/loss": step / 128, "train/lr(1e-3)": 0.125}, step=step)
        if step % 2 == 0:
            tracking.log({"val/loss": float(step)}, step=step)
    tracking.finish(exit_code)


def test_our_event_files_read_like_metrics_jsonl_over_a_restart(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    logged(tmp_path, steps=range(1, 7), exit_code=1)
    logged(tmp_path, steps=range(5, 9))
    truth, log = read_run(tmp_path), read_run(tmp_path / "tensorboard")
    assert (truth.source, log.source) == ("fsdp-sft", "tensorboard")
    for key in ("train/loss", "train/lr", "val/loss"):
        assert log.series[key].by_step() == truth.series[key].by_step(), key
    assert log.num_attempts == truth.num_attempts == 2
    monkeypatch.setattr(reader, "find_spec", lambda name: None)
    with pytest.raises(UnreadableLogError, match=r"pip install 'tensorboard>=2\.18'"):
        read_run(tmp_path / "tensorboard")


def test_of_event_files_all_points_of_scalars_count_but_purged_ones(tmp_path):
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    for purge_step, steps in ((None, range(12_000)), (7, range(7, 9))):
        suffix = f".{purge_step}"
        with tensorboard.SummaryWriter(
            str(tmp_path), purge_step=purge_step, filename_suffix=suffix
        ) as writer:
            for step in steps:
                writer.add_scalar("Train/Loss", step, step)
            if purge_step is None:
                writer.add_text("note", "hello", 1)
                writer.add_histogram("weights", np.arange(10.0), 1)
                writer.add_scalar("tensor", 0.5, 3, new_style=True)
                writer.flush()
                assert len(read_run(tmp_path).series["train/loss"]) == 12_000
    log = read_run(tmp_path)
    assert set(log.series) == {"train/loss", "tensor"} and len(log.series["train/loss"]) == 9
    assert (log.num_lost_steps, log.num_attempts, log.num_unparsed) == (11_999 - 6, 2, 0)


def test_of_several_directories_of_event_files_the_newest_is_read(tmp_path):
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    for name, second in (("Jan01", 1_700_000_000), ("Jan02", 1_700_000_001)):
        with tensorboard.SummaryWriter(str(tmp_path / "runs" / name)) as writer:
            writer.add_scalar("train/loss", second, 1)
        (file,) = (tmp_path / "runs" / name).iterdir()
        file.rename(file.with_name(f"events.out.tfevents.{second}.host.1.0"))
    log = read_run(tmp_path)
    assert log.path.name == "Jan02" and "1 other directories" in log.notes[-1]


def test_our_own_log_is_preferred_to_copies_in_the_same_directory(tmp_path):
    write_jsonl(tmp_path, make_curves(num_steps=50))
    write_own(tmp_path, make_curves(num_steps=60))
    assert read_run(tmp_path).source == "fsdp-sft"


@pytest.mark.parametrize(
    ("name", "content", "cause"),
    [
        ("missing", None, "it does not exist"),
        ("story.txt", "once upon a time\n", "holds no line like 'step:1"),
        ("table.csv", "a,b\n1,2\n", "no column step or epoch, only a, b"),
        ("other.json", "[1, 2]", "has no log_history"),
        ("metrics.jsonl", "", "no metrics in it"),
        ("", None, "it is empty"),
    ],
)
def test_what_is_no_log_is_refused_with_cause_place_and_fix(tmp_path, name, content, cause):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(UnreadableLogError) as caught:
        read_run(tmp_path / name)
    message = str(caught.value)
    assert (
        str(tmp_path / name) in message and cause in message and "give a run directory" in message
    )
