"""What is wrong between keys that are each right."""

from collections.abc import Iterator

from trainer.config.data import AUTO, QUICKSTART, column_problem
from trainer.config.schema import LOADED, SELECTIVE, Config


def contradictions(config: Config) -> Iterator[str]:
    """What is wrong between keys that are each right, with a fix."""
    data, model, trainer, checkpoint = config.data, config.model, config.trainer, config.trainer.checkpoint
    is_known = data.max_token_len_per_gpu != AUTO
    if is_known and config.max_micro_batch_tokens is not None and config.max_micro_batch_tokens < data.max_length:
        size = model.ulysses_sequence_parallel_size
        together = f" on each of {size} ranks (model.ulysses_sequence_parallel_size)" if size > 1 else ""
        yield (
            f"'data.max_token_len_per_gpu' ({data.max_token_len_per_gpu}){together} is below 'data.max_length' "
            f"({data.max_length}): a single sample would not fit; raise the first or lower the second"
        )
    if problem := column_problem(data, "data."):
        yield problem
    if model.compile and model.enable_gradient_checkpointing == SELECTIVE:
        yield (
            "'model.enable_gradient_checkpointing=selective' and 'model.compile=true' exclude each other: compiled "
            "layers already compute again what is cheap; use false or true"
        )
    if model.has_adapters and model.freeze:
        yield "'model.freeze' goes with full fine-tuning: LoRA freezes the whole model; remove one of the two"
    if model.has_adapters and model.new_tokens:
        yield "'model.new_tokens' goes with full fine-tuning: LoRA would leave the rows of new tokens untrained"
    if model.has_adapters and (model.random_weights or model.partial_pretrain == QUICKSTART):
        yield (
            "LoRA ('model.lora_rank', 'model.lora_adapter_path') needs pretrained weights, which its checkpoints do "
            "not hold: name a model in 'model.partial_pretrain', without 'model.random_weights'"
        )
    if (trainer.resume_mode == "resume_path") != (trainer.resume_from_path is not None):
        yield "'trainer.resume_from_path' and 'trainer.resume_mode=resume_path' go together: set both or neither"
    if trainer.hang_timeout_s >= trainer.dist_timeout_s:
        yield (
            f"'trainer.hang_timeout_s' ({trainer.hang_timeout_s}) must be below 'trainer.dist_timeout_s' "
            f"({trainer.dist_timeout_s}): the hang must be found before a collective gives up"
        )
    if "model" not in checkpoint.load_contents:
        yield "'trainer.checkpoint.load_contents' must contain 'model'"
    elif "extra" not in checkpoint.load_contents and trainer.resume_mode != "resume_path":
        yield (
            "'trainer.checkpoint.load_contents' without extra starts at step 1 again: only with resume_mode=resume_path"
        )
    if not set(LOADED) <= set(checkpoint.save_contents):
        yield (
            "'trainer.checkpoint.save_contents' must contain model, optimizer and extra: without them a run cannot "
            "resume"
        )
