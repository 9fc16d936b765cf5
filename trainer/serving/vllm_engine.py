"""Run by an interpreter that has vLLM: `python vllm_engine.py JOB` (floor 2, imports nothing of
this package).

JOB is a JSON file of {"model", "adapter", "max_lora_rank", "ids": [[...], ...], "answer"} and what
is wanted. With "masks" [[...], ...] `answer` gets {"sums": log-probability of the supervised tokens
of each sample, "version"}; with "sampling" {"max_new_tokens", "temperature", "seed", "stop_ids"}
{"ids": tokens generated behind each, "version"}.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

# an engine of its own process imports vLLM again
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")


def serve(job: dict[str, Any]) -> dict[str, Any]:
    import vllm
    from vllm.lora.request import LoRARequest

    settings: dict[str, Any] = {
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
    }
    wanted = job.get("sampling", {})
    settings["max_model_len"] = max(map(len, job["ids"])) + wanted.get("max_new_tokens", 1)
    request = None
    if job["adapter"]:
        request = LoRARequest("trained", 1, job["adapter"])
        settings |= {"enable_lora": True, "max_lora_rank": job["max_lora_rank"]}
    if wanted:
        parameters = vllm.SamplingParams(
            temperature=wanted["temperature"],
            seed=wanted["seed"],
            max_tokens=wanted["max_new_tokens"],
            stop_token_ids=wanted["stop_ids"],
            detokenize=False,
        )
    else:
        parameters = vllm.SamplingParams(
            temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False
        )
        # vLLM counts the token that it must write too: a sample may fill the model without it,
        # which is never read
        os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"
    llm = vllm.LLM(job["model"], **settings)
    answers = llm.generate(
        [{"prompt_token_ids": ids} for ids in job["ids"]], parameters, lora_request=request
    )
    if wanted:
        return {
            "ids": [list(answer.outputs[0].token_ids) for answer in answers],
            "version": vllm.__version__,
        }
    sums = []
    for ids, mask, answer in zip(job["ids"], job["masks"], answers, strict=True):
        pairs = zip(ids[1:], mask[1:], answer.prompt_logprobs[1:], strict=True)
        sums.append(
            sum(choices[token].logprob for token, is_supervised, choices in pairs if is_supervised)
        )
    return {"sums": sums, "version": vllm.__version__}


if __name__ == "__main__":
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    Path(job["answer"]).write_text(json.dumps(serve(job)), encoding="utf-8")
