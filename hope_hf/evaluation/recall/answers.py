"""How likely a model finds the answers of facts, after it has read a text."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hope_hf import HopeCache
from hope_hf.data import plain_ids

from .facts import Fact

# What is read before an answer, by the form of asking.
FORMS: dict[str, Callable[[Fact], str]] = {
    "cloze": lambda fact: f"\n\n{fact.cloze}",
    "question": lambda fact: f"\n\nQuestion: {fact.question}\nAnswer: The answer is",
    "paraphrase": lambda fact: f"\n\nQuestion: {fact.paraphrase}\nAnswer: The answer is",
}


@dataclass(frozen=True)
class Answers:
    """Log-probabilities of the answers of a kind of facts.

    log_probs: [N facts, N answers] in nats; the answer of fact i is answer i.
    greedy: [N], whether the likeliest tokens spell a fact's own answer.
    """

    log_probs: Tensor
    greedy: Tensor

    def right(self) -> Tensor:
        """Whether its own answer is likelier than those of the other facts [N]; chance is 1 / N."""
        return self.log_probs.argmax(1) == torch.arange(len(self.log_probs))

    def ties(self) -> Tensor:
        """How much likelier an answer is at its own question than at those of the other facts [N], in nats.

        A text makes the names that it holds likelier at every question, so a higher probability of the right answer
        does not show that it is tied to its subject.
        """
        count = len(self.log_probs)
        own = self.log_probs.diagonal()
        others = (self.log_probs.sum(0) - own) / (count - 1)
        return own - others


@torch.no_grad()
def answers_of(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    cache: HopeCache,
    prompts: list[str],
    answers: list[str],
) -> Answers:
    """The answers of N facts of a kind, each at each of their prompts, after what the cache has read; it stays."""
    ids_of_answers = [plain_ids(tokenizer, f" {answer}") for answer in answers]
    rows = []
    greedy = []
    for index, prompt in enumerate(prompts):
        prompt_ids = plain_ids(tokenizer, prompt)
        log_probs, spelled = _scored(model, cache, prompt_ids, ids_of_answers)
        rows.append(log_probs)
        greedy.append(spelled[index])
    return Answers(torch.stack(rows), torch.stack(greedy))


def _scored(
    model: PreTrainedModel, cache: HopeCache, prompt_ids: list[int], answers: list[list[int]]
) -> tuple[Tensor, Tensor]:
    """Log-probability [N] of each answer after a prompt, and whether its tokens are the likeliest [N]."""
    before = cache.snapshot()
    device = model.device
    logits = model(torch.tensor([prompt_ids], device=device), cache=cache, logits_to_keep=1).logits[:, -1:]
    after_prompt = cache.snapshot()
    log_probs = []
    spelled = []
    for ids in answers:
        targets = torch.tensor([ids], device=device)
        all_logits = logits
        if len(ids) > 1:
            cache.rollback(after_prompt)
            later = model(targets[:, :-1], cache=cache).logits
            all_logits = torch.cat([logits, later], dim=1)
        scores = all_logits.float().log_softmax(-1)
        of_targets = scores.gather(-1, targets.unsqueeze(-1))
        log_probs.append(of_targets.sum().cpu())
        spelled.append((all_logits.argmax(-1) == targets).all().cpu())
    cache.rollback(before)
    return torch.stack(log_probs), torch.stack(spelled)
