"""Does a model whose layers retain tokens answer what its window has passed? Results: docs/log/linearise.md.

It measures a folder that `hope-hf retain` wrote, with its tokens or with controls: random tokens, or as many for each
head.
"""

import argparse
import copy
from pathlib import Path

import torch
from linearise import measure, report
from torch import Tensor, nn
from transformers import AutoTokenizer

from hope_hf import HopeForCausalLM
from hope_hf.evaluation.recall.answers import FORMS
from hope_hf.evaluation.recall.facts import text_with_facts


class RandomScores(nn.Module):
    """The control: scores that know nothing of a token."""

    def __init__(self, heads: int):
        super().__init__()
        self.heads = heads

    def forward(self, hidden_states: Tensor) -> Tensor:
        rows, length, _ = hidden_states.shape
        return torch.rand(rows, length, self.heads)


def with_equal_counts(model: HopeForCausalLM) -> HopeForCausalLM:
    """The model whose heads all retain as many tokens, the mean of before."""
    config = copy.deepcopy(model.config)
    counts = torch.tensor(config.retained_tokens)
    mean = round(counts.float().mean().item())
    config.retained_tokens = torch.full_like(counts, mean).tolist()
    return HopeForCausalLM.from_pretrained(None, config=config, state_dict=model.state_dict())


def parse(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder that `hope-hf retain` wrote, or another HOPE to compare with")
    parser.add_argument("--novel", required=True, help="its last half holds the test's facts")
    parser.add_argument("--form", choices=tuple(FORMS), default="cloze", help="of asking")
    parser.add_argument("--seed", type=int, default=0, help="of random tokens")
    parser.add_argument("--test_seeds", type=int, nargs="+", default=[42, 43])
    parser.add_argument("--test_length", type=int, default=4096, help="tokens of a test's text")
    parser.add_argument("--random", action="store_true", help="each head retains as many tokens, but random ones")
    parser.add_argument("--alike", action="store_true", help="each head retains the same number of tokens")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> None:
    args = parse(words)
    torch.manual_seed(args.seed)
    model = HopeForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    if args.alike:
        model = with_equal_counts(model)
    if args.random:
        for block in model.model.layers:
            if hasattr(block.mixer, "scores"):
                block.mixer.scores = RandomScores(model.config.num_key_value_heads)
    novel = Path(args.novel).read_text(encoding="utf-8")
    last_half = novel[len(novel) // 2 :]
    texts = [text_with_facts(tokenizer, last_half, args.test_length, seed) for seed in args.test_seeds]
    with torch.no_grad():
        row = measure(model.eval(), tokenizer, texts, args.form)
    report("retain", row)


if __name__ == "__main__":
    main()
