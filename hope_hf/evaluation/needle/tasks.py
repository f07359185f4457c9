"""The tasks, as RULER defines them (Hsieh et al. 2024): needles, haystack and question of each."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from .words import distinct, number, uuid4, word

NEEDLE = "One of the special magic {kind}s for {key} is: {value}."
BEFORE = (
    "Some special magic {kind}s are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind}s afterwards."
)
QUESTION = (
    "\nWhat are all the special magic {kind}s for {query} mentioned in the provided text? "
    "The special magic {kind}s for {query} mentioned in the provided text are"
)
BEFORE_ONE = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards."
)
QUESTION_ONE = (
    "\nWhat is the special magic {kind} for {query} mentioned in the provided text? "
    "The special magic {kind} for {query} mentioned in the provided text is"
)


@dataclass(frozen=True)
class Wording:
    """The texts of one sample.

    needles: sentences in the order in which the answer names them; those that are not asked for come last.
    answers: the expected strings, in the order of the question.
    """

    before: str
    needles: list[str]
    question: str
    answers: list[str]


@dataclass(frozen=True)
class NeedleTask:
    """`keys` keys with `values` values each are hidden; all values of `queries` of the keys are asked for.

    name: as in `--tasks`.
    haystack: `noise`, five sentences again and again, or `text`.
    kind, draw: what a value is, and how one is drawn.
    """

    name: str
    haystack: str
    kind: str = "number"
    draw: Callable[[Random], str] = number
    keys: int = 1
    values: int = 1
    queries: int = 1

    @property
    def needles(self) -> int:
        """Sentences that are hidden."""
        return self.keys * self.values

    @property
    def answers(self) -> int:
        """Strings that are expected."""
        return self.queries * self.values

    def word(self, generator: Random) -> Wording:
        """Draw one sample's keys and values."""
        keys = distinct(word, self.keys, generator)
        values = distinct(self.draw, self.needles, generator)
        values_of = {key: values[i * self.values : (i + 1) * self.values] for i, key in enumerate(keys)}
        needles = [
            NEEDLE.format(kind=self.kind, key=key, value=value) for key in keys for value in values_of[key]
        ]
        one = self.answers == 1
        before, question = (BEFORE_ONE, QUESTION_ONE) if one else (BEFORE, QUESTION)
        query = listed(keys[: self.queries])
        answers = [value for key in keys[: self.queries] for value in values_of[key]]
        return Wording(before.format(kind=self.kind), needles, question.format(kind=self.kind, query=query), answers)


TASKS = {
    task.name: task
    for task in (
        NeedleTask("s-niah-1", "noise"),
        NeedleTask("s-niah-2", "text"),
        NeedleTask("s-niah-3", "text", "uuid", uuid4),
        NeedleTask("mk-niah-1", "text", keys=4),
        NeedleTask("mv-niah", "text", values=4),
        NeedleTask("mq-niah", "text", keys=4, queries=4),
    )
}


def listed(words: list[str]) -> str:
    """`a`, or `a, b, and c`."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])}, and {words[-1]}"
