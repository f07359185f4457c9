"""How long and how many passages `HopeCache.recall` returns, and how a chat reads them: the table behind the defaults.

    python benchmarks/passages.py MODEL --text novel.txt [--sizes 64x2 96x1 ...] [--chat 64x2 ...] [--seed 42]

MODEL is a HOPE with a chat template. The text states the facts of `hope-hf eval --suite recall`. A size is tokens x
pieces. A row says how many passages hold the fact, how many answers are right (likelier than those of three other
facts; chance 25 %) and spelled by greedy decoding, and the tokens read again. `--chat` asks every second fact as a
user does, in several forms, and counts the answers of 40 tokens that name the right one.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hope_hf import HopeCache, join_passages
from hope_hf.common.results import markdown_table
from hope_hf.evaluation.recall.answers import FORMS, answers_of
from hope_hf.evaluation.recall.facts import TextWithFacts, text_with_facts

SIZES = ("48x1", "64x1", "96x1", "128x1", "48x2", "64x2", "96x2", "64x3")
LENGTH = 4096
NEW_TOKENS = 40
CHAT_FORMS: dict[str, Callable[[str, str], str]] = {
    "passage, message": lambda passages, message: f"{passages}\n\n{message}",
    "From the text that you have read: passage, message": lambda passages, message: (
        f"From the text that you have read:\n\n{passages}\n\n{message}"
    ),
    'Passage: "...", Question: message': lambda passages, message: f'Passage:\n"{passages}"\n\nQuestion: {message}',
    "passage, Answer from this passage: message": lambda passages, message: (
        f"{passages}\n\nAnswer from this passage: {message}"
    ),
}


class Reader(NamedTuple):
    """A model that has read a text with facts."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    cache: HopeCache
    text: TextWithFacts

    def passages(self, question: str, size: str) -> str:
        """The passages for a question, as they are read before it; none for the size "none"."""
        if size == "none":
            return ""
        tokens, pieces = map(int, size.split("x"))
        return join_passages(self.cache.recall(question, self.tokenizer, tokens=tokens, pieces=pieces)).strip()


@torch.no_grad()
def read(name: str, text_file: str, seed: int) -> Reader:
    """Load a model and let it read a text."""
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name).eval()
    text = text_with_facts(tokenizer, Path(text_file).read_text(encoding="utf-8"), LENGTH, seed)
    cache = HopeCache(model.config)
    for piece in torch.tensor([text.ids]).split(512, dim=1):
        model(piece, cache=cache, logits_to_keep=1)
    return Reader(model, tokenizer, cache, text)


def scored(reader: Reader, size: str) -> dict:
    """A row of the first table."""
    row = {"size": size}
    for form, prompt_of in FORMS.items():
        right, spelled, found, lengths = [], [], [], []
        for facts in reader.text.facts_by_kind():
            prompts = []
            for fact in facts:
                passages = reader.passages(getattr(fact, form), size)
                found.append(any(statement in passages for statement in fact.statements))
                lengths.append(len(reader.tokenizer(passages, add_special_tokens=False).input_ids))
                prompts.append(f"\n\n{passages}{prompt_of(fact)}" if passages else prompt_of(fact))
            answers = [fact.answer for fact in facts]
            measured = answers_of(reader.model, reader.tokenizer, reader.cache, prompts, answers)
            right += measured.right().tolist()
            spelled += measured.greedy.tolist()
        row[f"{form}: found, %"] = percent(found)
        row[f"{form}: right, %"] = percent(right)
        row[f"{form}: spelled, %"] = percent(spelled)
        row["tokens"] = round(sum(lengths) / len(lengths))
    return row


def chatted(reader: Reader, size: str) -> Iterator[dict]:
    """Rows of the second table."""
    forms = CHAT_FORMS if size != "none" else {"message": lambda passages, message: message}
    for name, form in forms.items():
        named = []
        for fact in reader.text.facts[::2]:
            message = form(reader.passages(fact.question, size), fact.question)
            named.append(fact.answer.lower() in answer(reader, message).lower())
        yield {"size": size, "form": name, "answers that name it, %": percent(named)}


def answer(reader: Reader, message: str) -> str:
    """The answer to a message, after which the cache is as before."""
    messages = [{"role": "user", "content": message}]
    prompt = reader.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = reader.tokenizer(prompt, add_special_tokens=False, return_tensors="pt").input_ids
    before = reader.cache.snapshot()
    tokens = reader.model.generate(ids, cache=reader.cache, max_new_tokens=NEW_TOKENS, do_sample=False)
    reader.cache.rollback(before)
    return reader.tokenizer.decode(tokens[0, ids.shape[1] :], skip_special_tokens=True)


def percent(values: list[bool]) -> int:
    """The share of true values."""
    return round(100 * sum(values) / len(values))


def main(argv: list[str]) -> int:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", required=True)
    parser.add_argument("--sizes", nargs="*", default=SIZES)
    parser.add_argument("--chat", nargs="*", default=("none", "64x1", "64x2", "96x1"))
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args(argv)
    reader = read(args.model, args.text, args.seed)
    rows = []
    for size in args.sizes:
        rows.append(scored(reader, size))
        print(rows[-1], file=sys.stderr, flush=True)
    answers = []
    for size in args.chat:
        for row in chatted(reader, size):
            answers.append(row)
            print(row, file=sys.stderr, flush=True)
    for table in filter(None, (rows, answers)):
        print(markdown_table(table))
        print()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
