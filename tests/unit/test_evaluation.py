"""Scoring checkpoints: each once whatever ends it, the numbers right, the reader safe from
rotation.
"""

import json
import math
import random
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from checkpoint_fakes import commit

from trainer.checkpoint import layout, retention
from trainer.checkpoint.rollback import worth_keeping
from trainer.cli import evaluate as command
from trainer.cli import report
from trainer.config import ConfigError
from trainer.evaluation.evaluate import Evaluation, append_result, evaluate, interval
from trainer.evaluation.programs import ProgramLimits
from trainer.evaluation.scorers import (
    Question,
    digest_of_questions,
    make_scorer,
    program_of,
    read_questions,
)
from trainer.progress import History
from trainer.report.analyse import analyse
from trainer.report.readers import read_run
from trainer.run.compose import load_config
from trainer.runtime.evaluations import FILE_NAME, read_evaluations, read_summaries
from trainer.serving.engines import vllm_rank
from trainer.serving.generation import Sampling, Turns
from trainer.tracking import Tracking, read_metrics


class Killed(BaseException):
    """Stands for a kill: nothing after it runs."""


class FakeEngine:
    """Answers every question with its number, and is killed before the n-th answer."""

    name = "fake 1"

    def __init__(self, kill_before: int | None = None) -> None:
        self.kill_before, self.asked = kill_before, list[int]()

    def generate(
        self, export: Path, prompts: Mapping[int, Turns], sampling: Sampling
    ) -> Iterator[tuple[int, str]]:
        for number, index in enumerate(prompts):
            if number == self.kill_before:
                raise Killed
            self.asked.append(index)
            yield index, str(index % 4)


def asked_of(engine: FakeEngine, num_questions: int = 100) -> Evaluation:
    turns = [{"role": "user", "content": "?"}]
    questions = [Question(turns, str(i % 3), {"i": i}, f"q:{i}") for i in range(num_questions)]
    scorer = make_scorer("exact", ProgramLimits())
    return Evaluation(
        "quiz", questions, "exact", scorer, "fake", engine, Sampling(), ProgramLimits()
    )


def run_with(root: Path, *steps: int) -> Path:
    root.mkdir(exist_ok=True)
    for step in steps:
        path = commit(root, step)
        (path / "huggingface").mkdir(exist_ok=True)
        (path / "huggingface" / "config.json").write_text("{}")
        (path / "huggingface" / "model.safetensors").write_bytes(b"")
    return root


def test_killed_five_times_it_goes_on_and_writes_every_sample_once(tmp_path: Path) -> None:
    run_dir, chance = run_with(tmp_path, 10), random.Random(1)
    info = layout.committed(run_dir)[0]
    for _ in range(5):
        with pytest.raises(Killed):
            evaluate(run_dir, info, asked_of(FakeEngine(chance.randrange(20))), tell=print)
        with (run_dir / FILE_NAME).open("a") as file:
            file.write('{"kind":"sample","step":10,"ind')  # torn
    assert evaluate(run_dir, info, asked_of(FakeEngine()), tell=print)
    rows = read_evaluations(run_dir)
    assert sorted(row["index"] for row in rows if row["kind"] == "sample") == list(range(100))
    summary = read_summaries(run_dir)["eval/quiz"][10]
    right = sum(i % 4 == i % 3 for i in range(100))
    assert (summary["mean"], summary["n"]) == (right / 100, 100) and summary[
        "low"
    ] < right / 100 < summary["high"]
    again = FakeEngine()
    assert not evaluate(run_dir, info, asked_of(again), tell=print) and again.asked == []
    assert all(json.loads(line) for line in (run_dir / FILE_NAME).read_text().splitlines())


def test_a_checkpoint_whose_export_has_no_weights_is_refused_by_name(tmp_path: Path) -> None:
    """Its huggingface/ has config.json and the tokenizer all the same, and what passes through."""
    export = run_with(tmp_path, 10) / "global_step_10" / "huggingface"
    (export / "model.safetensors").rename(export / "model-other-parts.safetensors")
    with pytest.raises(
        ConfigError, match=r"huggingface' holds no weights, .*save_contents had no hf_model"
    ):
        evaluate(tmp_path, layout.committed(tmp_path)[0], asked_of(FakeEngine()), tell=print)


@pytest.mark.parametrize(
    ("right", "n", "low", "high"),
    [(0, 10, 0.0, 0.27753), (10, 10, 0.72247, 1.0), (81, 263, 0.25529, 0.36621)],
)
def test_the_interval_is_wilsons(right: int, n: int, low: float, high: float) -> None:
    """The last row: Newcombe 1998, table I."""
    assert interval([1.0] * right + [0.0] * (n - right)) == pytest.approx(
        (right / n, low, high), abs=5e-5
    )


@pytest.mark.parametrize(
    ("word", "expected", "completion", "value"),
    [
        ("exact", "a b", " a\n b", 1),
        ("exact", "a", "a.", 0),
        ("regex", r"\b4\b", "it is 4.", 1),
        ("regex", r"\b4\b", "44", 0),
        ("numeric", "2 + 2 = 4\n#### 1,200", "so $1200.00.", 1),
        ("numeric", "#### 0.5", "5 of 10, 1/2", 1),
        ("numeric", "#### 18", "18 then #### 17", 0),
        ("numeric", "18", "none", 0),
        ("python:math.nothing", "", "", None),
        ("nothing", "", "", None),
    ],
)
def test_scorers(word: str, expected: str, completion: str, value: int | None) -> None:
    if value is None:
        with pytest.raises(ConfigError):
            make_scorer(word, ProgramLimits())
    else:
        assert (
            make_scorer(word, ProgramLimits())(Question([], expected, {}, "q:1"), completion).value
            == value
        )


def test_the_program_is_the_first_fenced_block() -> None:
    assert program_of("Sure:\n```python\nx = 1\n```\n```\ny\n```") == "x = 1"
    assert program_of("```python\nx = 1") == "x = 1" and program_of("x = 1") == "x = 1"


@pytest.mark.parametrize(
    "fence", ["``` python", "```python ", '```python title="a.py"', "```python\r", "```c#"]
)
def test_what_stands_behind_a_fence_is_no_part_of_the_program(fence: str) -> None:
    assert program_of(f"Sure:\n{fence}\nx = 1\n```\nDone.") == "x = 1"


def test_questions_of_rows(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    path = tmp_path / "q.jsonl"
    path.write_text(
        "\n".join(json.dumps(row) for row in ({"prompt": "p", "answer": 3}, {"messages": chat}))
    )
    first, second = read_questions(path, answer_key="answer")
    assert (first.turns[0]["content"], first.expected) == ("p", 3)
    assert (second.turns, second.expected) == (chat[:1], "b")
    assert [question.expected for question in read_questions(path, answer_key="tests")] == [
        None,
        None,
    ]
    assert digest_of_questions(read_questions(path, answer_key="tests")) != digest_of_questions(
        [first, second]
    )


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--score", "exec"], 2, "add --allow-code"),
        (["--score", "exec", "--allow-code"], 65, "exec needs tests"),
        (["--score", "exact", "--answer", "label"], 65, "no answer to compare with"),
        (
            ["--score", "exact", "--engine", "vllm", "--python", "/nosuch"],
            2,
            "--python /nosuch is no interpreter",
        ),
        (["--score", "exact", "--engine", "vllm"], 2, "has no vllm (pip install vllm)"),
        (["--score", "exact", "--step", "9"], 2, "No such file or directory; there are: 1"),
        (["--tasks", "gsm8k"], 2, "has no lm_eval"),
        (["--tasks", "gsm8k", "--engine", "http://host/v1"], 2, "--watch and --tasks need another"),
        (["--score", "exact", "--", "--limit", "5"], 2, "they need --tasks"),
    ],
)
def test_what_is_missing_is_named_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], code: int, said: str
) -> None:
    run_dir, prompts = run_with(tmp_path / "run", 1), tmp_path / "q.jsonl"
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    prompts.write_text(json.dumps({"messages": chat}))
    assert command.main([str(run_dir), "--prompts", str(prompts), *words]) == code
    assert said in capsys.readouterr().err and not (run_dir / FILE_NAME).exists()


def test_vllm_is_given_the_next_rank_that_it_takes() -> None:
    assert [vllm_rank(rank) for rank in (0, 16, 17, 24, 300, 512)] == [16, 16, 32, 32, 320, 512]
    with pytest.raises(ConfigError, match="merge"):
        vllm_rank(513)


def test_from_another_directory_it_says_from_where_a_run_is_to_be_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = run_with(tmp_path / "run", 1)
    words = ["data.train_files=own.jsonl", "trainer.default_local_dir=run"]
    (run_dir / "run.json").write_text(json.dumps({"config": load_config(words).resolved}))
    for place, is_told in ((tmp_path, False), (run_dir, True)):
        monkeypatch.chdir(place)
        assert command.main([str(run_dir), "--score", "exact"]) == 65
        said = capsys.readouterr().err
        assert "no such file: 'own.jsonl'" in said and ("call it from there" in said) is is_told


def test_rotation_spares_the_best_that_was_scored(tmp_path: Path) -> None:
    run_dir = run_with(tmp_path, 1, 2, 3, 4)
    for step, value in ((2, 0.9), (3, 0.2)):
        append_result(run_dir, name="code", step=step, value=value)
    spared = worth_keeping(run_dir, History(), "eval/code")
    assert spared == {2} and worth_keeping(run_dir, History()) == set()
    retention.rotate(run_dir, keep=1, protect=spared)
    assert [info.step for info in layout.committed(run_dir)] == [2, 4]


def test_a_result_from_elsewhere_is_logged_and_decides_in_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = run_with(tmp_path / "run", 10, 20)
    tracking = Tracking("sft", "exp", [], {}, run_dir=run_dir, total_steps=20)
    for step in range(1, 21):
        tracking.log({"train/loss": 2.0 - step / 20}, step)
        if step % 10 == 0:
            tracking.log({"val/loss": 1.5 - step / 40}, step)
    tracking.finish(0)
    before = (run_dir / "metrics.jsonl").read_bytes()
    for step, value in (("10", "0.75"), ("20", "0.5")):
        assert command.main([str(run_dir), "--attach", step, "code", value]) == 0
    assert (run_dir / "metrics.jsonl").read_bytes() == before
    logged = read_metrics(run_dir / "evaluation" / "code" / "metrics.jsonl")
    assert [(row["step"], row["eval/code"]) for row in logged] == [(10, 0.75), (20, 0.5)]
    described = json.loads((run_dir / "evaluation" / "code" / "run.json").read_text())
    assert (described["project_name"], described["group"]) == ("sft", "exp")
    found = analyse(read_run(run_dir)).generalisation
    assert (
        found is not None
        and found.recommended_step == 10
        and math.isclose(found.expected_gain, 0.25)
    )
    assert "eval/code" in found.reason and "outranks" in found.reason
    assert command.main([str(run_dir), "--attach", "20", "code", "0.75"]) == 0
    found = analyse(read_run(run_dir)).generalisation
    assert found is not None and found.recommended_step == 20, (
        "equal results: the validation loss decides"
    )
    capsys.readouterr()
    assert report.main([str(run_dir)]) == 0 and "eval/code" in capsys.readouterr().out, (
        "by step, two of them"
    )
    assert command.main([str(run_dir), "--attach", "10", "code", "nan"]) == 2
    assert "--attach takes STEP NAME VALUE" in capsys.readouterr().err


HARNESS = """\
import json, pathlib, sys
if "lm_eval" in sys.argv:
    words = sys.argv[sys.argv.index("lm_eval") + 1 :]
    out = pathlib.Path(words[words.index("--output_path") + 1])
    pathlib.Path(__file__).with_name("asked.json").write_text(json.dumps(words))
    found = {"alias": "mine", "acc,none": 0.5, "acc_stderr,none": 0.1, "exact_match,strict": 1}
    tree = {"results": {"mine": found}, "n-samples": {"mine": {"effective": 20}}}
    (out / "results_1.json").write_text(json.dumps(tree if "--predict_only" not in words else {}))
"""


@pytest.mark.parametrize(
    ("engine", "served"),
    [("transformers", "peft={}"), ("vllm", "lora_local_path={},max_lora_rank=32")],
)
def test_results_of_lm_evaluation_harness_land_in_the_log_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], engine: str, served: str
) -> None:
    """It is asked for this adapter with its own tokenizer, whatever options the user hands on
    to it.
    """
    run_dir, base, python = run_with(tmp_path / "run", 10), tmp_path / "base", tmp_path / "python"
    export = run_dir / "global_step_10" / "huggingface"
    (export / "config.json").unlink()
    base.mkdir()
    (export / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": str(base), "r": 24})
    )
    (export / "tokenizer_config.json").write_text("{}")
    (export / "chat_template.jinja").write_text("")
    (run_dir / "run.json").write_text(json.dumps({"config": {"trainer": {"logger": "console"}}}))
    python.write_text(f"#!{sys.executable}\n{HARNESS}")
    python.chmod(0o755)
    words = [str(run_dir), "--tasks", "mine", "--engine", engine, "--python", str(python), "--"]
    assert (
        command.main([*words, "--include_path", "tasks", "--model_args", "pretrained=other"]) == 0
    )
    asked = json.loads((tmp_path / "asked.json").read_text())
    assert asked[:2] == ["--include_path", "tasks"]
    last = len(asked) - 1 - asked[::-1].index("--model_args")
    read = asked[last + 1].rpartition("tokenizer=")[2]
    assert read.startswith(f"{run_dir}/.reading_") and read.endswith(str(export)), (
        "links, whatever rotation deletes"
    )
    assert asked[last + 1] == f"pretrained={base},dtype=auto,{served.format(read)},tokenizer={read}"
    assert "without the chat template; with it: --tasks" in capsys.readouterr().out
    rows = read_summaries(run_dir)
    assert (
        rows["eval/mine_acc"][10]["mean"] == 0.5
        and rows["eval/mine_exact_match_strict"][10]["mean"] == 1
    )
    assert rows["eval/mine_acc"][10]["n"] == 20 and rows["eval/mine_acc"][10][
        "low"
    ] == pytest.approx(0.304, abs=1e-3)
    assert read_metrics(run_dir / "evaluation/mine_acc/metrics.jsonl")[0]["eval/mine_acc"] == 0.5
    assert (
        command.main([*words, "--include_path", "tasks", "--model_args", "pretrained=other"]) == 0
    )
    assert "was measured before" in capsys.readouterr().out and len(read_evaluations(run_dir)) == 2
    assert command.main([*words, "--predict_only"]) == 2 and "0 results" in capsys.readouterr().err
