"""Promise 4: vLLM loads exports without a flag and generates with them.

Needs VLLM_PYTHON, an interpreter that has vLLM.
"""

import json
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import whole_runs
from exports import export_changed
from family_trials import save_model
from peft import PeftModel
from ranks import run_ranks
from small_files import write_json
from sweeps import short_or_full
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from toy import VOCAB, build, write_weights
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)
from whole_models import WRAPPERS, write_whole_model

from trainer.cli import evaluate
from trainer.config import ConfigError
from trainer.model.pretrained import ModelSource
from trainer.quickstart import MODEL_DIR
from trainer.runtime.evaluations import read_evaluations, read_summaries
from trainer.tools.evaluate import engines
from trainer.tracking import read_metrics

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        "VLLM_PYTHON" not in os.environ, reason="VLLM_PYTHON names no interpreter with vLLM"
    ),
]
QUESTION = "Write a Python function multiply_by_31(x) that returns x times 31."
FAMILIES = short_or_full(
    ("qwen3_moe",), full=("llama", "mistral", "qwen3", "qwen3_moe", "gemma3_text")
)
WHOLE = "gemma3"
"""A checkpoint with text and images."""
PARAM_DTYPE = "model.fsdp_config.param_dtype"
HEADS_OF_VLLM = {"hidden_size": 64, "head_dim": 32, "num_attention_heads": 4}
"""vLLM's CPU kernels support heads of 32 and more."""


def random_ids(num_values):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, num_values, (48,), generator=generator).tolist()


def log_prob(model, ids):
    """Return the log-probability of a text under a model of transformers, summed in float64."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0, :-1].double()
    return -F.cross_entropy(logits, torch.tensor(ids[1:]), reduction="sum").item()


def export_families(world, root):
    """Each family as built by the trainer, every parameter changed as by an update, exported."""
    for name in (*FAMILIES, WHOLE):
        source = ModelSource(str(root / name))
        model = build(world, source, random_weights=False)
        export_changed(world, model, source, root / f"{name}-export")


def write_whole(path):
    """Add the processor and tokenizer that vLLM requires if a class takes images."""
    wide = {"hidden_size": 64, "num_attention_heads": 4}
    text, sight = ({**WRAPPERS[WHOLE][key], **wide} for key in ("text_config", "vision_config"))
    write_whole_model(
        path, WHOLE, has_extra=False, text_config={**text, "head_dim": 32}, vision_config=sight
    )
    words = {
        "image_token": "<image_soft_token>",
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
    }
    vocabulary = {
        word: number
        for number, word in enumerate((*words.values(), "<unk>", "<bos>", "<eos>", "<pad>"))
    }
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(vocabulary, unk_token="<unk>")),
        **{f"{name}_token": f"<{name}>" for name in ("unk", "bos", "eos", "pad")},
        extra_special_tokens=words,
    ).save_pretrained(path)
    processor = {"processor_class": "Gemma3Processor", "image_seq_length": 4}
    images = {
        **processor,
        "image_processor_type": "Gemma3ImageProcessor",
        "size": {"height": 28, "width": 28},
    }
    write_json(path / "processor_config.json", processor)
    write_json(path / "preprocessor_config.json", images)


def trained(run_dir, steps, *words, num_ranks=2):
    """The checkpoint of a run."""
    words = (*words, f"trainer.total_training_steps={steps}", "trainer.save_freq=-1")
    whole_runs.train(run_dir, num_ranks, *words, timeout_s=500)
    return run_dir / f"global_step_{steps}"


def run_adapter(root, cache):
    """Return the base model and the exported adapter."""
    base = Path(shutil.copytree(MODEL_DIR, root / "base"))
    write_weights(base)
    words = [f"model.partial_pretrain={base}", "model.lora_rank=8", "optim.lr=0.005"]
    words += [f"{key}=float32" for key in ("trainer.checkpoint.export_dtype", PARAM_DTYPE)]
    return base, trained(root / "run", 8, cache, *words) / "huggingface"


def evaluated(run_dir, answer):
    """Run `evaluate` on the held-out tasks, and return its exit code. `answer` replaces the vLLM
    process, and receives a job.
    """
    words = shlex.split(
        "--score exec --allow-code --answer check --engine vllm --max-new-tokens 120"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            engines,
            "ask_vllm",
            lambda export, asked, python: answer({"model": export, "adapter": None, **asked}),
        )
        return evaluate.main([str(run_dir), *words, "--python", os.environ["VLLM_PYTHON"]])


def asked_by_evaluate(run_dir):
    jobs = []

    def refused(job):
        jobs.append(job)
        raise ConfigError("answered later")

    assert evaluated(run_dir, refused) == 2 and not read_summaries(run_dir)
    (job,) = jobs
    # the links that `evaluate` read from are gone: vLLM is asked about the checkpoint itself
    return job | {"model": run_dir.joinpath(*Path(job["model"]).parts[-2:])}


@pytest.fixture(scope="module")
def jobs(root, cache):
    """Return all requests to vLLM. One process answers them, because importing vLLM takes longer
    than any of the models.
    """
    for name in FAMILIES:
        save_model(root / name, name, **HEADS_OF_VLLM)
    write_whole(root / WHOLE)
    run_ranks(export_families, 1, root)
    (root / "adapter").mkdir()
    base, adapter = run_adapter(root / "adapter", cache)
    ids = random_ids(VOCAB)
    # so many steps make the tokens of its answers certain; a second rank would take half as long
    # again
    words = (cache, "data.val_ratio=0.005")
    export = trained(root / "run", 150, *words, num_ranks=1) / "huggingface"
    return {
        "quickstart": {"model": export, "question": QUESTION},
        "evaluate": asked_by_evaluate(root / "run"),
        "adapter": {"model": base, "adapter": adapter, "ids": random_ids(500)},
        **{name: {"model": root / f"{name}-export", "ids": ids} for name in (*FAMILIES, WHOLE)},
    }


@pytest.fixture(scope="module")
def served(jobs, root):
    (root / "jobs.json").write_text(json.dumps(jobs, default=str))
    answered = subprocess.run(
        [
            os.environ["VLLM_PYTHON"],
            str(Path(__file__).with_name("vllm_serve.py")),
            str(root / "jobs.json"),
        ],
        env={
            **os.environ,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        },
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert answered.returncode == 0, answered.stderr[-3000:]
    return json.loads(answered.stdout.splitlines()[-1])


@pytest.mark.covers("S3.23")
def test_export_generates_in_vllm(jobs, served):
    """vLLM's greedy answer in bf16 equals that of transformers for tokens that a short training
    made certain.
    """
    export = jobs["quickstart"]["model"]
    theirs = served["quickstart"]
    tokenizer = AutoTokenizer.from_pretrained(export)
    model = AutoModelForCausalLM.from_pretrained(export)
    chat = [{"role": "user", "content": QUESTION}]
    inputs = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        ids = model.generate(**inputs, max_new_tokens=80, do_sample=False)[
            0, inputs["input_ids"].shape[1] :
        ].tolist()
    assert theirs["token_ids"][:8] == ids[:8]
    assert theirs["text"].startswith("```python\ndef ")
    assert theirs["finish_reason"] == "stop", "the model did not learn to end its turn"


def test_evaluate_scores_what_vllm_wrote(jobs, served, root):
    """The rate is the share of held-out tasks that plain exec finds solved."""
    assert evaluated(root / "run", lambda job: served["evaluate"]) == 0
    rows = [row for row in read_evaluations(root / "run") if row["kind"] == "sample"]
    solved = sum(is_solved(row["completion"], row["answer"]) for row in rows)
    assert len(rows) == len(jobs["evaluate"]["ids"]) > 10 and solved > 0
    (logged,) = read_metrics(root / "run" / "evaluation" / "held_out" / "metrics.jsonl")
    assert logged["exec_success_rate"] == solved / len(rows)
    (summary,) = read_summaries(root / "run")["eval/held_out"].values()
    assert summary["engine"] == "vllm"


def is_solved(completion, check):
    namespace = {}
    try:
        exec(completion.removeprefix("```python\n").removesuffix("\n```"), namespace)
        return bool(eval(check, namespace))
    except Exception:  # whatever a wrong program does
        return False


@pytest.mark.parametrize("name", (*FAMILIES, WHOLE))
def test_the_export_of_a_family_gives_a_text_the_probability_it_has_in_transformers(
    jobs, served, name
):
    export = jobs[name]["model"]
    ids = jobs[name]["ids"]
    auto = AutoModelForMultimodalLM if name == WHOLE else AutoModelForCausalLM
    expected, before = (
        log_prob(auto.from_pretrained(path, dtype=torch.float32, attn_implementation="eager"), ids)
        for path in (export, export.with_name(name))
    )
    assert abs(expected - before) > 1, "the update changed nothing"
    assert served[name]["model"] == pytest.approx(expected, rel=1e-5)


def test_an_adapter_serves_what_was_trained(jobs, served):
    """vLLM assigns a text the same probability as transformers with peft, and a different one
    without the adapter.
    """
    base, adapter, ids = (jobs["adapter"][key] for key in ("model", "adapter", "ids"))
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    expected = {"model": log_prob(plain, ids)}
    adapted = PeftModel.from_pretrained(plain, adapter)
    expected["adapter"] = log_prob(adapted, ids)
    assert abs(expected["model"] - expected["adapter"]) > 0.1, "the adapter adds nothing"
    assert served["adapter"] == pytest.approx(expected, rel=1e-5)
