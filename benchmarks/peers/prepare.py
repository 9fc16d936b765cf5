"""TRL's SFTTrainer prepares the chats of the case: `_prepare_dataset` is timed, while a trainer
is constructed.
"""

import argparse
import itertools
import json
import time
from pathlib import Path

import datasets
import numpy as np
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer


class TimedTrainer(SFTTrainer):
    prepare_s = 0.0

    def _prepare_dataset(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        started = time.perf_counter()
        dataset = super()._prepare_dataset(*args, **kwargs)
        self.prepare_s += time.perf_counter() - started
        return dataset


def peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--max-length", type=int)
    parser.add_argument("--num-proc", type=int)
    options = parser.parse_args()
    datasets.disable_caching()  # else the second run finds what the first one made
    chats = [json.loads(line) for line in (options.case / "train.jsonl").read_text().splitlines()]
    config = AutoConfig.from_pretrained(options.case / "model", num_hidden_layers=1)
    trainer = TimedTrainer(
        AutoModelForCausalLM.from_config(config),
        SFTConfig(
            output_dir=str(options.output.with_suffix(".run")),
            assistant_only_loss=True,
            max_length=options.max_length,
            dataset_num_proc=options.num_proc,
            use_cpu=True,
            gradient_checkpointing=False,
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=datasets.Dataset.from_list(chats),
        processing_class=AutoTokenizer.from_pretrained(options.case / "model"),
    )
    found = {
        "prepare_s": trainer.prepare_s,
        "num_rows": len(trainer.train_dataset),
        "peak_bytes": peak_bytes(),
    }
    samples = options.output.with_suffix(".npz")
    write_samples(samples, trainer.train_dataset["input_ids"], trainer.train_dataset["labels"])
    options.output.write_text(json.dumps({**found, "samples": str(samples)}))


def write_samples(path: Path, input_ids: list[list[int]], labels: list[list[int]]) -> None:
    np.savez(
        path,
        input_ids=np.fromiter(itertools.chain.from_iterable(input_ids), dtype=np.int32),
        labels=np.fromiter(itertools.chain.from_iterable(labels), dtype=np.int32),
        offsets=np.cumsum([0, *map(len, input_ids)]),
    )


if __name__ == "__main__":
    main()
