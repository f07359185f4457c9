"""Texts that state made-up facts, and what is asked about them afterwards."""

import random
import re
from typing import NamedTuple

from torch import Tensor, tensor
from transformers import PreTrainedTokenizerBase

from hope_hf.data import plain_ids

from .kinds import KINDS, SYLLABLES, Kind

# tokens at the end of a text that state no fact, and at most this share of the text
TAIL, LARGEST_TAIL = 600, 0.25
# facts that a text of so many tokens may state
FACT_COUNTS, TOKENS_OF_COUNTS = (10, 20, 30, 40, 50), 4096
# in how many wordings a fact may be stated
WORDING_COUNTS = (1, 1, 2, 3)
# paragraphs in order, between two random places of the text
PASSAGE = 20


class AskedText(NamedTuple):
    """A text [1, T], and for each fact of it the tokens of a question with its answer, without the last one."""

    ids: Tensor
    questions: list[list[int]]


class AskedTexts:
    """Paragraphs of a text in order, with made-up facts between them at even distances."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, text: str, length: int, seed: int):
        self.tokenizer = tokenizer
        self.length = length
        self.draw = random.Random(seed)
        self.paragraphs = paragraphs_of(text)

    def make(self) -> AskedText:
        """The next text."""
        statements = []
        questions = []
        count = self.draw.choice(FACT_COUNTS) * self.length // TOKENS_OF_COUNTS
        for _ in range(max(1, count)):
            kind = self.draw.choice(KINDS)
            subject = self._name()
            answer = self.draw.choice(kind.answers)
            wordings = self.draw.choice(WORDING_COUNTS)
            for wording in kind.wordings[:wordings]:
                statement = wording.format(s=subject, a=answer)
                statements.append(self._ids(statement))
            questions.append(self._question(kind, subject, answer))
        self.draw.shuffle(statements)
        ids = self._between_prose(statements)
        return AskedText(tensor([ids]), questions)

    def _between_prose(self, statements: list[list[int]]) -> list[int]:
        """`length` tokens: prose with the statements at even distances, but for the tail."""
        of_facts = sum(map(len, statements))
        tail = min(TAIL, int(self.length * LARGEST_TAIL))
        prose = max(0, self.length - tail - of_facts)
        gap = prose // (len(statements) + 1)
        ids = []
        for statement in statements:
            ids += self._prose(gap)
            ids += statement
        missing = max(0, self.length - len(ids))
        ids += self._prose(missing)
        return ids[: self.length]

    def _question(self, kind: Kind, subject: str, answer: str) -> list[int]:
        """A cloze of the first wording, or the question in one of two forms, and the answer without its last token."""
        cloze, _, _ = kind.wordings[0].partition(" {a}")
        question = kind.question.format(s=subject)
        prompts = {
            cloze.format(s=subject): 0.6,
            f"Question: {question}\nAnswer: The answer is": 0.25,
            f"{question} It was": 0.15,
        }
        (prompt,) = self.draw.choices(list(prompts), weights=prompts.values())
        answer_ids = plain_ids(self.tokenizer, f" {answer}")
        return self._ids(prompt) + answer_ids[:-1]

    def _name(self) -> str:
        syllables = self.draw.choices(SYLLABLES, k=self.draw.choice((2, 3)))
        return "".join(syllables).capitalize()

    def _prose(self, count: int) -> list[int]:
        """So many tokens of paragraphs that follow each other, from a random one on."""
        ids = []
        while len(ids) < count:
            first = self.draw.randrange(len(self.paragraphs))
            for paragraph in self.paragraphs[first : first + PASSAGE]:
                ids += self._ids(paragraph)
        return ids[:count]

    def _ids(self, text: str) -> list[int]:
        capital = text[0].upper()
        return plain_ids(self.tokenizer, f"\n\n{capital}{text[1:]}")


def paragraphs_of(text: str) -> list[str]:
    """The paragraphs of a text, each on one line."""
    paragraphs = []
    for paragraph in re.split(r"\n\s*\n", text):
        words = paragraph.split()
        if words:
            paragraphs.append(" ".join(words))
    return paragraphs
