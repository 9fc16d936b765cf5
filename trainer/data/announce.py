"""What a run is about to train, for its log and as metrics."""

import logging

from transformers import PreTrainedTokenizerBase

from trainer.data.batch_plan import Schedule
from trainer.data.loader import RankPlan
from trainer.data.prepare import BAD_ROWS, OVER_LONG_ROWS
from trainer.data.samples import Samples, TokenDataset
from trainer.data.show import preview

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
    """Log the plan in one line, what was left out or cut, and the next sample as the model sees
    it.
    """
    rows = schedule.rows(schedule.start.step + 1)
    first = train.of_rows(rows)
    lengths, _ = train.counts(first)
    dealt = plan.deal(lengths)
    num_rows = train.total("num_rows")
    tokens, supervised = map(
        sum, zip(*(source.num_tokens for source in train.sources), strict=True)
    )
    logger.info(
        f"plan: batch {len(rows)} = {plan.num_data_ranks} ranks ({device}) x {len(dealt[0])} "
        f"micro-batches; {total_steps} steps, {schedule.steps_per_epoch} per epoch; {len(train)} "
        f"samples, {tokens} tokens, {supervised / tokens:.1%} supervised, no padding; rows: "
        f"{train.total('num_truncated') / num_rows:.1%} cut, {train.total('num_dropped')} dropped, "
        f"{train.total('num_bad_rows')} bad; {_turns(train)}{len(validation) if validation else 0} "
        f"validation samples; {lr}"
    )
    if len(train.sources) > 1 or train.sources[0].repeat != 1:
        for source, times in zip(train.sources, schedule.times_until(total_steps), strict=True):
            num_rows, (num_tokens, num_labels) = source.share.num_rows, source.num_tokens
            logger.info(
                f"source {source.name}: {num_rows} rows, {num_tokens} tokens, "
                f"{num_labels / max(1, num_tokens):.1%} supervised; each row {times:.3g} times in "
                f"the run (repeat {source.repeat:g})"
            )
    sources = [*train.sources, *(validation.sources if validation is not None else ())]
    for dataset in dict.fromkeys(source.dataset for source in sources):
        _log_rows(dataset, tokenizer)
    sample = int(first[0])
    text = preview(*train.sample(sample), tokenizer)
    logger.info(f"next sample ({train.location(sample)}), supervised part marked:\n{text}")


def _log_rows(dataset: TokenDataset, tokenizer: PreTrainedTokenizerBase) -> None:
    """Log what the rows of a dataset were taken for, and warn of what was left out or cut."""
    summary = dataset.summary
    formats = "; ".join(f"{count} of {name}" for name, count in summary.rows_by_shape.items())
    ends = ", ".join(map(repr, tokenizer.convert_ids_to_tokens(summary.end_token_ids)))
    text = f"; nothing reads these columns: {counted(summary.unread_columns)}"
    logger.info(
        "rows taken for: %s; what is trained ends with %s%s",
        formats,
        ends,
        text if summary.unread_columns else "",
    )
    if summary.num_bad_rows:
        logger.warning(
            "left out %d bad rows (%s), listed in %s",
            summary.num_bad_rows,
            counted(summary.bad_rows_by_kind),
            dataset.directory / BAD_ROWS,
        )
    if summary.num_dropped or summary.num_truncated:
        logger.warning(
            "over-long rows: %d dropped, %d cut by %d tokens, listed in %s",
            summary.num_dropped,
            summary.num_truncated,
            summary.num_cut_tokens,
            dataset.directory / OVER_LONG_ROWS,
        )
    if summary.unread_keys:
        logger.warning("nothing reads these keys of messages: %s", counted(summary.unread_keys))


def counted(counts: dict[str, int]) -> str:
    return ", ".join(f"'{name}' {count}" for name, count in counts.items())


def _turns(train: Samples) -> str:
    """Return what became of the turns of conversations."""
    num_conversations, num_apart = train.total("num_conversations"), train.total("num_apart")
    if not num_conversations:
        return ""
    words = f"turns apart in {num_apart} of {num_conversations} conversations (data.turns); "
    if num_turns := train.total("num_unlike_prompt"):
        words += f"{num_turns} turns are not rendered as their generation prompt begins; "
    if num_turns := train.total("num_without_reasoning"):
        words += f"the template leaves out the reasoning of {num_turns} assistant turns; "
    return words


def source_facts(train: Samples, schedule: Schedule, *, total_steps: int) -> dict[str, float]:
    """Return metrics of each source, where there are several."""
    facts: dict[str, float] = {}
    if len(train.sources) == 1:
        return facts
    for source, times in zip(train.sources, schedule.times_until(total_steps), strict=True):
        share, (num_tokens, num_labels) = source.share, source.num_tokens
        facts[f"data/rows_by/{source.name}"] = share.num_rows
        facts[f"data/tokens_by/{source.name}"] = num_tokens
        facts[f"data/valid_token_frac_by/{source.name}"] = num_labels / max(1, num_tokens)
        facts[f"data/repeat_by/{source.name}"] = share.num_samples / max(1, share.num_rows)
        facts[f"data/times_by/{source.name}"] = times
    return facts
