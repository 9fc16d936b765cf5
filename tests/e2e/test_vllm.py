"""Promise 4: the export answers in vLLM, loaded without a flag. Needs VLLM_PYTHON, an interpreter that has vLLM."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from runs import run

NEEDS_VLLM = pytest.mark.skipif("VLLM_PYTHON" not in os.environ, reason="VLLM_PYTHON names no interpreter with vLLM")
QUESTION = "Write a Python function multiply_by_31(x) that returns x times 31."


def in_vllm(script: str, *words: object) -> Any:
    """What a script beside this file prints last, as JSON."""
    answered = subprocess.run(
        [os.environ["VLLM_PYTHON"], str(Path(__file__).with_name(script)), *map(str, words)],
        env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert answered.returncode == 0, answered.stderr[-3000:]
    return json.loads(next(line for line in reversed(answered.stdout.splitlines()) if line.startswith("{")))


@pytest.mark.covers("S3.23")
@pytest.mark.vllm
@NEEDS_VLLM
def test_export_generates_in_vllm(cache: str, tmp_path: Path) -> None:
    """vLLM's greedy answer in bf16 equals transformers' for the tokens that a short training made certain."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trained = run(tmp_path, 2, cache, "trainer.total_training_steps=70", "trainer.save_freq=-1", timeout_s=600)
    assert trained.returncode == 0, trained.stdout
    export = tmp_path / "checkpoints" / "sft" / "quickstart" / "global_step_70" / "huggingface"
    theirs = in_vllm("vllm_generate.py", export, QUESTION)
    tokenizer = AutoTokenizer.from_pretrained(export)
    model = AutoModelForCausalLM.from_pretrained(export)
    chat = [{"role": "user", "content": QUESTION}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        ids = model.generate(**inputs, max_new_tokens=80, do_sample=False)[0, inputs["input_ids"].shape[1] :].tolist()
    assert theirs["token_ids"][:8] == ids[:8]
    assert theirs["text"].startswith("```python\ndef ")
    assert theirs["finish_reason"] == "stop", "the model did not learn to end its turn"


@pytest.mark.vllm
@NEEDS_VLLM
def test_an_adapter_and_its_merged_model_serve_what_was_trained(cache: str, tmp_path: Path) -> None:
    """vLLM gives a text the probability that transformers with peft gives it, and without the adapter another."""
    import torch
    from peft import PeftModel
    from transformers import AutoConfig, AutoModelForCausalLM

    from trainer.quickstart import MODEL_DIR

    base = Path(shutil.copytree(MODEL_DIR, tmp_path / "base"))
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base), dtype=torch.float32)
    plain.save_pretrained(base)
    words = [f"model.partial_pretrain={base}", "model.lora_rank=8", "optim.lr=0.005", "trainer.total_training_steps=8"]
    words += ["trainer.checkpoint.export_lora=both", "trainer.checkpoint.export_dtype=float32", "trainer.save_freq=-1"]
    trained = run(tmp_path, 2, cache, *words, "model.fsdp_config.param_dtype=float32", timeout_s=600)
    assert trained.returncode == 0, trained.stdout
    checkpoint = tmp_path / "checkpoints" / "sft" / "quickstart" / "global_step_8"
    merged = checkpoint / "huggingface"
    ids = torch.randint(0, plain.config.vocab_size, (64,), generator=torch.Generator().manual_seed(1))

    def log_prob(model: Any) -> float:
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0, :-1].double()
        return logits.log_softmax(-1).gather(1, ids[1:, None]).sum().item()

    expected = {"base": log_prob(plain)}
    adapted: Any = PeftModel.from_pretrained(plain, merged / "lora_adapter")
    expected["adapter"] = expected["merged"] = log_prob(adapted)
    found = in_vllm("vllm_adapter.py", base, merged / "lora_adapter", merged, ids.tolist())
    assert abs(expected["base"] - expected["adapter"]) > 0.1, "the adapter adds nothing"
    assert found == pytest.approx(expected, rel=1e-5)
    num_values = sum(parameter.numel() for name, parameter in adapted.named_parameters() if ".lora_" in name)
    saved = [path.stat().st_size for path in (*checkpoint.glob("*.pt"), *(merged / "lora_adapter").iterdir())]
    # adapters, two moments, the adapter exported in float32; and what files, names and states of the run take
    assert sum(saved) < (4 + 8 + 4) * num_values + 300_000
