"""What a run is about to train, in the words of its log."""

import logging

from transformers import PreTrainedTokenizerBase

from trainer.data.batch_plan import Schedule, split_batch
from trainer.data.loader import RankPlan
from trainer.data.preview import preview
from trainer.data.samples import Samples
from trainer.data.turns import AUTO

logger = logging.getLogger(__name__)


def announce(
    train: Samples,
    validation: Samples | None,
    *,
    schedule: Schedule,
    plan: RankPlan,
    total_steps: int,
    tokenizer: PreTrainedTokenizerBase,
    lr: str,
    device: str,
) -> None:
    """The plan in one line, what was left out or cut, and the next sample as the model sees it."""
    rows = schedule.rows(schedule.start.step + 1)
    first = train.of_rows(rows)
    lengths, _ = train.counts(first)
    dealt = split_batch(
        lengths,
        num_data_ranks=plan.num_data_ranks,
        limits=plan.limits,
        quadratic_cost=plan.quadratic_cost,
        window_costs=plan.window_costs,
    )
    num_rows = train.total("num_rows")
    tokens = sum(source.num_tokens for source in train.sources)
    supervised = sum(source.num_loss_tokens for source in train.sources)
    logger.info(
        f"plan: batch {len(rows)} = {plan.num_data_ranks} ranks ({device}) x {len(dealt[0])} "
        f"micro-batches; {total_steps} steps, {schedule.steps_per_epoch} per epoch; {len(train)} "
        f"samples, {tokens} tokens, {supervised / tokens:.1%} supervised, no padding; rows: "
        f"{train.total('num_truncated') / num_rows:.1%} cut, {train.total('num_dropped')} dropped, "
        f"{train.total('num_bad_rows')} bad; {_turns(train)}{len(validation) if validation else 0} "
        f"validation samples; {lr}"
    )
    if len(train.sources) > 1 or schedule.num_samples != sum(
        share.num_rows for share in train.shares
    ):
        for source, times in zip(train.sources, schedule.times_until(total_steps), strict=True):
            share, num_tokens = source.share, source.num_tokens
            part = source.num_loss_tokens / num_tokens if num_tokens else 0.0
            logger.info(
                f"source {source.name}: {share.num_rows} rows, {num_tokens} tokens, {part:.1%} "
                f"supervised; repeat {share.repeat:g}: {share.num_samples} rows an epoch, each "
                f"{times:.3g} times in the run"
            )
    sources = [*train.sources, *(validation.sources if validation is not None else ())]
    for dataset in dict.fromkeys(source.dataset for source in sources):
        shapes = (f"{count} of {shape}" for shape, count in dataset.summary.rows_by_shape.items())
        ends = ", ".join(map(repr, tokenizer.convert_ids_to_tokens(dataset.summary.end_token_ids)))
        unread = ", ".join(
            f"'{name}' {count}" for name, count in dataset.summary.unread_columns.items()
        )
        text = f"; nothing reads these columns: {unread}" if unread else ""
        logger.info(
            "rows taken for: %s; what is trained ends with %s%s", "; ".join(shapes), ends, text
        )
        for note in dataset.notes:
            logger.warning("%s", note)
    sample = int(first[0])
    text = preview(*train.sample(sample), tokenizer)
    logger.info(f"next sample ({train.location(sample)}), supervised part marked:\n{text}")


def source_facts(train: Samples, schedule: Schedule, *, total_steps: int) -> dict[str, float]:
    """The same as metrics, where there are several sources."""
    facts: dict[str, float] = {}
    if len(train.sources) > 1:
        for source, times in zip(train.sources, schedule.times_until(total_steps), strict=True):
            tokens = source.num_tokens
            facts[f"data/rows_by/{source.name}"] = source.share.num_rows
            facts[f"data/tokens_by/{source.name}"] = tokens
            facts[f"data/valid_token_frac_by/{source.name}"] = source.num_loss_tokens / max(
                1, tokens
            )
            facts[f"data/repeat_by/{source.name}"] = source.share.num_samples / max(
                1, source.share.num_rows
            )
            facts[f"data/times_by/{source.name}"] = times
    return facts


def _turns(train: Samples) -> str:
    """What became of the turns of conversations, and why."""
    num_conversations, num_apart = train.total("num_conversations"), train.total("num_apart")
    if not num_conversations:
        return ""
    asked = next(
        source.dataset.summary.turns
        for source in train.sources
        if source.dataset.summary.num_conversations
    )
    if asked != AUTO:
        words = f"turns {asked} (data.turns); "
    elif num_apart:
        words = f"turns apart in {num_apart} of {num_conversations} conversations, "
        words += "whose whole rendering shows a turn otherwise than inference does; "
    else:
        words = "turns together; "
    if num_turns := train.total("num_unlike_prompt"):
        words += f"{num_turns} turns are not rendered as their generation prompt begins; "
    if num_turns := train.total("num_without_reasoning"):
        words += f"the template leaves out the reasoning of {num_turns} assistant turns; "
    return words
