"""Serves one export with vLLM: `python vllm_engine.py JOB`, run by an interpreter that has vLLM.

This file imports nothing from the package. JOB is a JSON file with "model", "adapter" (or null),
"max_lora_rank" and "ids" (a list of token ids for each prompt); the answer replaces its content.
With "masks", the answer has "sums": the log-probability of the supervised tokens of each prompt.
With "max_new_tokens" and "stop_ids", it has "ids": the tokens that vLLM generates greedily after
each prompt. Every answer also has vLLM's "version".
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

# an engine in a separate process would import vLLM a second time
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")


def serve(job: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to a job: summed log-probabilities, or generated token ids."""
    import vllm
    from vllm.lora.request import LoRARequest

    is_generation = "max_new_tokens" in job
    num_new = job.get("max_new_tokens", 1)
    settings: dict[str, Any] = {
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        "max_model_len": max(map(len, job["ids"])) + num_new,
    }
    request = None
    if job["adapter"]:
        request = LoRARequest("trained", 1, job["adapter"])
        settings |= {"enable_lora": True, "max_lora_rank": job["max_lora_rank"]}
    if not is_generation:
        # vLLM generates at least one token, even after a sample that fills the whole context
        os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"
    parameters = vllm.SamplingParams(
        temperature=0.0,
        max_tokens=num_new,
        stop_token_ids=job.get("stop_ids"),
        prompt_logprobs=None if is_generation else 0,
        detokenize=False,
    )
    llm = vllm.LLM(job["model"], **settings)
    prompts = [{"prompt_token_ids": ids} for ids in job["ids"]]
    answers = llm.generate(prompts, parameters, lora_request=request)
    if is_generation:
        ids = [list(answer.outputs[0].token_ids) for answer in answers]
        return {"ids": ids, "version": vllm.__version__}
    sums = []
    for ids, mask, answer in zip(job["ids"], job["masks"], answers, strict=True):
        positions = zip(ids[1:], mask[1:], answer.prompt_logprobs[1:], strict=True)
        sums.append(sum(found[token].logprob for token, is_kept, found in positions if is_kept))
    return {"sums": sums, "version": vllm.__version__}


if __name__ == "__main__":
    path = Path(sys.argv[1])
    job = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(serve(job)), encoding="utf-8")
