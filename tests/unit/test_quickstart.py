"""The embedded default: samples that run, a tokenizer every reader agrees on, files made once."""

import json
import re
import shutil
import subprocess
import sys
from multiprocessing import get_context
from pathlib import Path

import pytest
import transformers
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

from trainer.errors import CannotWriteError
from trainer.quickstart import QuickstartFiles, ensure_quickstart, files
from trainer.quickstart.samples import generate_samples

TEXTS = ["Hello world 1234  <<3*4=12>>\n\n  x", "<|im_start|>user\nhi <|im_end|>\n", "é ü 漢字 🙂\t\r\n'll DON'T", " a"]
TOOLS = [{"type": "function", "function": {"name": "area", "description": "d", "parameters": {"type": "object"}}}]
CALL = {"type": "function", "function": {"name": "area", "arguments": {"w": 2}}}
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Area?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": "four"},
    {"role": "tool", "content": "five"},
    {"role": "assistant", "content": "It is 4."},
]


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> QuickstartFiles:
    return ensure_quickstart(tmp_path_factory.mktemp("cache"))


def _content(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def _rows(quickstart: QuickstartFiles) -> list[dict]:
    return [json.loads(line) for line in quickstart.train_file.read_text().splitlines()]


def test_every_answer_runs_and_passes_its_check(quickstart: QuickstartFiles) -> None:
    for row in _rows(quickstart):
        answer = row["messages"][1]["content"]
        code = re.fullmatch(r"```python\n(.*)\n```", answer, re.DOTALL)
        assert code, answer
        namespace: dict = {}
        exec(code[1], namespace)
        assert eval(row["check"], namespace) is True, row


def test_checks_notice_a_wrong_answer() -> None:
    for row in generate_samples():
        head, _, _ = row["messages"][1]["content"].removeprefix("```python\n").partition("\n")
        namespace: dict = {}
        exec(f"{head}\n    return None", namespace)
        assert not eval(row["check"], namespace), row


def test_about_three_thousand_distinct_short_prompts(quickstart: QuickstartFiles) -> None:
    rows = _rows(quickstart)
    prompts = {row["messages"][0]["content"] for row in rows}
    assert len(prompts) == len(rows) >= 3000
    assert [message["role"] for message in rows[0]["messages"]] == ["user", "assistant"]
    tokenizer = Tokenizer.from_file(str(quickstart.model_dir / "tokenizer.json"))
    lengths = [sum(len(tokenizer.encode(m["content"]).ids) for m in row["messages"]) for row in rows]
    assert sum(lengths) / len(lengths) < 100
    assert max(lengths) < 200


def test_files_are_the_same_in_another_process_and_with_another_hash_seed(
    quickstart: QuickstartFiles, tmp_path: Path
) -> None:
    code = "import sys, pathlib; from trainer.quickstart import *; ensure_quickstart(pathlib.Path(sys.argv[1]))"
    command = [sys.executable, "-c", code, str(tmp_path)]
    root = Path(files.__file__).parents[2]
    subprocess.run(command, check=True, env={"PYTHONHASHSEED": "7", "PYTHONPATH": str(root)})
    made = next((tmp_path / "quickstart").iterdir())
    assert _content(made) == _content(quickstart.train_file.parent)


def test_every_reader_gives_the_same_ids_and_text(quickstart: QuickstartFiles) -> None:
    plain = Tokenizer.from_file(str(quickstart.model_dir / "tokenizer.json"))
    auto = AutoTokenizer.from_pretrained(quickstart.model_dir)
    generic = PreTrainedTokenizerFast.from_pretrained(quickstart.model_dir)
    for text in [*TEXTS, *(row["messages"][1]["content"] for row in _rows(quickstart)[:200])]:
        ids = plain.encode(text).ids
        assert auto(text)["input_ids"] == generic(text)["input_ids"] == ids
        assert auto.decode(ids) == text
    assert len(auto) == plain.get_vocab_size() <= files.VOCAB_SIZE
    assert auto.is_fast


def test_special_tokens(quickstart: QuickstartFiles) -> None:
    tokenizer = AutoTokenizer.from_pretrained(quickstart.model_dir)
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert set(tokenizer.all_special_tokens) == {"<|im_end|>", "<|endoftext|>", "<|im_start|>"}
    for reader in (AutoConfig, transformers.GenerationConfig):
        config = reader.from_pretrained(quickstart.model_dir)
        assert (config.eos_token_id, config.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    config = json.loads((quickstart.model_dir / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert config["chat_template"] == (quickstart.model_dir / "chat_template.jinja").read_text()
    for name in ("vocab.json", "merges.txt", "special_tokens_map.json", "generation_config.json"):
        assert (quickstart.model_dir / name).is_file()


def test_chat_template_renders_roles_tools_and_calls(quickstart: QuickstartFiles) -> None:
    tokenizer = AutoTokenizer.from_pretrained(quickstart.model_dir)
    text = tokenizer.apply_chat_template(CHAT, tools=TOOLS, tokenize=False)
    call = '<tool_call>\n{"name": "area", "arguments": {"w": 2}}\n</tool_call>'
    replies = "<tool_response>\nfour\n</tool_response>\n<tool_response>\nfive\n</tool_response>"
    assert text.startswith("<|im_start|>system\nBe brief.\n\n# Tools") and json.dumps(TOOLS[0]) in text
    assert text.endswith(
        f"<|im_start|>user\nArea?<|im_end|>\n<|im_start|>assistant\n{call}\n{call}<|im_end|>\n"
        f"<|im_start|>user\n{replies}<|im_end|>\n<|im_start|>assistant\nIt is 4.<|im_end|>\n"
    )
    as_text = {"type": "function", "function": {"name": "area", "arguments": '{"w": 2}'}}
    chat = [*CHAT[:2], {"role": "assistant", "content": "", "tool_calls": [as_text, as_text]}, *CHAT[3:]]
    assert tokenizer.apply_chat_template(chat, tools=TOOLS, tokenize=False) == text
    prompt = tokenizer.apply_chat_template(CHAT[:2], tokenize=False, add_generation_prompt=True)
    assert prompt == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nArea?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_generation_tags_mark_the_assistant_with_its_end_token(quickstart: QuickstartFiles) -> None:
    tokenizer = AutoTokenizer.from_pretrained(quickstart.model_dir)
    encoded = tokenizer.apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=True)
    pairs = zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
    call = '<tool_call>\n{"name": "area", "arguments": {"w": 2}}\n</tool_call>'
    marked = tokenizer.decode([token for token, mask in pairs if mask])
    assert marked == f"{call}\n{call}<|im_end|>It is 4.<|im_end|>"


def test_model_is_a_tiny_qwen2(quickstart: QuickstartFiles) -> None:
    config = AutoConfig.from_pretrained(quickstart.model_dir)
    model = transformers.AutoModelForCausalLM.from_config(config)
    assert type(model).__name__ == "Qwen2ForCausalLM"
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.num_parameters() < 6_000_000
    assert not list(quickstart.model_dir.glob("*.safetensors"))


def test_other_english_compresses(quickstart: QuickstartFiles) -> None:
    tokenizer = Tokenizer.from_file(str(quickstart.model_dir / "tokenizer.json"))
    text = (
        "The two cousins wanted to find out how many people live in their street, so they asked every family. "
        "Most of them answered at once, a few had to think about it, and only one old man did not open the door."
    )
    assert len(text) / len(tokenizer.encode(text).ids) > 3.5


def test_second_call_reuses_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = ensure_quickstart(tmp_path)
    monkeypatch.setattr(files, "_make", lambda directory: pytest.fail("made again"))
    assert ensure_quickstart(tmp_path) == first


def test_an_interrupted_first_use_leaves_nothing_that_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(files, "write_tokenizer", stop)
        ensure_quickstart(tmp_path)
    assert list((tmp_path / "quickstart").iterdir()) == []
    assert (ensure_quickstart(tmp_path).model_dir / "tokenizer.json").is_file()


def test_two_processes_at_once(quickstart: QuickstartFiles, tmp_path: Path) -> None:
    with get_context("spawn").Pool(2) as pool:
        results = pool.map(ensure_quickstart, [tmp_path, tmp_path])
    assert results[0] == results[1]
    assert [path.name for path in (tmp_path / "quickstart").iterdir()] == [files.content_version()]
    assert _content(results[0].train_file.parent) == _content(quickstart.train_file.parent)


def test_version_follows_the_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = shutil.copytree(files.HERE, tmp_path / "quickstart", ignore=shutil.ignore_patterns("__pycache__"))
    before = files.content_version()
    monkeypatch.setattr(files, "HERE", here)
    assert files.content_version() == before
    with (here / "english.txt").open("a") as file:
        file.write("One more sentence.\n")
    assert files.content_version() != before


def test_an_unwritable_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotWriteError, match=r"file/quickstart/.*data\.cache_dir"):
        ensure_quickstart(tmp_path / "file")
