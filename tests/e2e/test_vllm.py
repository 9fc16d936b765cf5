"""Promise 4: the export answers in vLLM, loaded without a flag. Needs VLLM_PYTHON, an interpreter that has vLLM."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from runs import run

QUESTION = "Write a Python function multiply_by_31(x) that returns x times 31."


@pytest.mark.covers("S3.23")
@pytest.mark.vllm
@pytest.mark.skipif("VLLM_PYTHON" not in os.environ, reason="VLLM_PYTHON names no interpreter with vLLM")
def test_export_generates_in_vllm(cache: str, tmp_path: Path) -> None:
    """vLLM's greedy answer in bf16 equals transformers' for the tokens that a short training made certain."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trained = run(tmp_path, 2, cache, "trainer.total_training_steps=70", "trainer.save_freq=-1", timeout_s=600)
    assert trained.returncode == 0, trained.stdout
    export = tmp_path / "checkpoints" / "sft" / "quickstart" / "global_step_70" / "huggingface"
    script = Path(__file__).with_name("vllm_generate.py")
    answered = subprocess.run(
        [os.environ["VLLM_PYTHON"], str(script), str(export), QUESTION],
        env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert answered.returncode == 0, answered.stderr[-3000:]
    theirs = json.loads(next(line for line in reversed(answered.stdout.splitlines()) if line.startswith('{"text"')))
    tokenizer = AutoTokenizer.from_pretrained(export)
    model = AutoModelForCausalLM.from_pretrained(export)
    chat = [{"role": "user", "content": QUESTION}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        ids = model.generate(**inputs, max_new_tokens=80, do_sample=False)[0, inputs["input_ids"].shape[1] :].tolist()
    assert theirs["token_ids"][:8] == ids[:8]
    assert theirs["text"].startswith("```python\ndef ")
    assert theirs["finish_reason"] == "stop", "the model did not learn to end its turn"
