"""How long and how many passages `HopeCache.recall` returns, and how a chat reads them: the table behind the defaults.

    python benchmarks/passages.py MODEL --text novel.txt [--sizes 64x2 96x1 ...] [--chat 64x2 ...] [--seed 42]

MODEL is a HOPE with a chat template. The text states the facts of `hope-hf eval --suite recall`. A size is tokens x
pieces. A row says how many passages hold the fact, how many answers are right (likelier than those of three other
facts; chance 25 %) and spelled by greedy decoding, and the tokens read again. `--chat` asks every second fact as a
user does, in several forms, and counts the answers of 40 tokens that name the right one.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
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
# How a chat reads passages before a message.
CHAT_FORMS = {
    "passage, message": "{passages}\n\n{message}",
    "From the text that you have read: passage, message": (
        "From the text that you have read:\n\n{passages}\n\n{message}"
    ),
    'Passage: "...", Question: message': 'Passage:\n"{passages}"\n\nQuestion: {message}',
    "passage, Answer from this passage: message": "{passages}\n\nAnswer from this passage: {message}",
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
        passages = self.cache.recall(question, self.tokenizer, tokens, pieces)
        return join_passages(passages).strip()


@torch.no_grad()
def read(name: str, text_file: str, seed: int) -> Reader:
    """Load a model and let it read a text."""
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name).eval()
    novel = Path(text_file).read_text(encoding="utf-8")
    text = text_with_facts(tokenizer, novel, LENGTH, seed)
    cache = HopeCache(model.config)
    tokens = torch.tensor([text.ids])
    for piece in tokens.split(512, dim=1):
        model(piece, cache=cache, logits_to_keep=1)
    return Reader(model, tokenizer, cache, text)


def scored(reader: Reader, size: str) -> Iterator[dict]:
    """The row of the first table."""
    row = {"size": size}
    for form in FORMS:
        right = []
        spelled = []
        found = []
        lengths = []
        for facts in reader.text.facts_by_kind():
            prompts = []
            for fact in facts:
                question = getattr(fact, form)
                passages = reader.passages(question, size)
                is_found = any(statement in passages for statement in fact.statements)
                found.append(is_found)
                encoded = reader.tokenizer(passages, add_special_tokens=False)
                tokens = encoded.input_ids
                lengths.append(len(tokens))
                prompt = FORMS[form](fact)
                if passages:
                    prompt = f"\n\n{passages}{prompt}"
                prompts.append(prompt)
            answers = [fact.answer for fact in facts]
            measured = answers_of(reader.model, reader.tokenizer, reader.cache, prompts, answers)
            right += measured.right().tolist()
            spelled += measured.greedy.tolist()
        row[f"{form}: found, %"] = percent(found)
        row[f"{form}: right, %"] = percent(right)
        row[f"{form}: spelled, %"] = percent(spelled)
        row["tokens"] = round(fmean(lengths))
    yield row


def chatted(reader: Reader, size: str) -> Iterator[dict]:
    """Rows of the second table."""
    forms = CHAT_FORMS if size != "none" else {"message": "{message}"}
    for name, form in forms.items():
        named = []
        for fact in reader.text.facts[::2]:
            passages = reader.passages(fact.question, size)
            message = form.format(passages=passages, message=fact.question)
            words = answer(reader, message)
            is_named = fact.answer.lower() in words.lower()
            named.append(is_named)
        yield {
            "size": size,
            "form": name,
            "answers that name it, %": percent(named),
        }


def answer(reader: Reader, message: str) -> str:
    """The answer to a message, after which the cache is as before."""
    tokenizer = reader.tokenizer
    messages = [{"role": "user", "content": message}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    encoded = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")
    ids = encoded.input_ids
    before = reader.cache.snapshot()
    tokens = reader.model.generate(ids, cache=reader.cache, max_new_tokens=NEW_TOKENS, do_sample=False)
    reader.cache.rollback(before)
    new_tokens = tokens[0, ids.shape[1] :]
    return tokenizer.decode(new_tokens, skip_special_tokens=True)


def percent(values: list[bool]) -> int:
    """The share of true values."""
    share = 100 * sum(values) / len(values)
    return round(share)


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
    tables = []
    for measure, sizes in ((scored, args.sizes), (chatted, args.chat)):
        rows = []
        for size in sizes:
            for row in measure(reader, size):
                print(row, file=sys.stderr, flush=True)
                rows.append(row)
        if rows:
            tables.append(markdown_table(rows))
    for table in tables:
        print(table)
        print()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
