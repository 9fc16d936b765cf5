"""Runs in vLLM's own environment: summed log-probability of a text, by the model, with its adapter, and merged.

python vllm_adapter.py BASE ADAPTER MERGED TOKEN_IDS; JSON on the last line.
"""

import gc
import json
import sys

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest


def log_prob(llm: LLM, ids: list[int], adapter: LoRARequest | None = None) -> float:
    parameters = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    (answer,) = llm.generate([{"prompt_token_ids": ids}], parameters, lora_request=adapter)
    return sum(found[token].logprob for token, found in zip(ids[1:], answer.prompt_logprobs[1:], strict=True))


if __name__ == "__main__":
    base, adapter, merged, text = sys.argv[1:]
    token_ids = json.loads(text)
    settings = {"enforce_eager": True, "max_model_len": 512, "dtype": "float32"}
    llm = LLM(base, enable_lora=True, **settings)
    request = LoRARequest("trained", 1, adapter)
    found = {"base": log_prob(llm, token_ids), "adapter": log_prob(llm, token_ids, request)}
    del llm
    gc.collect()
    print(json.dumps(found | {"merged": log_prob(LLM(merged, **settings), token_ids)}))
