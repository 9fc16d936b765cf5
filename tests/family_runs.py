"""Real runs of a tiny model: the command on two ranks, killed with SIGKILL in a step, resumed, and
exported.
"""

import random
import signal
from functools import partial

import torch
from families import VOCAB
from family_trials import save_model
from small_files import write_lines
from tokenizers import Tokenizer, models, pre_tokenizers
from toy import differing
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
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


def prepare(root, name):
    """Write the model with a tokenizer, and samples."""
    save_model(root / "model", name)
    save_tokenizer(root / "model")
    write_samples(root / "samples.jsonl")


def save_tokenizer(path):
    """Save a tokenizer with as many words as the tiny models have embeddings."""
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


def write_samples(path):
    """24 conversations of 6 to 40 tokens."""
    drawn = random.Random(0)

    def words():
        return " ".join(
            f"w{drawn.randrange(VOCAB - len(SPECIAL))}" for _ in range(drawn.randrange(1, 18))
        )

    rows = ({"instruction": words(), "output": words()} for _ in range(24))
    write_lines(path, rows)


def words_of_run(root, model):
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


def interrupted_run(root, model, *more, num_ranks=NUM_RANKS):
    """Return the differences between a run that was killed and restarted and an uninterrupted one.
    `root` belongs to the model.
    """
    straight = root / "straight"
    killed = root / "killed"
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


def export_faults(checkpoint):
    """Return the faults that transformers finds in the export of a checkpoint: wrong keys, or
    tensors that differ from the shards.
    """
    loaded = AutoModelForCausalLM.from_pretrained(
        checkpoint / "huggingface", dtype=torch.float32, output_loading_info=True
    )
    served, report = loaded
    faults = [f"{kind}: {sorted(map(str, found))[:3]}" for kind, found in report.items() if found]
    tensors = served.state_dict()
    trained = whole_state(checkpoint)
    names = [name for name, _ in served.named_parameters()]
    faults += [f"not in the shards: {name}" for name in names if name not in trained]
    unequal = differing({name: tensors[name] for name in trained}, trained)
    return faults + [f"differs from the shards: {name}" for name in unequal]


def whole_state(checkpoint):
    """Return the parameters of all ranks' shards, joined without the trainer's code."""
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
