"""What each framework calls an option, by its purpose."""

from collections.abc import Mapping

TRANSFORMERS: Mapping[str, str] = {
    "clip": "max_grad_norm",
    "lr": "learning_rate",
    "warmup": "warmup_ratio",
    "schedule": "lr_scheduler_type",
    "batch": "per_device_train_batch_size",
    "accumulation": "gradient_accumulation_steps",
    "eval": "eval_steps",
    "save": "save_steps",
    "beta": "beta",
    "epsilon_low": "epsilon",
    "epsilon_high": "epsilon_high",
    "group": "num_generations",
    "completion": "max_completion_length",
    "workers": "dataloader_num_workers",
    "max_length": "max_length",
    "memory": "gradient_checkpointing=true",
    "epochs": "num_train_epochs",
}
OURS: Mapping[str, str] = {
    "clip": "optim.clip_grad",
    "lr": "optim.lr",
    "warmup": "optim.lr_warmup_steps_ratio",
    "schedule": "optim.lr_scheduler",
    "batch": "data.train_batch_size",
    "eval": "trainer.test_freq",
    "save": "trainer.save_freq",
    "workers": "data.num_workers",
    "max_length": "data.max_length",
    "memory": "model.enable_gradient_checkpointing=true, a smaller data.max_token_len_per_gpu",
    "epochs": "trainer.total_epochs",
    # of reinforcement learning, which is a loop of the user's own
    "accumulation": "the number of accumulated batches",
    "beta": "the weight of the KL penalty",
    "epsilon_low": "the lower clip range",
    "epsilon_high": "the upper clip range",
    "group": "the number of answers to a prompt",
    "completion": "the longest answer allowed",
}
VERL: Mapping[str, str] = {
    **OURS,
    "warmup": "optim.warmup_steps_ratio",
    "beta": "actor_rollout_ref.actor.kl_loss_coef",
    "epsilon_low": "actor_rollout_ref.actor.clip_ratio_low",
    "epsilon_high": "actor_rollout_ref.actor.clip_ratio_high",
    "group": "actor_rollout_ref.rollout.n",
    "completion": "data.max_response_length",
    "memory": "model.enable_gradient_checkpointing=true",
}
OPTIONS: Mapping[str, Mapping[str, str]] = {"fsdp-sft": OURS, "verl": VERL}
"""By the source of a log; others use the names of transformers."""

SYNONYMS: Mapping[str, tuple[str, ...]] = {
    "warmup": ("warmup_steps",),
    "epsilon_low": ("epsilon_low",),
    "group": ("group_size", "num_generations"),
    "beta": ("beta",),
    "completion": ("max_completion_length",),
}
