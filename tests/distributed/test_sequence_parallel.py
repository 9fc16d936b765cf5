"""Ranks that share the tokens of a micro-batch train the same as a single rank."""

import pytest
from families import family_settings
from ranks import run_ranks
from toy import (
    ToySamples,
    build_toy_model,
    model_config,
    toy_run,
    write_model_config,
)

from trainer.config import ConfigError
from trainer.model import selfcheck
from trainer.model.assemble import design_model
from trainer.model.losses import LOSSES
from trainer.train.start.compose import load_config
from trainer.train.step import training_step

VARIANTS = {
    "tied head": ("qwen2", {}, {}),
    "fewer key heads than ranks, own head, recomputed": (
        "qwen2",
        {"num_key_value_heads": 1, "tie_word_embeddings": False},
        {"enable_gradient_checkpointing": True},
    ),
    "sinks, window, experts, router loss": (
        "gpt_oss",
        {"sliding_window": 5, "num_local_experts": 4, "num_experts_per_tok": 2},
        {},
    ),
    "window, transformed logits, adapters": (
        "gemma2",
        {"sliding_window": 5, "query_pre_attn_scalar": 16},
        {"lora_rank": 4, "random_weights": False},
    ),
    "linear attention, recomputed": (
        "qwen3_5_text",
        family_settings("qwen3_5_text"),
        {"enable_gradient_checkpointing": True},
    ),
    "Mamba, experts": ("nemotron_h", family_settings("nemotron_h"), {}),
    "short convolutions": ("lfm2", family_settings("lfm2"), {}),
}
"""(Family, changes of config.json, changes of the configuration)."""
KEPT = (
    "train/loss",
    "train/grad_norm",
    "train/total_valid_token_count",
    "moe/router_loss",
    "moe/load_max_over_mean",
)
SAMPLES = ToySamples()


def trained(world, root, num_variants):
    """Return by variant the metrics and sample losses of two steps, and the errors of the
    self-check.

    The second step has micro-batches with one document.
    """
    found = {}
    variants = [*VARIANTS.items()][:num_variants]
    for number, (name, (family, changes, settings)) in enumerate(variants):
        path = root / f"{number} of {world.size}-{world.rank}"
        model = build_toy_model(world, write_model_config(path, family, **changes), **settings)
        errors = selfcheck.compare(model, world.device, formula=LOSSES["cross_entropy"].formula)
        rows = []
        for limits in ({"max_tokens": 80}, {"max_samples": 1}):
            parts = toy_run(world, model, SAMPLES, total_steps=1, **limits)
            for batch in parts.batches:
                step = training_step(parts, batch)
                recorder = parts.tracking
                samples = recorder.samples[batch.step]
                row = {key: step.row[key] for key in KEPT if key in step.row}
                losses = zip(samples.ids, samples.loss_sums, strict=True)
                rows.append(row | {f"loss of {sample}": float(loss) for sample, loss in losses})
        largest = max(errors.loss, *errors.gradients.values(), errors.foresight)
        found[name] = {"rows": rows, "error": largest}
    return found


def test_ranks_with_the_same_samples_train_what_one_trains(tmp_path):
    """Test two ranks, and four ranks that each hold a copy of the parameters. No leak passes the
    self-check.
    """
    (expected,) = run_ranks(trained, 1, tmp_path, len(VARIANTS))
    for num_ranks, fsdp_size, num_variants in ((2, -1, len(VARIANTS)), (4, 1, 2)):
        found, *_ = run_ranks(
            trained, num_ranks, tmp_path, num_variants, sequence_size=2, fsdp_size=fsdp_size
        )
        for name in found:
            for row, plain in zip(found[name]["rows"], expected[name]["rows"], strict=True):
                assert row == pytest.approx(plain, rel=1e-5), name
                assert row["train/loss"] == pytest.approx(plain["train/loss"], rel=1e-6), name
            assert found[name]["error"] < 1e-5, name


@pytest.mark.parametrize(
    ("size", "family", "settings", "reason"),
    [
        (
            3,
            "qwen2",
            {},
            "does not divide the 4 attention heads of this model.\\nFix: set it to one of \\[1, 2, 4\\]",
        ),
        (
            2,
            "qwen2",
            {"attention": "per_document"},
            "cannot be split over ranks: model.attention=per_document",
        ),
        (2, "bloom", {}, "BloomAttention would have to see all tokens of a document"),
        (2, "mamba", {}, "MambaMixer would have to see all tokens of a document"),
        (2, "llama4_text", {}, "Llama4TextAttention would have to see all tokens of a document"),
    ],
)
def test_what_cannot_be_split_is_refused_by_its_config_alone(
    tmp_path, size, family, settings, reason
):
    source = write_model_config(tmp_path, family)
    config = model_config(ulysses_sequence_parallel_size=size, **settings)
    with pytest.raises(ConfigError, match=reason):
        design_model(config, source, max_length=40)
    design_model(model_config(**settings), source, max_length=40)
    design_model(
        model_config(ulysses_sequence_parallel_size=2), write_model_config(tmp_path), max_length=40
    )


def test_ranks_together_take_documents_longer_than_one_takes():
    words = [
        "data.max_token_len_per_gpu=1024",
        "data.max_length=2048",
        "model.ulysses_sequence_parallel_size=",
    ]
    assert load_config([*words[:2], words[2] + "2"]).max_micro_batch_tokens == 2048
    with pytest.raises(ConfigError, match=r"is less than data.max_length=2048"):
        load_config(words[:2])
