"""How long commands take to answer, and the CPU seconds of all their processes, beside those of
another commit.

python benchmarks/startup.py --before COMMIT [--rounds 3]: both run each case in alternation, from
prepared data.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from measuring import REPOSITORY, header, middle, run_command, table, write_result

QWEN_7B = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
    "max_position_embeddings": 32768,
}

TRAIN = ["trainer.device=cpu", "trainer.total_training_steps=1", "data.cache_dir=cache"]
RECIPE = [
    "experiment=phase1_sft_qwen7b_coder",
    "model.partial_pretrain=qwen7b",
    "data.train_files=rows.jsonl",
]
CASES = {
    "a wrong key": (["trainer.launch", "2", "trainer.epochs=1"], 2),
    "a wrong path": (["trainer.launch", "2", "data.train_files=nope.jsonl"], 65),
    "a finished run": (["trainer.launch", "2", *TRAIN, "trainer.default_local_dir=finished"], 0),
    "plan of the 7B recipe": (["trainer.cli", "plan", "8", *RECIPE, "--memory-gib", "80"], 0),
    "a run of one step, 1 rank": (
        ["trainer.launch", "1", *TRAIN, "trainer.default_local_dir=new"],
        0,
    ),
    "a run of one step, 2 ranks": (
        ["trainer.launch", "2", *TRAIN, "trainer.default_local_dir=new"],
        0,
    ),
}


def measure(checkout: Path, work: Path, case: str) -> dict[str, float]:
    """Return the seconds and CPU seconds until the command has ended. Raises an error if it ends
    with an unexpected code.
    """
    words, expected = CASES[case]
    shutil.rmtree(work / "new", ignore_errors=True)
    environment = {"PYTHONPATH": str(checkout), "PYTHONSAFEPATH": "1", "HF_HUB_OFFLINE": "1"}
    seconds, usage = run_command(
        [sys.executable, "-m", *words],
        cwd=work,
        log=work / "log",
        environment=environment,
        expected_code=expected,
    )
    return {"seconds": seconds, "cpu_seconds": usage.ru_utime + usage.ru_stime}


def prepare(checkout: Path, work: Path) -> None:
    """Prepare data in the cache and a finished run."""
    work.mkdir()
    (work / "qwen7b").mkdir()
    (work / "qwen7b" / "config.json").write_text(json.dumps(QWEN_7B))
    (work / "rows.jsonl").write_text("{}\n")
    measure(checkout, work, "a finished run")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", required=True, metavar="COMMIT")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    found: dict[str, dict[str, list[dict[str, float]]]] = {
        case: {"before": [], "after": []} for case in CASES
    }
    with tempfile.TemporaryDirectory() as directory:
        checkouts = {"before": Path(directory, "checkout"), "after": REPOSITORY}
        checkouts["before"].mkdir()
        archive = subprocess.run(
            ["git", "archive", options.before], cwd=REPOSITORY, check=True, capture_output=True
        )
        subprocess.run(["tar", "x"], cwd=checkouts["before"], input=archive.stdout, check=True)
        for side, checkout in checkouts.items():
            prepare(checkout, Path(directory, f"{side} work"))
        for _ in range(options.rounds):
            for case in CASES:
                for side, checkout in checkouts.items():
                    found[case][side].append(
                        measure(checkout, Path(directory, f"{side} work"), case)
                    )
    names = ("seconds", "cpu_seconds")
    rows = {
        case: {
            side: {name: middle(run[name] for run in runs) for name in names}
            for side, runs in sides.items()
        }
        for case, sides in found.items()
    }
    write_result(
        "startup", {**header(), "before": options.before, "rounds": options.rounds, "rows": rows}
    )
    columns = ["case", *(f"{name}, {side}" for name in names for side in checkouts)]
    lines = (
        [case, *(f"{rows[case][s][n]['median']:.2f}" for n in names for s in checkouts)]
        for case in rows
    )
    print(table(columns, lines))


if __name__ == "__main__":
    main()
