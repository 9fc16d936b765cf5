"""What a run is about to train, for its log and as metrics."""

import logging
from collections.abc import Mapping

from transformers import PreTrainedTokenizerBase

from trainer.data.batch_plan import RankPlan, Schedule
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
    """Log the plan in one line, what was left out or cut, and the next sample as the model reads
    it.
    """
    rows = schedule.rows(schedule.start.step + 1)
    first = train.of_rows(rows)
    num_micro_batches = len(plan.deal(train.counts(first)[0])[0])
    num_rows = train.total("num_rows")
    num_tokens = sum(source.num_tokens[0] for source in train.sources)
    num_labels = sum(source.num_tokens[1] for source in train.sources)
    logger.info(
        f"plan: batch {len(rows)} = {plan.num_data_ranks} ranks ({device}) x {num_micro_batches} "
        f"micro-batches; {total_steps} steps, {schedule.steps_per_epoch} per epoch; {len(train)} "
        f"samples, {num_tokens} tokens, {num_labels / num_tokens:.1%} supervised, no padding; "
        f"rows: {train.total('num_truncated') / num_rows:.1%} cut, {train.total('num_dropped')} "
        f"dropped, {train.total('num_bad_rows')} bad; {_turns(train)}"
        f"{len(validation) if validation else 0} validation samples; {lr}"
    )
    if len(train.sources) > 1 or train.sources[0].repeat != 1:
        facts = _facts(train, schedule, total_steps)
        for source in train.sources:
            found = facts[source.name]
            logger.info(
                f"source {source.name}: {found['rows']} rows, {found['tokens']} tokens, "
                f"{found['valid_token_frac']:.1%} supervised; each row {found['times']:.3g} times "
                f"in the run (repeat {source.repeat:g})"
            )
    sources = [*train.sources, *(validation.sources if validation is not None else ())]
    for dataset in dict.fromkeys(source.dataset for source in sources):
        _log_rows(dataset, tokenizer)
    sample = int(first[0])
    text = preview(*train.sample(sample), tokenizer)
    logger.info(f"next sample ({train.location(sample)}), supervised part marked:\n{text}")


def _log_rows(dataset: TokenDataset, tokenizer: PreTrainedTokenizerBase) -> None:
    """Log the formats of the rows of a dataset, and warn of what was left out or cut."""
    summary = dataset.summary
    formats = "; ".join(f"{count} of {name}" for name, count in summary.rows_by_shape.items())
    ends = tokenizer.convert_ids_to_tokens(sorted(summary.end_token_ids))
    text = f"rows taken for: {formats}; what is trained ends with {', '.join(map(repr, ends))}"
    if summary.unread_columns:
        text += f"; nothing reads these columns: {_counted(summary.unread_columns)}"
    logger.info(text)
    if summary.num_bad_rows:
        logger.warning(
            f"left out {summary.num_bad_rows} bad rows ({_counted(summary.bad_rows_by_kind)}), "
            f"listed in {dataset.directory / BAD_ROWS}"
        )
    if summary.num_dropped or summary.num_truncated:
        logger.warning(
            f"over-long rows: {summary.num_dropped} dropped, {summary.num_truncated} cut by "
            f"{summary.num_cut_tokens} tokens, listed in {dataset.directory / OVER_LONG_ROWS}"
        )
    if summary.unread_keys:
        logger.warning(f"nothing reads these keys of messages: {_counted(summary.unread_keys)}")


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"'{name}' {count}" for name, count in counts.items())


def _turns(train: Samples) -> str:
    """Return what became of the turns of conversations."""
    num_conversations, num_apart = train.total("num_conversations"), train.total("num_apart")
    if not num_conversations:
        return ""
    text = f"turns apart in {num_apart} of {num_conversations} conversations (data.turns); "
    if num_turns := train.total("num_unlike_prompt"):
        text += f"{num_turns} turns are not rendered as their generation prompt begins; "
    if num_turns := train.total("num_without_reasoning"):
        text += f"the template leaves out the reasoning of {num_turns} assistant turns; "
    return text


def source_facts(train: Samples, schedule: Schedule, *, total_steps: int) -> dict[str, float]:
    """Return metrics of each source, where there are several."""
    if len(train.sources) == 1:
        return {}
    return {
        f"data/{fact}_by/{name}": value
        for name, facts in _facts(train, schedule, total_steps).items()
        for fact, value in facts.items()
    }


def _facts(train: Samples, schedule: Schedule, total_steps: int) -> dict[str, dict[str, float]]:
    """Return numbers of each source by its name."""
    found: dict[str, dict[str, float]] = {}
    for source, times in zip(train.sources, schedule.times_until(total_steps), strict=True):
        share, (num_tokens, num_labels) = source.share, source.num_tokens
        found[source.name] = {
            "rows": share.num_rows,
            "tokens": num_tokens,
            "valid_token_frac": num_labels / max(1, num_tokens),
            "repeat": share.num_samples / max(1, share.num_rows),
            "times": times,
        }
    return found
