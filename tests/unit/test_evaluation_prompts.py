"""`evaluate` asks with the same tokens that training puts before the answer."""

import json
import shutil

import numpy as np
import pytest
import tokenizer_fixtures as fixtures
from checkpoint_fakes import commit
from small_files import write_json, write_lines
from tokenizer_fixtures import make_tokenizer
from toy import write_model_config
from transformers import GenerationConfig

from trainer.cli import evaluate as command
from trainer.runtime.evaluations import read_evaluations
from trainer.tools.evaluate import engines
from trainer.train.start.compose import load_config
from trainer.train.start.inputs import prepare_data_alone

USER = {"role": "user", "content": "what is hello?"}
ANSWER = {"role": "assistant", "content": "It is world"}
CHAT = [USER, ANSWER]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "what is hello?"}]}, ANSWER]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
PAIR = {"prompt": "The quick brown", "completion": " fox answers"}
KEYS = ("data.prompt_key=question", "data.response_key=reply")
ROWS = {
    "tools": ({"messages": CHAT, "tools": TOOLS}, ()),
    "tools in a column of their own": (
        {"messages": CHAT, "defs": json.dumps(TOOLS)},
        ("data.tools_key=defs",),
    ),
    "template variables": (
        {"messages": CHAT},
        ("data.apply_chat_template_kwargs={enable_thinking: false}",),
    ),
    "several turns": ({"messages": [*CHAT, *CHAT]}, ()),
    "text parts": ({"messages": PARTS}, ()),
    "plain text": (PAIR, ()),
    "plain text without a chat template": (PAIR, ("no template",)),
    "columns of its own": ({"question": "what is 2 + 2?", "reply": "4"}, KEYS),
    "instruction": ({"instruction": "what is 2 + 2?", "output": "4"}, ()),
    "another template": ({"messages": CHAT}, ("data.chat_template=chatml",)),
}
ASKING = ["--score", "exact", "--engine", "vllm"]


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """A run directory with a checkpoint, the jobs that vLLM gets, and a function that evaluates
    after a run with the given row and words, optionally with a question from a file.
    """
    jobs = []
    run_dir = tmp_path / "run"

    def served(export, job, *, python):
        jobs.append(job)
        return {"ids": [[5]] * len(job["ids"]), "version": "0"}

    def evaluate(row, words, question=None):
        model = tmp_path / "model"
        model.mkdir()
        write_model_config(model)
        tokenizer = make_tokenizer(None if "no template" in words else fixtures.QWEN3)
        tokenizer.save_pretrained(model)
        write_lines(tmp_path / "rows.jsonl", [row])
        config = load_config(run_words(tmp_path, words))
        run_dir.mkdir()
        export = commit(run_dir, 10) / "huggingface"
        tokenizer.save_pretrained(export)
        GenerationConfig(eos_token_id=tokenizer.eos_token_id).save_pretrained(export)
        (export / "model.safetensors").write_bytes(b"")
        tree = {"config": config.resolved, "project_name": "a", "experiment_name": "b"}
        write_json(run_dir / "run.json", tree)
        more = []
        if question is not None:
            write_json(tmp_path / "q.jsonl", question | {"answer": "a"})
            more = ["--prompts", f"{tmp_path}/q.jsonl"]
        return command.main([str(run_dir), *ASKING, *more])

    monkeypatch.setattr(engines, "require_vllm", lambda python: None)
    monkeypatch.setattr(engines, "ask_vllm", served)
    return run_dir, jobs, evaluate


def run_words(root, words):
    return [
        f"model.partial_pretrain={root / 'model'}",
        "model.random_weights=true",
        f"data.train_files={root / 'rows.jsonl'}",
        f"data.val_files={root / 'rows.jsonl'}",
        f"data.cache_dir={root / 'cache'}",
        "trainer.logger=[console]",
        *(word for word in words if "=" in word),
    ]


@pytest.mark.parametrize(("row", "words"), ROWS.values(), ids=ROWS)
def test_the_prompt_is_what_training_puts_before_the_answer(asked, tmp_path, row, words):
    run_dir, jobs, evaluate = asked
    assert evaluate(row, words) == 0
    data = prepare_data_alone(load_config(run_words(tmp_path, words)))
    ids, mask = data.validation.sample(len(data.validation) - 1)
    last = int(np.flatnonzero(np.diff(mask.astype(int)) == 1)[-1]) + 1
    assert jobs[0]["ids"] == [ids[:last].tolist()]
    [sample] = [row for row in read_evaluations(run_dir) if row["kind"] == "sample"]
    answer = str(data.tokenizer.decode(ids[last:][mask[last:]].tolist()))
    # some templates write an empty block of thoughts first
    assert answer.removesuffix("<|im_end|>").endswith(sample["answer"]) and sample["answer"]


PROMPT = {"prompt": "what is hello?"}
AS_TEXT = PROMPT["prompt"]
AS_CHAT = f"<|im_start|>user\n{AS_TEXT}<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("trained", "words", "row", "expected"),
    [
        ({"messages": CHAT}, (), PROMPT, AS_CHAT),
        ({"question": "a", "reply": "b"}, KEYS, {"messages": [USER]}, AS_CHAT),
        ({"text": "a"}, ("data.text_key=text",), PROMPT, AS_TEXT),
        (PAIR, (), PROMPT, AS_TEXT),
    ],
)
def test_a_question_without_an_answer_is_asked_as_the_run_was_trained(
    asked, trained, words, row, expected
):
    """After training on `prompt` and `completion` as plain text, the question was asked as a chat."""
    _, jobs, evaluate = asked
    assert evaluate(trained, words, row) == 0
    assert make_tokenizer().decode(jobs[0]["ids"][0]) == expected


def test_questions_of_a_file_need_no_base_model(asked, tmp_path):
    """The model may be gone, but the export has the tokenizer and the template of the run."""
    run_dir, jobs, evaluate = asked
    assert evaluate({"messages": CHAT}, (), PROMPT) == 0
    shutil.rmtree(tmp_path / "model")
    (run_dir / "evaluations.jsonl").unlink()
    assert command.main([str(run_dir), *ASKING, "--prompts", f"{tmp_path}/q.jsonl"]) == 0
    assert jobs[0]["ids"] == jobs[1]["ids"]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"messages": [{"role": "user"}, ANSWER]}, "content of message 1"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}, ANSWER]}, "'image'"),
        ({"messages": [ANSWER]}, "no question"),
        ({"text": "all is trained"}, "unrecognised columns"),
        ({"input_ids": [1], "loss_mask": [1]}, "vocabulary"),
    ],
)
def test_a_row_that_cannot_be_asked_is_named(asked, tmp_path, capsys, row, said):
    _, jobs, evaluate = asked
    assert evaluate({"messages": CHAT}, (), row) == 65
    found = capsys.readouterr().err
    assert f"{tmp_path}/q.jsonl:1: " in found and said in found and "Fix:" in found and not jobs
