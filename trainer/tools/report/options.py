"""Names of options in each framework, by their purpose."""

from collections.abc import Mapping

OPTIONS: Mapping[str, tuple[str, ...]] = {
    "clip": ("max_grad_norm", "optim.clip_grad"),
    "lr": ("learning_rate", "optim.lr"),
    "warmup": ("warmup_ratio", "optim.lr_warmup_steps_ratio", "optim.warmup_steps_ratio"),
    "schedule": ("lr_scheduler_type", "optim.lr_scheduler"),
    "batch": ("per_device_train_batch_size", "data.train_batch_size"),
    "eval": ("eval_steps", "trainer.test_freq", "trainer.test_freq", "test_freq"),
    "save": ("save_steps", "trainer.save_freq", "trainer.save_freq", "save_freq"),
    "workers": ("dataloader_num_workers", "data.num_workers"),
    "max_length": ("max_length", "data.max_length"),
    "epochs": ("num_train_epochs", "trainer.total_epochs"),
    "memory": (
        "gradient_checkpointing=true",
        "model.enable_gradient_checkpointing=true, a smaller data.max_token_len_per_gpu",
        "model.enable_gradient_checkpointing=true",
    ),
    # reinforcement learning on top of this trainer is a loop of the user's own
    "accumulation": ("gradient_accumulation_steps", "the number of accumulated batches"),
    "beta": (
        "beta",
        "the weight of the KL penalty",
        "actor_rollout_ref.actor.kl_loss_coef",
    ),
    "epsilon_low": (
        "epsilon",
        "the lower clip range",
        "actor_rollout_ref.actor.clip_ratio_low",
    ),
    "epsilon_high": (
        "epsilon_high",
        "the upper clip range",
        "actor_rollout_ref.actor.clip_ratio_high",
    ),
    "group": (
        "num_generations",
        "the number of answers to a prompt",
        "actor_rollout_ref.rollout.n",
    ),
    "completion": (
        "max_completion_length",
        "the longest answer allowed",
        "data.max_response_length",
    ),
}
"""Purpose -> its name in transformers, in this trainer, in verl where that is another one, and
further spellings.
"""
PLACES = {"fsdp-sft": 1, "verl": 2}
"""Source of a log -> the place of its names; other sources use the names of transformers."""


def names_in(source: str) -> dict[str, str]:
    """Return purpose -> name in the framework that wrote a log."""
    place = PLACES.get(source, 0)
    return {purpose: names[min(place, len(names) - 1)] for purpose, names in OPTIONS.items()}
