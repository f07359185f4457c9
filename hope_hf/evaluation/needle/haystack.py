"""The text around the needles: sentences as tokens, cut to an exact number of them."""

import re
import textwrap
from bisect import bisect_left
from itertools import accumulate, pairwise

from ..arguments import Arguments
from ..held_out import held_out_documents
from ..subject import Subject

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
# A text without sentences, such as code, is cut at words into pieces of at most so many characters.
LONGEST_SENTENCE = 400
# Characters of a token: enough of a long text is read for every length.
CHARACTERS = 16


class Haystack:
    """Sentences as lists of tokens, each with the separator before it."""

    def __init__(self, sentences: list[list[int]], source: str):
        """`source` is for the message of a text that is too short."""
        self._sentences, self._source = sentences, source
        self._ends = list(accumulate(map(len, sentences)))

    def around(self, needles: list[list[int]], depths: list[float], room: int) -> list[int]:
        """`room` tokens of the text with the needles before the sentences that begin nearest to their depths.

        `depths` are from 0 (before the first sentence) to 1 (after the last). Raises ValueError where the text has
        fewer tokens.
        """
        tokens = [token for sentence in self._sentences[: bisect_left(self._ends, room) + 1] for token in sentence]
        if len(tokens) < room:
            raise ValueError(
                f"--lengths asks for {room:,} tokens around the needles, and the text ({self._source}) has "
                f"{len(tokens):,}: lower it or give a longer text with --validation_file."
            )
        begins = [0, *(end for end in self._ends if end < room), room]
        places = [min(begins, key=lambda begin, depth=depth: abs(begin - depth * room)) for depth in depths]
        hidden = sorted(zip(places, needles, strict=True), key=lambda pair: pair[0])
        cuts = pairwise([0, *(place for place, _ in hidden), room])
        woven = []
        for (start, end), needle in zip(cuts, [*(needle for _, needle in hidden), []], strict=True):
            woven += tokens[start:end] + needle
        return woven


def noise(subject: Subject, longest: int) -> Haystack:
    """Five short sentences again and again, for texts of up to `longest` tokens."""
    sentence = subject.encode(f"\n{NOISE}")
    return Haystack([sentence] * (longest // len(sentence) + 1), "the noise")


def text(args: Arguments, subject: Subject, longest: int) -> Haystack:
    """The held-out documents, or `--validation_file`, one after another with their white space as single spaces."""
    held = held_out_documents(args)
    found, characters = [], 0
    for sentence in _sentences(held.texts):
        found.append(sentence)
        characters += len(sentence)
        if characters > CHARACTERS * longest:
            break
    return Haystack([subject.encode(f" {sentence}") for sentence in found], held.source)


def _sentences(documents: list[str]):
    for document in documents:
        for sentence in re.split(r"(?<=[.!?])\s+", " ".join(document.split())):
            yield from textwrap.wrap(sentence, LONGEST_SENTENCE)
