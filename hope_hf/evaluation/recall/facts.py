"""Texts with made-up facts between their paragraphs, and what is asked about them."""

import random
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, product

from transformers import PreTrainedTokenizerBase

from hope_hf.data import plain_ids

from .kinds import FACTS_OF_A_KIND, KINDS, Kind

# Of names: no word of English, and none of another name.
_FIRST = "Bra Cor Dun Esk Fal Gar Hal Ilm Jor Kel Lam Mor Nar Os Pol Qua".split()
_LAST = "beck combe dry fell gost holt mire nock quist rane stow thwin vast wick".split()


@dataclass(frozen=True)
class Fact:
    """A made-up fact, and how it is asked for.

    Facts of one kind have the same `kind`, the index in `KINDS`; the answers of the others are its wrong answers.
    """

    kind: int
    answer: str
    # the ways in which the text states it
    statements: tuple[str, ...]
    # the first statement up to its answer
    cloze: str
    question: str
    # the question in words that the text does not use for the fact
    paraphrase: str


@dataclass(frozen=True)
class TextWithFacts:
    """Tokens of a text, and the facts that it states.

    `stops`: of each fact, the index of the token behind the last statement of it.
    """

    ids: list[int]
    facts: list[Fact]
    stops: list[int]

    def facts_by_kind(self) -> list[list[Fact]]:
        """The facts of each kind, whose answers are each other's wrong ones."""
        kinds = defaultdict(list)
        for fact in self.facts:
            kinds[fact.kind].append(fact)
        return list(kinds.values())


def make_facts(seed: int) -> list[Fact]:
    """Four facts of every kind: two that are stated once, and two in three wordings."""
    draw = random.Random(seed)
    names = list(map("".join, product(_FIRST, _LAST)))
    draw.shuffle(names)
    facts = []
    for index, kind in enumerate(KINDS):
        names_of_kind = names[:FACTS_OF_A_KIND]
        names = names[FACTS_OF_A_KIND:]
        # in the text, and in the paraphrase
        subjects = list(kind.descriptions or zip(names_of_kind, names_of_kind, strict=True))
        answers = list(kind.answers)
        draw.shuffle(subjects)
        draw.shuffle(answers)
        wordings = cycle((3, 1))
        for subject, answer, count in zip(subjects, answers, wordings, strict=False):
            fact = _fact(index, kind, subject, answer, count)
            facts.append(fact)
    return facts


def _fact(index: int, kind: Kind, subject: tuple[str, str], answer: str, wordings: int) -> Fact:
    """A fact of the kind of that index, which the text states in so many wordings."""
    said, paraphrased = subject
    statements = tuple(_filled(wording, said, answer) for wording in kind.wordings[:wordings])
    cloze = statements[0].removesuffix(f" {answer}.")
    return Fact(
        kind=index,
        answer=answer,
        statements=statements,
        cloze=cloze,
        question=_filled(kind.question, said, answer),
        paraphrase=_filled(kind.paraphrase, paraphrased, answer),
    )


def _filled(wording: str, subject: str, answer: str) -> str:
    sentence = wording.format(s=subject, a=answer)
    capital = sentence[0].upper()
    return capital + sentence[1:]


def text_with_facts(
    tokenizer: PreTrainedTokenizerBase, text: str, length: int, seed: int, tail: int = 600
) -> TextWithFacts:
    """A text of `length` tokens, with facts between its paragraphs at even distances in an order that `seed` draws.

    Args:
        text: paragraphs with empty lines between them.
        tail: tokens at the end that state no fact.

    Raises:
        ValueError: the facts need more tokens, or the text has fewer.
    """
    facts = make_facts(seed)
    stated = []
    needed = tail
    for number, fact in enumerate(facts):
        for statement in fact.statements:
            statement_ids = plain_ids(tokenizer, f"\n\n{statement}")
            stated.append((number, statement_ids))
            needed += len(statement_ids)
    room = length - needed
    if room < 0:
        raise ValueError(f"the facts and what follows them need {needed:,} tokens, so give more than that")
    random.Random(seed).shuffle(stated)
    ids: list[int] = []
    stops = [0] * len(facts)
    paragraphs = _paragraphs(tokenizer, text)
    # tokens of the text itself that are in `ids`
    taken = 0
    for index, (number, statement_ids) in enumerate(stated):
        distance = room * index / len(stated)
        while taken < distance:
            paragraph = next(paragraphs)
            ids += paragraph
            taken += len(paragraph)
        ids += statement_ids
        stops[number] = len(ids)
    while len(ids) < length:
        ids += next(paragraphs)
    return TextWithFacts(ids[:length], facts, stops)


def _paragraphs(tokenizer: PreTrainedTokenizerBase, text: str) -> Iterator[list[int]]:
    for paragraph in re.split(r"\n\s*\n", text):
        words = " ".join(paragraph.split())
        if words:
            yield plain_ids(tokenizer, f"\n\n{words}")
    raise ValueError("the text is shorter: name a longer one, or lower --lengths")
