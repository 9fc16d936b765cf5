"""Runs in vLLM's own environment: several models one after the other in this process; JSON on the
last line.

python vllm_serve.py JOBS: a JSON file of {name: {"model": DIRECTORY, ...}}. A job with a `question`
is answered greedily with nothing but the directory said; one with `stop_ids` is what `evaluate`
asks, answered by its own engine;
one with `ids` alone gives their summed log-probability in float32, and with an `adapter` also what
it is with it.
"""

import gc
import json
import os
import sys
from pathlib import Path

# each engine in a process of its own imports vLLM again
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
sys.path.append(str(Path(__file__).resolve().parents[2] / "trainer" / "tools" / "evaluate"))

import vllm_engine
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest


def answer(llm, question):
    answers = llm.chat(
        [{"role": "user", "content": question}], SamplingParams(temperature=0.0, max_tokens=80)
    )
    output = answers[0].outputs[0]
    return {
        "text": output.text,
        "token_ids": list(output.token_ids),
        "finish_reason": output.finish_reason,
    }


def log_prob(llm, ids, adapter=None):
    parameters = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    (found,) = llm.generate([{"prompt_token_ids": ids}], parameters, lora_request=adapter)
    return sum(
        choices[token].logprob
        for token, choices in zip(ids[1:], found.prompt_logprobs[1:], strict=True)
    )


def serve(job):
    if "question" in job:
        return answer(LLM(job["model"], enforce_eager=True, max_model_len=512), job["question"])
    if "stop_ids" in job:
        return vllm_engine.serve(job)
    adapter = job.get("adapter")
    settings = {"enforce_eager": True, "dtype": "float32", "skip_tokenizer_init": True}
    llm = LLM(
        job["model"], **settings, enable_lora=adapter is not None, limit_mm_per_prompt={"image": 0}
    )
    request = LoRARequest("trained", 1, adapter) if adapter else None
    return {"model": log_prob(llm, job["ids"])} | (
        {"adapter": log_prob(llm, job["ids"], request)} if adapter else {}
    )


if __name__ == "__main__":
    found = {}
    for name, job in json.loads(Path(sys.argv[1]).read_text()).items():
        found[name] = serve(job)
        gc.collect()
    print(json.dumps(found))
