"""Real runs of a tiny model: the command on two ranks, killed with SIGKILL in a step, resumed,
exported.
"""

import json
import random
import signal
from functools import partial
from pathlib import Path
from typing import Any

import torch
from families import VOCAB
from family_trials import save_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from whole_runs import stop_in_step, train

from trainer.tools.verify.equality import compare_runs

NUM_RANKS = 2
TOTAL_STEPS = 6
KILLED_IN_STEP = 5
SPECIAL = ["<pad>", "<unk>", "<user>", "<assistant>", "<end>"]
TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'] + '> ' + message['content'] + ' <end> ' "
    "}}{% endfor %}{% if add_generation_prompt %}{{ '<assistant> ' }}{% endif %}"
)


def prepare(root: Path, name: str) -> None:
    """The model with a tokenizer, and samples."""
    save_model(root / "model", name)
    save_tokenizer(root / "model")
    write_samples(root / "samples.jsonl")


def save_tokenizer(path: Path) -> None:
    """Of as many words as the tiny models know."""
    words = [*SPECIAL, *(f"w{number}" for number in range(VOCAB - len(SPECIAL)))]
    backend = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(SPECIAL)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<end>", pad_token="<pad>"
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)


def write_samples(path: Path) -> None:
    """24 conversations of 6 to 40 tokens."""
    drawn = random.Random(0)

    def words() -> str:
        return " ".join(
            f"w{drawn.randrange(VOCAB - len(SPECIAL))}" for _ in range(drawn.randrange(1, 18))
        )

    rows = ({"instruction": words(), "output": words()} for _ in range(24))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def words_of_run(root: Path, model: Path) -> tuple[str, ...]:
    """`root` holds samples.jsonl and the cache of its tokens."""
    return (
        f"data.train_files={root}/samples.jsonl",
        f"data.cache_dir={root}/cache",
        f"model.partial_pretrain={model}",
        f"trainer.total_training_steps={TOTAL_STEPS}",
        "data.val_ratio=0",
        "data.max_length=40",
        "data.train_batch_size=4",
        "data.num_workers=0",
        "model.fsdp_config.param_dtype=float32",
        "optim.lr=1e-2",
        "trainer.device=cpu",
        "trainer.logger=[]",
        "trainer.save_freq=2",
        "trainer.test_freq=-1",
        "trainer.checkpoint.async_save=false",
        "trainer.checkpoint.export_dtype=float32",
    )


def interrupted_run(root: Path, model: Path, *more: str, num_ranks: int = NUM_RANKS) -> list[str]:
    """Return how a run that was killed and started again differs from one in one go; `root` is the
    model's own.
    """
    straight, killed = root / "straight", root / "killed"
    words = (*words_of_run(root, model), *more)
    train(straight, num_ranks, *words)
    kill = partial(stop_in_step, KILLED_IN_STEP, signal.SIGKILL)
    output = train(killed, num_ranks, *words, code=None, before=kill)
    assert "/global_step_4 (" in output, output
    output = train(killed, num_ranks, *words)
    assert "/global_step_4 (" not in output and "/global_step_6 (" in output, output
    compared = compare_runs(straight, killed, steps=TOTAL_STEPS)
    assert compared.num_equal > TOTAL_STEPS
    return compared.differences[:5]


def export_faults(checkpoint: Path) -> list[str]:
    """What is wrong with the export of a checkpoint, for transformers alone: keys, or logits that
    are not those of the parameters in the shards.
    """
    export = checkpoint / "huggingface"
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        export, dtype=torch.float32, output_loading_info=True
    )
    served, report = loaded
    faults = [f"{kind}: {sorted(map(str, found))[:3]}" for kind, found in report.items() if found]
    served_state, trained = served.state_dict(), whole_state(checkpoint)
    faults += [
        f"not in the shards: {name}" for name, _ in served.named_parameters() if name not in trained
    ]
    states = served_state, served_state | trained  # buffers are not trained
    ids = torch.randint(0, VOCAB, (1, 24), generator=torch.Generator().manual_seed(0))
    model = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(export), dtype=torch.float32
    ).eval()
    ours, theirs = (_logits(model, state, ids) for state in states)
    return faults + (
        [] if torch.equal(ours, theirs) else ["logits differ from those of the trained parameters"]
    )


@torch.no_grad()
def _logits(model: Any, state: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    """In the memory of one model: kernels round otherwise where tensors lie as a file has them."""
    model.load_state_dict(state)
    logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    return logits


def whole_state(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The parameters of all ranks' shards, put together by nothing of ours."""
    from torch.distributed.tensor import DTensor

    paths = [
        checkpoint / f"model_world_size_{NUM_RANKS}_rank_{rank}.pt" for rank in range(NUM_RANKS)
    ]
    shards = [torch.load(path, weights_only=True) for path in paths]
    return {
        name: torch.cat([shard[name]._local_tensor for shard in shards])
        if isinstance(tensor, DTensor)
        else tensor
        for name, tensor in shards[0].items()
    }
