"""Scoring of checkpoints: each once, with correct numbers, and safe from rotation."""

from dataclasses import replace
from unittest.mock import Mock

import pytest
from checkpoint_fakes import commit
from small_files import write_json, write_lines

from trainer.checkpoint import layout, retention
from trainer.checkpoint.retention import worth_keeping
from trainer.cli import evaluate as command
from trainer.config import ConfigError
from trainer.runtime.evaluations import FILE_NAME, read_evaluations, sign_of
from trainer.runtime.progress import History
from trainer.tools.evaluate import programs
from trainer.tools.evaluate.scorers import SCORERS, Question, exact, program_of
from trainer.tools.evaluate.scoring import Evaluation, append_result, evaluate, interval
from trainer.tools.report.analyse import analyse
from trainer.tools.report.readers import read_run
from trainer.tracking import Tracking, read_metrics
from trainer.train.start.compose import load_config

CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
QUESTIONS = [Question(str(i), [i], i % 3, f"q:{i}") for i in range(100)]


def answers(export, prompts, _):
    """Replaces an engine: answer with the number modulo 4."""
    return [str(number % 4) for (number,) in prompts]


ASKED = Evaluation("quiz", QUESTIONS, [*map(exact, QUESTIONS)], "exact", "fake", answers, 8)
KILLED = replace(ASKED, generate=Mock(side_effect=KeyboardInterrupt))


def run_with(root, *steps):
    root.mkdir(exist_ok=True)
    for step in steps:
        (commit(root, step) / "huggingface/model.safetensors").touch()
    return root


def record(run_dir, *words):
    """Write the configuration of a run with the quickstart's model."""
    config = load_config(list(words)).resolved
    write_json(run_dir / "run.json", {"config": config})


def test_after_a_kill_it_asks_again_and_writes_every_sample_once(tmp_path):
    run_dir = run_with(tmp_path, 10)
    (info,) = layout.committed(run_dir)
    with pytest.raises(KeyboardInterrupt):
        evaluate(run_dir, info, KILLED)
    (run_dir / FILE_NAME).write_text('{"kind":"sample","step":10,"ind')  # torn
    summary = evaluate(run_dir, info, ASKED)
    right = sum(i % 4 == i % 3 for i in range(100))
    assert summary and (summary["mean"], summary["n"]) == (right / 100, 100)
    assert summary["low"] < right / 100 < summary["high"]
    samples = [row for row in read_evaluations(run_dir) if row["kind"] == "sample"]
    assert sorted(row["index"] for row in samples) == list(range(100))
    assert evaluate(run_dir, info, KILLED) == summary, "nothing is asked again"


def test_a_checkpoint_whose_export_has_no_weights_is_refused_by_name(tmp_path):
    """The huggingface/ folder still has config.json, the tokenizer and untrained tensors."""
    export = run_with(tmp_path, 10) / "global_step_10" / "huggingface"
    (export / "model.safetensors").rename(export / "model-other-parts.safetensors")
    with pytest.raises(ConfigError, match="weights"):
        evaluate(tmp_path, layout.committed(tmp_path)[0], ASKED)


def test_a_checkpoint_that_cannot_be_served_is_named_by_its_own_path(tmp_path):
    """The message does not name the links that the evaluation reads."""

    def refused(export, *_):
        raise ConfigError(f"{export}/model.safetensors cannot be read")

    (info,) = layout.committed(run_with(tmp_path, 10))
    with pytest.raises(ConfigError, match=f"^{info.path}/huggingface/model.safetensors"):
        evaluate(tmp_path, info, replace(ASKED, generate=refused))


@pytest.mark.parametrize(
    ("right", "n", "low", "high"),
    [(0, 10, 0.0, 0.27753), (10, 10, 0.72247, 1.0), (81, 263, 0.25529, 0.36621)],
)
def test_the_interval_is_wilsons(right, n, low, high):
    """The last row is from Newcombe 1998, table I."""
    assert interval(right, n) == pytest.approx((right / n, low, high), abs=5e-5)


@pytest.mark.parametrize(
    ("scorer", "expected", "answer", "is_right"),
    [
        ("exact", "a b", " a\n b", True),
        ("exact", "a", "a.", False),
        ("numeric", "2 + 2 = 4\n#### 1,200", "so $1200.00.", True),
        ("numeric", "#### 0.5", "5 of 10, 1/2", True),
        ("numeric", "#### 18", "18 then #### 17", False),
        ("numeric", "18", "none", False),
        ("numeric", 0.00005, "0.00005", True),
        ("numeric", 0.00005, "-5", False),
        ("numeric", "1.5e3", "1.5E+03", True),
        ("numeric", "-0.05", "about -5e-2 of it", True),
        ("numeric", "1e9999999999", "9999999999", True),
        ("numeric", "5", "2024-05", True),
        ("numeric", "-5", "2024-05", False),
        ("numeric", "3", "x = (5)-3", True),
        ("numeric", "-5", "a loss of -$5", True),
        ("numeric", "-5", "$-5", True),
        ("numeric", "-5", "\N{MINUS SIGN}5", True),
        ("numeric", "1/2", "x=+1/2", True),
    ],
)
def test_scorers(scorer, expected, answer, is_right):
    judge = SCORERS[scorer](Question("", [], expected, "q:1"))
    assert (judge(answer) == "") == is_right


@pytest.mark.parametrize("fence", ["```python", '```python title="a.py"'])
def test_the_program_is_the_first_fenced_block(fence):
    assert program_of(f"Sure:\n{fence}\nx = 1\n```\n```\ny\n```") == "x = 1"
    assert program_of(f"{fence}\nx = 1") == program_of("x = 1") == "x = 1", "without an end"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--score", "exec"], 2, "--allow-code"),
        (["--score", "exec", "--allow-code"], 65, "exec needs tests"),
        (["--score", "exact", "--engine", "vllm", "--python", "/no"], 2, "/no"),
        (["--attach", "10", "code", "nan"], 2, "--attach"),
        (["--attach", "999", "code", "1"], 2, "has not saved a checkpoint at step 999"),
    ],
)
def test_wrong_usage_is_refused_before_anything_is_written(
    tmp_path, capsys, monkeypatch, words, code, said
):
    monkeypatch.setattr(programs, "require_isolation", lambda: "")
    run_dir = run_with(tmp_path / "run", 1)
    record(run_dir)
    prompts = tmp_path / "q.jsonl"
    write_json(prompts, {"messages": CHAT})
    assert command.main([str(run_dir), "--prompts", str(prompts), *words]) == code
    assert said in capsys.readouterr().err and not (run_dir / FILE_NAME).exists()


@pytest.mark.parametrize(("name", "spared_step"), [("code", 2), ("wiki_ppl", 3)])
def test_rotation_spares_the_best_that_was_scored(tmp_path, name, spared_step):
    run_dir = run_with(tmp_path, 1, 2, 3, 4)
    for step, value in ((2, 0.9), (3, 0.2)):
        append_result(run_dir, name=name, step=step, value=value)
    spared = worth_keeping(run_dir, History(), layout.committed(run_dir))
    retention.rotate(run_dir, keep=1, protect=spared)
    assert [info.step for info in layout.committed(run_dir)] == [spared_step, 4]


@pytest.mark.parametrize(("best_step", "kept"), [(1, 2), (3, 2), (5, 4)])
def test_rotation_spares_a_checkpoint_near_the_best_validation(tmp_path, best_step, kept):
    """Return the last checkpoint up to the step, or the first one after it."""
    run_dir = run_with(tmp_path, 2, 4, 6)
    history = History(best_step=best_step)
    assert worth_keeping(run_dir, history, layout.committed(run_dir)) == {kept}


def test_only_attached_results_whose_names_say_so_are_better_if_lower():
    attached = {10: {"scorer": "attached"}}
    lower = ("eval/perplexity", "eval/word-error_rate", "eval/Loss", "eval/ppl.wiki")
    assert {sign_of(name, attached) for name in lower} == {-1}
    assert {sign_of(name, attached) for name in ("eval/lossless", "eval/applied")} == {1}
    assert sign_of("eval/error_questions", {10: {"scorer": "exact"}}) == 1


def test_a_result_is_attached_to_a_deleted_checkpoint_from_the_directory_of_another(
    tmp_path, monkeypatch
):
    """`.` was refused, because it does not look like the name of a checkpoint."""
    run_dir = run_with(tmp_path, 20)
    record(run_dir, "trainer.logger=[console]")
    event = {"ts": 1, "attempt": 1, "step": 10, "kind": "checkpoint", "level": "", "message": ""}
    write_lines(run_dir / "events.jsonl", [event])
    monkeypatch.chdir(run_dir / "global_step_20")
    assert command.main([".", "--attach", "10", "code", "1"]) == 0


@pytest.mark.parametrize(
    ("name", "with_validation", "best"),
    [("code", True, 10), ("perplexity", True, 20), ("perplexity", False, 20)],
)
def test_a_result_from_elsewhere_is_logged_and_decides_in_the_report(
    tmp_path, name, with_validation, best
):
    run_dir = run_with(tmp_path / "run", 10, 20)
    tracking = Tracking("sft", "exp", [], {}, run_dir=run_dir, total_steps=20)
    for step in range(1, 21):
        tracking.log({"train/loss": 2.0 - step / 20}, step)
        if step % 10 == 0 and with_validation:
            tracking.log({"val/loss": 1.5 - step / 40}, step)
    tracking.finish(0)
    for step, value in (("10", "0.75"), ("20", "0.5")):
        assert command.main([str(run_dir), "--attach", step, name, value]) == 0
    logged = read_metrics(run_dir / "evaluation" / name / "metrics.jsonl")
    assert [(row["step"], row[f"eval/{name}"]) for row in logged] == [(10, 0.75), (20, 0.5)]
    found = analyse(read_run(run_dir)).generalisation
    assert found.recommended_step == best
