"""What a run is about to train, in the words of its log."""

import logging

from transformers import PreTrainedTokenizerBase

from trainer.data.batch_plan import Schedule, split_batch
from trainer.data.chat import preview
from trainer.data.loader import RankPlan, View
from trainer.data.sample_writer import Summary

logger = logging.getLogger(__name__)


def announce(
    train: View,
    validation: View | None,
    *,
    schedule: Schedule,
    plan: RankPlan,
    total_steps: int,
    tokenizer: PreTrainedTokenizerBase,
    lr: str,
    device: str,
) -> None:
    """The plan in one line, what was left out or cut, and the next sample as the model sees it."""
    summary = train.dataset.summary
    first = schedule.samples(schedule.start.step + 1)
    dealt = split_batch(
        train.lengths[first], num_data_ranks=plan.num_data_ranks, limits=plan.limits, quadratic_cost=plan.quadratic_cost
    )
    tokens, supervised = int(train.lengths.sum()), int(train.num_loss_tokens.sum())
    logger.info(
        f"plan: batch {len(first)} = {plan.num_data_ranks} ranks ({device}) x {len(dealt[0])} micro-batches; "
        f"{total_steps} steps, {schedule.steps_per_epoch} per epoch; {len(train.lengths)} samples, {tokens} tokens, "
        f"{supervised / tokens:.1%} supervised, no padding; rows: {summary.num_truncated / summary.num_rows:.1%} cut, "
        f"{summary.num_dropped} dropped, {summary.num_bad_rows} bad; {_left_out(summary)}"
        f"{len(validation.lengths) if validation else 0} validation samples; {lr}"
    )
    for dataset in dict.fromkeys(view.dataset for view in (train, validation) if view is not None):
        for note in dataset.notes:
            logger.warning("%s", note)
    sample = int(first[0])
    text = preview(*train.sample(sample), tokenizer)
    logger.info(f"next sample ({train.location(sample)}), supervised part marked:\n{text}")


def _left_out(summary: Summary) -> str:
    num_turns = summary.num_without_reasoning
    return f"the template leaves out the reasoning of {num_turns} assistant turns; " if num_turns else ""
