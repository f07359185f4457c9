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
        likeliest = self.log_probs.argmax(1)
        right = torch.arange(len(likeliest))
        return likeliest == right

    def ties(self) -> Tensor:
        """How much likelier an answer is at its own question than at those of the other facts [N], in nats.

        A text makes the names that it holds likelier at every question, so a higher probability of the right answer
        does not show that it is tied to its subject.
        """
        right = self.log_probs.diagonal()
        others = self.log_probs.sum(0) - right
        mean_of_others = others / (len(right) - 1)
        return right - mean_of_others


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
    for prompt in prompts:
        prompt_ids = plain_ids(tokenizer, prompt)
        log_probs, spelled = _scored(model, cache, prompt_ids, ids_of_answers)
        rows.append(log_probs)
        greedy.append(spelled)
    # each fact's answer at its own prompt
    own = torch.stack(greedy).diagonal()
    return Answers(torch.stack(rows), own)


def _scored(
    model: PreTrainedModel, cache: HopeCache, prompt_ids: list[int], answers: list[list[int]]
) -> tuple[Tensor, Tensor]:
    """Log-probability [N] of each answer after a prompt, and whether its tokens are the likeliest [N]."""
    before = cache.snapshot()
    prompt = torch.tensor([prompt_ids], device=model.device)
    output = model(prompt, cache=cache, logits_to_keep=1)
    first = output.logits[:, -1:]
    after_prompt = cache.snapshot()
    log_probs = []
    spelled = []
    for ids in answers:
        targets = prompt.new_tensor([ids])
        logits = first
        if len(ids) > 1:
            cache.rollback(after_prompt)
            output = model(targets[:, :-1], cache=cache)
            logits = torch.cat([first, output.logits], dim=1)
        scores = logits.float().log_softmax(-1)
        columns = targets.unsqueeze(-1)
        of_targets = scores.gather(-1, columns)
        is_likeliest = logits.argmax(-1) == targets
        log_probs.append(of_targets.sum())
        spelled.append(is_likeliest.all())
    cache.rollback(before)
    return torch.stack(log_probs).cpu(), torch.stack(spelled).cpu()
