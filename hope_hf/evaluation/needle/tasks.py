"""Needles, haystack and question of each task. All but `passkey` are RULER's (Hsieh et al. 2024)."""

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

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
PASS_KEY = "The pass key is {key}. Remember it. {key} is the pass key. "
PASS_KEY_QUESTION = "What is the pass key? The pass key is"
PASS_KEY_DIGITS = 5

ADJECTIVES = (
    "ancient bitter brave bright broken calm careful cheap clean clever cold common curly dark deep dry dusty eager "
    "early empty fair faint fancy fierce flat fresh gentle giant grand happy heavy hollow honest hungry icy jolly "
    "large late lazy light lonely loud lucky mellow narrow noisy odd pale plain polite proud quick quiet rapid rare "
    "rough round rusty salty sharp shiny silent simple sleepy slow smooth soft solid sour steep sticky strange sweet "
    "tall tame thick thin tidy tiny tough vast warm weary wild wise young"
).split()
NOUNS = (
    "anchor apple arrow badge barrel basket beach bell bench bird blanket boat bottle branch bridge bucket button "
    "cabin candle canyon carpet castle chair cherry circle cloud coat coin comet cradle crown desert door drum eagle "
    "engine farm feather fence field flute forest fountain garden ginger glove hammer harbor hat hill horse island "
    "jacket kettle key ladder lake lamp lantern leaf lemon letter meadow mirror mountain needle ocean orange paddle "
    "paper pencil piano pillow planet pocket puzzle rabbit ribbon river rocket saddle sailor shell shovel spoon stone "
    "table tiger tower tunnel violin wagon wheel window"
).split()


def word(generator: Random) -> str:
    """A key such as `quiet-harbor`."""
    return f"{generator.choice(ADJECTIVES)}-{generator.choice(NOUNS)}"


def number(generator: Random, digits: int = 7) -> str:
    """A number of that many digits."""
    return str(generator.randrange(10 ** (digits - 1), 10**digits))


def uuid4(generator: Random) -> str:
    """A random UUID of 36 characters."""
    return str(uuid.UUID(int=generator.getrandbits(128), version=4))


def distinct(draw, count: int, generator: Random) -> list[str]:
    """`count` different values of `draw(generator)`."""
    values = {}
    while len(values) < count:
        values[draw(generator)] = None
    return list(values)


@dataclass(frozen=True)
class Wording:
    """The texts of one sample.

    needles: sentences in the order of the answer; those that are not asked for come last.
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
    haystack: a key of `samples.HAYSTACKS`.
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
    def title(self) -> str:
        """The title of its table."""
        return self.name

    def chance_generated(self, chance: float) -> float:
        """The expected score of a guessed answer; `chance` is that of uniformly drawn tokens."""
        return chance

    @property
    def needles(self) -> int:
        """Number of hidden sentences."""
        return self.keys * self.values

    @property
    def answers(self) -> int:
        """Number of expected strings."""
        return self.queries * self.values

    def word(self, generator: Random) -> Wording:
        """Draw one sample's keys and values."""
        keys = distinct(word, self.keys, generator)
        values = distinct(self.draw, self.needles, generator)
        needles = []
        for index, value in enumerate(values):
            key = keys[index // self.values]
            needles.append(NEEDLE.format(kind=self.kind, key=key, value=value))
        if self.answers == 1:
            before, question = BEFORE_ONE, QUESTION_ONE
        else:
            before, question = BEFORE, QUESTION
        question = question.format(kind=self.kind, query=listed(keys[: self.queries]))
        return Wording(before.format(kind=self.kind), needles, question, values[: self.answers])

    def score(self, text: str, values: list[str]) -> float:
        """RULER's score of an answer: the share of the expected strings that it contains, ignoring case."""
        return sum(value.lower() in text.lower() for value in values) / len(values)


class PassKey(NeedleTask):
    """A number is hidden in filler text that is cut at any token. The answer must begin with the number."""

    title = "Passkey"

    def chance_generated(self, chance: float) -> float:
        """One of all numbers of that many digits."""
        return 1 / (9 * 10 ** (PASS_KEY_DIGITS - 1))

    def word(self, generator: Random) -> Wording:
        """Draw one sample's number."""
        key = number(generator, PASS_KEY_DIGITS)
        return Wording("", [PASS_KEY.format(key=key)], PASS_KEY_QUESTION, [key])

    def score(self, text: str, values: list[str]) -> float:
        """1 for an answer that begins with the number, else 0."""
        return float(text.strip().startswith(values[0]))


RULER = {
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
TASKS = {**RULER, "passkey": PassKey("passkey", "filler")}


def listed(words: list[str]) -> str:
    """`a`, or `a, b, and c`."""
    *first, last = words
    return f"{', '.join(first)}, and {last}" if first else last
