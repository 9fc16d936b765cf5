"""Answers that transformers generates from exports."""

import json
import shutil

import pytest
import torch
import transformers
from small_files import change_json, write_json
from tokenizer_fixtures import make_tokenizer

from trainer.config import ConfigError
from trainer.quickstart import MODEL_DIR
from trainer.tools.evaluate import engines
from trainer.tools.evaluate.engines import ask_vllm, make_generate

SAMPLING = {
    "repetition_penalty": 1.9,
    "no_repeat_ngram_size": 1,
    "min_new_tokens": 8,
    "do_sample": True,
    "top_p": 0.01,
}


def answers(export, *texts):
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL_DIR)
    prompts = [tokenizer(text).input_ids for text in texts]
    return make_generate("transformers", "")(export, prompts, 8)


@pytest.fixture
def export(tmp_path):
    path = tmp_path / "huggingface"
    shutil.copytree(MODEL_DIR, path)
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(path)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def test_code_that_comes_with_an_export_is_not_run(export, tmp_path):
    code = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}
    change_json(export / "config.json", auto_map=code, model_type="own")
    (export / "own.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'canary')!r})\n")
    with pytest.raises(ConfigError, match="auto_map"):
        answers(export, "add 1")
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize(
    ("written", "answer"),
    [
        ("<ans>alpha<|im_end|>", "<ans>alpha"),
        ("<ans>alpha", "<ans>alpha"),
        ("<think>a</think>b<|im_end|>\nuser", "<think>a</think>b"),
        ("<|im_start|>a<s><|endoftext|>", "a"),
    ],
)
def test_an_answer_ends_at_its_stop_token_and_keeps_the_tokens_of_the_user(
    tmp_path, monkeypatch, written, answer
):
    """Tokens that the chat template writes are not part of an answer."""
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<ans>"]})
    tokenizer.save_pretrained(tmp_path)
    transformers.GenerationConfig(eos_token_id=tokenizer.eos_token_id).save_pretrained(tmp_path)
    ids = tokenizer(written, add_special_tokens=False).input_ids
    monkeypatch.setattr(engines, "ask_vllm", lambda *_, **__: {"ids": [ids]})
    assert engines.generate_in_vllm("", tmp_path, [[1]], 8) == [answer]


def test_a_truncated_file_of_weights_is_named(export):
    weights = export / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=rf"weights in '{export}' cannot be read: (.|\n)*export"):
        answers(export, "add 1")


def test_vllm_is_not_asked_for_modules_that_it_would_leave_out(export):
    settings = {"base_model_name_or_path": str(export), "r": 4, "modules_to_save": ["lm_head"]}
    write_json(export / "adapter_config.json", settings)
    with pytest.raises(ConfigError, match=r"modules_to_save.\nFix: .*checkpoint export"):
        ask_vllm(export, {}, python="python3")
    # nor is it taken for a whole model
    (export / "adapter_config.json").write_text("{")
    with pytest.raises(json.JSONDecodeError):
        ask_vllm(export, {}, python="python3")


def test_answers_depend_neither_on_sampling_settings_nor_on_the_batch(export):
    texts = ["add 1", "multiply the number by 31", "reverse"] * 12
    plain = answers(export, *texts)
    assert plain[:3] == answers(export, *texts[:3]) and len(plain) == 36
    change_json(export / "generation_config.json", **SAMPLING)
    assert answers(export, *texts) == plain
