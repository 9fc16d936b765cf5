"""Runs in vLLM's own environment: load a directory without any flag and answer a chat, greedily; JSON on the last line.

python vllm_generate.py DIRECTORY QUESTION
"""

import json
import sys

from vllm import LLM, SamplingParams

if __name__ == "__main__":
    directory, question = sys.argv[1:]
    llm = LLM(directory, enforce_eager=True, max_model_len=512)
    answers = llm.chat([{"role": "user", "content": question}], SamplingParams(temperature=0.0, max_tokens=80))
    output = answers[0].outputs[0]
    print(json.dumps({"text": output.text, "token_ids": list(output.token_ids), "finish_reason": output.finish_reason}))
