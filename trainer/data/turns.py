"""What of a conversation becomes one sample: all of it, or each turn as inference sees it."""

from collections import Counter
from dataclasses import dataclass
from functools import partial

from transformers import PreTrainedTokenizerBase

from trainer.data.conversation import Message
from trainer.data.rows import UnusableError
from trainer.data.spans import FIX, Renderings, SpanFinder
from trainer.data.tokens import MarkedText

TOGETHER, APART, AUTO = "together", "apart", "auto"


@dataclass(frozen=True)
class Part:
    """One sample of a conversation: the messages it renders, and the turns among them that are
    supervised.
    """

    messages: list[Message]
    turns: list[int]
    marked: MarkedText


class TurnDivider:
    """Divides conversations into samples."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, mode: str, counts: Counter[str]) -> None:
        """`mode`: the whole conversation is one sample (`together`), each supervised turn is one
        (`apart`), or apart only where the whole shows some turn otherwise than inference does
        (`auto`). `counts`: what it counts in.
        """
        self._mode, self._spans, self._counts = mode, SpanFinder(tokenizer), counts

    def divide(self, renderings: Renderings, trained: list[int]) -> list[Part]:
        """The samples that supervise these turns. Raises `UnusableError`."""
        self._counts["num_conversations"] += 1
        if not trained:
            return [Part(renderings.messages, [], MarkedText(renderings.text, []))]
        if self._mode == TOGETHER:
            return [self._together(renderings, trained)]
        together: Part | None = None
        problem: UnusableError | None = None
        if self._mode == AUTO:
            renderings.text  # noqa: B018  what the template refuses as a whole is refused
            try:
                together = self._together(renderings, trained)
                if self._is_as_served(renderings, together):
                    return [together]
            except UnusableError as error:
                problem = error
        served = [(index, self._spans.served(renderings, index)) for index in trained]
        parts = [
            Part(renderings.messages[: i + 1], [i], marked)
            for i, marked in served
            if marked is not None
        ]
        if len(parts) == len(trained):
            self._counts["num_apart"] += 1
            return parts
        if together is None:
            place = next(index for index, marked in served if marked is None) + 1
            raise problem or UnusableError(
                f"chat template: message {place} (assistant) is not rendered as its generation "
                f"prompt begins; change data.apply_chat_template_kwargs or data.chat_template, or "
                f"set data.turns=together"
            )
        self._counts["num_unlike_prompt"] += len(trained) - len(parts)
        return [together]

    def _together(self, renderings: Renderings, trained: list[int]) -> Part:
        marked, turns = self._spans.together(renderings), renderings.turns
        if trained != turns:
            if len(marked.spans) != len(turns):
                raise UnusableError(
                    f"chat template: its generation tags mark {len(marked.spans)} parts of "
                    f"{len(turns)} assistant turns, so the flags of this row cannot be followed; "
                    f"{FIX}"
                )
            spans = [
                span for index, span in zip(turns, marked.spans, strict=True) if index in trained
            ]
            marked = MarkedText(marked.text, spans)
        return Part(renderings.messages, trained, marked)

    def _is_as_served(self, renderings: Renderings, part: Part) -> bool:
        spans = part.marked.spans
        return len(spans) == len(part.turns) and all(
            map(partial(self._spans.is_as_served, renderings), part.turns, spans)
        )
