"""What `auto` stands for: the fastest settings that fit, chosen once, before a rank starts (floor 5).

python -m trainer.planner.choose N M [key=value ...]   prints the words to append; N: ranks on all machines together, M
here
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import ceil

from trainer.checkpoint.choice import candidates_of, contents_of
from trainer.config import MAX_TOKENS, OFFLOAD, RECOMPUTE, SELECTIVE, Config, ConfigError
from trainer.errors import EXIT_USAGE
from trainer.planner.forecast import Change, Forecast, default_memory_gib, forecaster
from trainer.planner.roofline import CARDS, DEFAULT_CARD, Card, local_card, predict
from trainer.run.compose import load_config, with_words
from trainer.runtime.distributed import pick_device, require_divided
from trainer.runtime.environment import call

MARGIN = 0.95
"""Of the memory may be filled: what lies outside of the step is estimated."""
MAX_AUTO_TOKENS = 2**15
"""Of a rank's micro-batch. What there is to do once for each, and each gather, is hidden behind fewer long before."""


@dataclass(frozen=True)
class Candidate:
    """Settings that were planned. `tokens_per_s`: of a data rank, predicted; 0 where no rates are known (CPU)."""

    how: str
    change: Change
    forecast: Forecast
    tokens_per_s: float

    @property
    def fits(self) -> bool:
        return self.forecast.needed_gib <= MARGIN * self.forecast.memory_gib


def automatic(config: Config, num_ranks: int, *, num_here: int) -> list[str]:
    """The words to append to a command: those of the checkpoint it goes on from, else the fastest that fit here,
    where so many of the ranks are.

    Says on stderr what it does. Raises `ConfigError` where nothing fits.
    """
    if found := recorded(config, num_ranks):
        words, place = found
        print(f"auto: {' '.join(words)}, as {place} was trained", file=sys.stderr, flush=True)
        return words
    if pick_device(config.trainer.device).type == "cpu":
        config = with_words(config, ["trainer.device=cpu"])
    card = None if config.trainer.device == "cpu" else local_card() or CARDS[DEFAULT_CARD]
    memory_gib = default_memory_gib(config, num_here)
    tried = search(config, num_ranks, card, forecaster(config, memory_gib))
    taken = best(tried)
    print("\n".join(candidate_lines(tried, card)), file=sys.stderr, flush=True)
    if not taken.fits:
        nearest = " ".join(taken.change.overrides)
        raise ConfigError(
            f"nothing fits {MARGIN:.0%} of {memory_gib:.1f} GiB; the nearest, {nearest}, takes "
            f"{taken.forecast.needed_gib:.1f} GiB: `{call(f'plan {num_ranks} …')}` names what else to change"
        )
    return list(taken.change.overrides)


def recorded(config: Config, num_ranks: int) -> tuple[list[str], str] | None:
    """The words that a checkpoint was trained with, and its name; None where nothing goes on, or on other ranks.

    Another number of ranks has another share of the memory, and rounds differently anyway.
    """
    found = candidates_of(config.trainer).chosen
    if found is None or found.manifest is None or "extra" not in contents_of(config.trainer, found):
        return None
    saved = found.manifest.fingerprints
    if found.manifest.world_size != num_ranks or not saved.keys() >= set(config.automatic):
        return None
    return [f"{key}={saved[key].lower().replace('none', 'null')}" for key in config.automatic], found.path.name


def search(
    config: Config, num_ranks: int, card: Card | None, forecast: Callable[[Change], Forecast]
) -> list[Candidate]:
    """Longer micro-batches while they fit, then the next stronger recomputation, which is planned only for longer ones
    still: with those that fit it is slower. So there are no more plans than lengths and kinds together.
    """
    kinds, lengths, tried = _kinds(config), _lengths(config, num_ranks), list[Candidate]()
    while kinds and lengths:
        words = {RECOMPUTE: kinds[0], MAX_TOKENS: str(lengths[0])}
        change = Change(num_ranks, tuple(f"{key}={words[key]}" for key in config.automatic))
        found = _candidate(kinds[0], change, forecast(change), card)
        if tried and tried[-1].fits and found.forecast.plan.workload == tried[-1].forecast.plan.workload:
            break  # one document a micro-batch, whatever its limit
        tried.append(found)
        (lengths if found.fits else kinds).pop(0)
    return tried


def best(tried: list[Candidate]) -> Candidate:
    """The fastest that fits; without rates that with the least recomputation, then the longest. Else the smallest."""
    fitting = [candidate for candidate in tried if candidate.fits]
    if not fitting:
        return min(tried, key=lambda candidate: candidate.forecast.needed_gib)
    kinds = [candidate.how for candidate in fitting]  # from the least to the most, longer ones behind shorter ones
    order = {id(candidate): (-kinds.index(candidate.how), number) for number, candidate in enumerate(fitting)}
    return max(fitting, key=lambda candidate: (candidate.tokens_per_s, order[id(candidate)]))


def candidate_lines(tried: list[Candidate], card: Card | None) -> Iterator[str]:
    """A table; what is not in it computes more again than what fits, with no longer micro-batches."""
    taken, memory_gib = best(tried), tried[0].forecast.memory_gib
    how = "the least recomputation, then the longest" if card is None else f"the fastest at the rates of {card.name}"
    yield f"auto: of what takes at most {MARGIN:.0%} of {memory_gib:.1f} GiB {how}"
    for candidate in tried:
        speed = f"{candidate.tokens_per_s:9,.0f} tokens/s" if candidate.tokens_per_s else ""
        said = speed if candidate.fits else "does not fit"
        mark = " <- taken" if candidate is taken and candidate.fits else ""
        yield f"{candidate.forecast.needed_gib:8.1f} GiB {said:18}  {' '.join(candidate.change.overrides)}{mark}"


def _candidate(how: str, change: Change, forecast: Forecast, card: Card | None) -> Candidate:
    load, tokens_per_s = forecast.plan.workload, 0.0
    if card is not None:
        step_s = predict(forecast.plan.operations, card, num_micro_batches=load.num_micro_batches).step_s
        tokens_per_s = load.num_tokens * load.num_micro_batches / step_s
    return Candidate(how, change, forecast, tokens_per_s)


def _kinds(config: Config) -> list[str]:
    """Of recomputation, from the least to the most."""
    if RECOMPUTE not in config.automatic:
        return [""]
    all_kinds = ["false", SELECTIVE, "true", OFFLOAD]
    left_out = set() if config.trainer.device != "cpu" else {OFFLOAD, SELECTIVE} if config.model.compile else {OFFLOAD}
    return [how for how in all_kinds if how not in left_out]


def _lengths(config: Config, num_ranks: int) -> list[int]:
    """Of a rank's micro-batch, in whole documents up to its share of the batch."""
    if MAX_TOKENS not in config.automatic:
        return [0]
    data, sharing = config.data, config.model.ulysses_sequence_parallel_size
    require_divided(num_ranks, sharing)
    share = min(ceil(data.train_batch_size * sharing / num_ranks), data.micro_batch_size_per_gpu or sys.maxsize)
    most = max(1, min(share, MAX_AUTO_TOKENS * sharing // data.max_length))
    documents = [*(2**n for n in range((most - 1).bit_length())), most]
    return [ceil(number * data.max_length / sharing) for number in documents]


def main(argv: list[str]) -> int:
    try:
        words = automatic(load_config(argv[2:]), int(argv[0]), num_here=int(argv[1]))
    except ConfigError as error:
        print(f"ERROR: {error}", file=sys.stderr)
        return EXIT_USAGE
    print("\n".join(words))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
