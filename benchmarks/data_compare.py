"""Do LLaMA-Factory and axolotl prepare the tokens that this trainer does, and has every difference a rule's name?

    python benchmarks/data_compare.py --gsm8k train.jsonl --llamafactory VENV --axolotl VENV

Both prepare with their own commands, the scripts of `data compare --dump-script` dump, `data compare` judges. The
environments are yours: `pip install llamafactory axolotl`, each in one of its own (preparing needs no GPU). Tokenizers
are those of the tests, models one tiny layer that LLaMA-Factory trains for one step.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from measuring import REPOSITORY, header, table, write_result
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from trainer.data_tools.frameworks import FRAMEWORKS
from trainer.quickstart import MODEL_DIR

sys.path.append(str(REPOSITORY / "tests" / "unit"))
import tokenizer_fixtures as fixtures

LLAMAFACTORY, AXOLOTL = "llamafactory", "axolotl"
PACKAGES = ("transformers", "datasets", "torch")
TAGS = {f"{name}_tag": name for name in ("role", "content", "user", "assistant", "system")}
TOOLS = {"weather": ("city", "unit"), "search": ("query", "limit"), "convert": ("amount", "currency", "to")}
Tree = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """Rows and a tokenizer by name; `theirs` and `ours`: settings beside those that every case has."""

    framework: str
    rows: str
    tokenizer: str
    theirs: Tree = field(default_factory=dict)
    ours: tuple[str, ...] = ()


CASES = (
    Case(LLAMAFACTORY, "gsm8k", "llama3", {"template": "llama3"}),
    Case(LLAMAFACTORY, "gsm8k", "quickstart", {"template": "qwen"}),
    Case(LLAMAFACTORY, "gsm8k", "quickstart", {"template": "qwen", "default_system": ""}),
    Case(LLAMAFACTORY, "chats", "llama3", {"template": "llama3"}),
    Case(LLAMAFACTORY, "chats", "chatml", {"template": "chatml", "mask_history": True}),
    Case(LLAMAFACTORY, "chats", "chatml", {"template": "chatml", "train_on_prompt": True}),
    Case(LLAMAFACTORY, "chats", "chatml", {"template": "chatml", "cutoff_len": 100}),
    Case(LLAMAFACTORY, "tools", "quickstart", {"template": "qwen"}),
    Case(AXOLOTL, "gsm8k", "quickstart"),
    Case(AXOLOTL, "gsm8k", "llama3", {"shuffle_merged_datasets": False}),
    Case(AXOLOTL, "chats", "llama3", {"shuffle_merged_datasets": False}),
    Case(AXOLOTL, "tools", "quickstart", {"shuffle_merged_datasets": False}),
    Case(AXOLOTL, "chats", "chatml", {"shuffle_merged_datasets": False, "train_on_inputs": True}),
    Case(AXOLOTL, "chats", "chatml", {"shuffle_merged_datasets": False, "train_on_eos": "last"}),
    Case(AXOLOTL, "chats", "llama3", {"shuffle_merged_datasets": False, "chat_template": "chatml"}),
    Case(AXOLOTL, "chats", "chatml", {"shuffle_merged_datasets": False, "sequence_len": 100}),
    Case(
        AXOLOTL,
        "chats",
        "chatml",
        {"shuffle_merged_datasets": False, "sequence_len": 100, "excess_length_strategy": "truncate"},
        ("data.max_length=100", "data.truncation=right"),
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gsm8k", type=Path, required=True, help="its rows of question and answer")
    parser.add_argument(f"--{LLAMAFACTORY}", type=Path, required=True, metavar="VENV")
    parser.add_argument(f"--{AXOLOTL}", type=Path, required=True, metavar="VENV")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    venvs: dict[str, Path] = {name: getattr(arguments, name).absolute() for name in (LLAMAFACTORY, AXOLOTL)}
    peers = {name: versions(venv, name, *PACKAGES) for name, venv in venvs.items()}
    with tempfile.TemporaryDirectory(prefix="sft-compare-") as work:
        rows = write_rows(Path(work), arguments.gsm8k)
        models = write_models(Path(work))
        found = [judged(case, Path(work, str(n)), rows, models, venvs) for n, case in enumerate(CASES)]
    write_result("data_compare", header() | {"peers": peers, "cases": found}, arguments.output)
    lines = [(c["framework"], c["rows"], c["theirs"], f"{c['equal']}/{c['num_rows']}", c["rules"]) for c in found]
    print(table(["with", "rows", "settings there", "equal", "rows by rule"], lines))


def judged(case: Case, directory: Path, rows: dict[str, Path], models: dict[str, Path], venvs: dict[str, Path]) -> Tree:
    """What `data compare` says of a case."""
    directory.mkdir()
    prepare = in_llamafactory if case.framework == LLAMAFACTORY else in_axolotl
    tokens = prepare(case, directory, rows[case.rows], models[case.tokenizer], venvs[case.framework])
    dump, script = directory / "dump.jsonl", directory / "dump.py"
    script.write_text(FRAMEWORKS[case.framework].script)
    run([venvs[case.framework] / "bin/python", script, tokens, dump], directory)
    words = ["data", "compare", "--json", "--with", case.framework, dump, f"data.train_files={rows[case.rows]}"]
    words += [f"data.cache_dir={directory}/cache", f"model.partial_pretrain={models[case.tokenizer]}"]
    said = run([sys.executable, "-m", "trainer.cli", *words, "data.max_length=2048", *case.ours], REPOSITORY, (0, 1))
    tree = json.loads(said)
    rules = {rule: entry["rows"] for rule, entry in tree["rules"].items()}
    about = {"framework": case.framework, "rows": case.rows, "tokenizer": case.tokenizer, "theirs": case.theirs}
    print(about, tree["equal"], rules, file=sys.stderr, flush=True)
    return about | {"ours": case.ours, "num_rows": tree["rows_here"], "equal": tree["equal"], "rules": rules}


def in_llamafactory(case: Case, directory: Path, rows: Path, model: Path, venv: Path) -> Path:
    columns = {"messages": "messages"} | ({"tools": "tools"} if case.rows == "tools" else {})
    shape = {"formatting": "openai" if case.rows == "tools" else "sharegpt", "columns": columns}
    tags = TAGS | ({"observation_tag": "tool", "function_tag": "function"} if case.rows == "tools" else {})
    about = {"rows": {"file_name": str(rows), "tags": tags, **shape}}
    (directory / "dataset_info.json").write_text(json.dumps(about))
    settings = {"stage": "sft", "do_train": True, "finetuning_type": "full", "dataset_dir": str(directory)}
    settings |= {"dataset": "rows", "model_name_or_path": str(model), "output_dir": str(directory / "out")}
    settings |= {"tokenized_path": str(directory / "tokens"), "packing": False, "max_steps": 1, "report_to": "none"}
    (directory / "job.yaml").write_text(yaml.safe_dump(settings | {"cutoff_len": 2048} | case.theirs))
    run([venv / "bin/llamafactory-cli", "train", "job.yaml"], directory)
    return directory / "tokens"


def in_axolotl(case: Case, directory: Path, rows: Path, model: Path, venv: Path) -> Path:
    source = {"path": str(rows), "ds_type": "json", "type": "chat_template", "field_messages": "messages"}
    settings = {"base_model": str(model), "datasets": [source], "dataset_prepared_path": str(directory / "tokens")}
    settings |= {"sample_packing": False, "micro_batch_size": 1, "gradient_accumulation_steps": 1, "num_epochs": 1}
    settings |= {"learning_rate": 1e-5, "sequence_len": 2048, "output_dir": str(directory / "out")}
    (directory / "job.yaml").write_text(yaml.safe_dump(settings | case.theirs))
    run([venv / "bin/axolotl", "preprocess", "job.yaml"], directory)
    [tokens] = [path for path in (directory / "tokens").iterdir() if path.is_dir()]
    return tokens


def run(words: list[Any], cwd: Path, codes: tuple[int, ...] = (0,)) -> str:
    environment = dict(os.environ)
    if words[0] != sys.executable:
        environment = {key: value for key, value in environment.items() if "PYTHON" not in key}
        environment |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(cwd / "home"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(list(map(str, words)), cwd=cwd, env=environment, capture_output=True, text=True)
    if done.returncode not in codes:
        raise RuntimeError(f"{words} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout


def versions(venv: Path, *packages: str) -> dict[str, str]:
    code = f"from importlib.metadata import version; print(*map(version, {packages!r}))"
    return dict(zip(packages, run([venv / "bin/python", "-c", code], venv).split(), strict=True))


def write_models(work: Path) -> dict[str, Path]:
    llama = fixtures.make_tokenizer(fixtures.LLAMA3, eos_token="<|eot_id|>")
    llama.bos_token = "<|begin_of_text|>"
    tokenizers = {"quickstart": AutoTokenizer.from_pretrained(MODEL_DIR), "chatml": fixtures.make_tokenizer()}
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    for name, tokenizer in (tokenizers | {"llama3": llama}).items():
        ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
        config = Qwen2Config(vocab_size=4096, num_key_value_heads=2, max_position_embeddings=4096, **sizes, **ends)
        Qwen2ForCausalLM(config).save_pretrained(work / name)
        tokenizer.save_pretrained(work / name)
    return {name: work / name for name in (*tokenizers, "llama3")}


def write_rows(work: Path, gsm8k: Path) -> dict[str, Path]:
    rng = random.Random(13)
    rows = [json.loads(line) for line in gsm8k.read_text().splitlines()]
    said = [[("user", row["question"]), ("assistant", row["answer"])] for row in rows]
    kinds = {
        "gsm8k": [{"messages": [{"role": role, "content": text} for role, text in turns]} for turns in said],
        "chats": [chat(number, rng) for number in range(200)],
        "tools": [tool_chat(rng) for _ in range(200)],
    }
    for name, found in kinds.items():
        (work / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    return {name: work / f"{name}.jsonl" for name in kinds}


def chat(number: int, rng: random.Random) -> Tree:
    """One to three questions, every second chat with a system prompt."""
    messages = [{"role": "system", "content": "Be brief."}] if number % 2 else []
    for turn in range(rng.randint(1, 3)):
        asked = f"Question {number}.{turn}: what is {rng.randint(1, 10**5)}?"
        messages.append({"role": "user", "content": asked})
        messages.append({"role": "assistant", "content": f"It is {rng.randint(1, 10**6)}."})
    return {"messages": messages}


def tool_chat(rng: random.Random) -> Tree:
    """A request, its call, which may leave arguments out, the result and the answer."""
    name = rng.choice(sorted(TOOLS))
    given = {key: f"{key} {rng.randint(1, 99)}" for key in TOOLS[name][: rng.randint(1, len(TOOLS[name]))]}
    messages = [
        {"role": "user", "content": f"{name} number {rng.randint(1, 10**6)}, please."},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": name, "arguments": given}}]},
        {"role": "tool", "content": json.dumps({"result": rng.randint(1, 999)})},
        {"role": "assistant", "content": f"It is {rng.randint(1, 999)}."},
    ]
    schema = {"type": "object", "properties": {key: {"type": "string"} for key in TOOLS[name]}}
    tool = {"type": "function", "function": {"name": name, "description": f"To {name}.", "parameters": schema}}
    return {"messages": messages, "tools": [tool]}


if __name__ == "__main__":
    main()
