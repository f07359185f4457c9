"""Classes learned from examples in the context: weights stay unchanged, and the model's state stores the classes.

The state is that of the mixers, and with `learn` also what levels learn from the examples.

No new head is needed: the chosen label is the one whose words are the likeliest after the sentence.
"""

import random
from collections import Counter
from contextlib import nullcontext
from itertools import chain

import torch
from torch import Tensor

from hope_hf import CACHE_NAME, frozen_memories

from ..display import progress
from ..streams import PIECE, batches_of_one_length, repeat_rows
from ..subject import Subject, require_finite
from .classes import ClassGroups, Example, Hits, first_of_each_class

SHOTS = 1


def learn_in_context(
    subject: Subject, groups: ClassGroups, shots: int, rows: int, seed: int, name: str, learn: bool = False
) -> tuple[list[Hits], dict[str, Hits]]:
    """The hits after reading `shots` examples of every class, group after group, and the controls' hits.

    Controls: `joint`, the same examples in a drawn order, and `frozen`: levels stay as trained if they learn, else
    memories stay at their initial state if there are any. Raises ValueError for a model with fewer positions than the
    examples need.
    """
    count = len(groups.names)
    examples = [_examples(groups, group, shots) for group in range(count)]
    all_examples = list(chain.from_iterable(examples))
    _require_room(subject, groups, all_examples)
    has_frozen = learn or subject.has_memory
    hits = []
    controls = {}
    with progress(None, name, count + 1 + has_frozen) as bar:
        cache = read(subject, [subject.start], learn=learn)
        for index, examples_of_group in enumerate(examples):
            cache = read(subject, _tokens(subject, groups, examples_of_group), cache, learn)
            hits.append(questions(subject, cache, groups, index + 1, rows))
            bar.update()
        shuffled = random.Random(f"joint {seed}").sample(all_examples, len(all_examples))
        cache = read(subject, [subject.start, *_tokens(subject, groups, shuffled)], learn=learn)
        controls["joint"] = questions(subject, cache, groups, count, rows)
        bar.update()
        if has_frozen:
            with nullcontext() if learn else frozen_memories(subject.model):
                cache = read(subject, [subject.start, *_tokens(subject, groups, all_examples)])
                controls["frozen"] = questions(subject, cache, groups, count, rows)
            bar.update()
    return hits, controls


def questions(subject: Subject, cache, groups: ClassGroups, seen: int, rows: int) -> Hits:
    """Which test examples of the first `seen` groups are right, among the classes of these groups."""
    last_label = groups.classes[seen - 1].stop
    candidates = [label_of(subject, label) for label in groups.labels[:last_label]]
    hits = []
    for examples in groups.test[:seen]:
        contexts = [context_of(subject, example) for example in examples]
        answers = choose(subject, cache, contexts, candidates, rows)
        hits_of_group = []
        for example, answer in zip(examples, answers, strict=True):
            hits_of_group.append(float(answer == example.label))
        hits.append(hits_of_group)
    return hits


def _examples(groups: ClassGroups, group: int, shots: int) -> list[Example]:
    """The first `shots` examples of every class of a group, in the group's order."""
    examples = first_of_each_class(groups.train[group], shots)
    if len(examples) < shots * len(groups.classes[group]):
        fewest = min(Counter(example.label for example in examples).values())
        raise ValueError(f"--num_fewshot {shots} is more than the {fewest} examples that a class has: lower it.")
    return examples


def _tokens(subject: Subject, groups: ClassGroups, examples: list[Example]) -> list[int]:
    """The examples' sentences, each with its label."""
    tokens = []
    for example in examples:
        tokens += context_of(subject, example)
        tokens += label_of(subject, groups.labels[example.label])
    return tokens


def _require_room(subject: Subject, groups: ClassGroups, examples: list[Example]):
    bound = subject.longest_input
    if bound is None:
        return
    contexts = [context_of(subject, example) for example in chain.from_iterable(groups.test)]
    labels = [label_of(subject, label) for label in groups.labels]
    shown = 1 + len(_tokens(subject, groups, examples))
    question = max(map(len, contexts)) + max(map(len, labels))
    need = shown + question
    if need > bound:
        raise ValueError(
            f"The examples of all classes and a question take {need:,} tokens, and the model has {bound:,} positions "
            "(max_position_embeddings): lower --num_fewshot, or leave the in-context task out of --tasks."
        )


def context_of(subject: Subject, example: Example) -> list[int]:
    """Tokens of the sentence, up to its label."""
    return subject.encode(f"Query: {example.text}\nIntent:")


def label_of(subject: Subject, label: str) -> list[int]:
    """Tokens of a label and a line break, so that no label is the beginning of another one."""
    return subject.encode(f" {label}\n")


@torch.no_grad()
def read(subject: Subject, tokens: list[int], cache=None, learn: bool = False):
    """A cache of one row after `tokens`, which follow those of `cache`; the given one may be changed.

    `learn`: whether levels learn from the tokens.
    """
    # other models have no such argument
    options = {"learn": True} if learn else {}
    for start in range(0, len(tokens), PIECE):
        piece = tokens[start : start + PIECE]
        ids = torch.tensor([piece], device=subject.model.device)
        outputs = subject.model(input_ids=ids, use_cache=True, logits_to_keep=1, **{CACHE_NAME: cache}, **options)
        cache = outputs[CACHE_NAME]
    return cache


@torch.no_grad()
def choose(subject: Subject, prefix, contexts: list[list[int]], candidates: list[list[int]], rows: int) -> list[int]:
    """The likeliest of `candidates` after each of `contexts`, which follow `prefix`: a cache of one row, unchanged.

    At most about `rows` rows are read at once.
    """
    chosen: dict[int, int] = {}
    first_tokens = [candidate[0] for candidate in candidates]
    numbered = list(enumerate(contexts))
    together = max(1, rows // len(candidates))
    for batch in batches_of_one_length(numbered, lambda pair: len(pair[1]), together):
        numbers, texts = zip(*batch, strict=True)
        ids = torch.tensor(texts, device=subject.model.device)
        cache = repeat_rows(prefix, len(batch))
        outputs = subject.model(input_ids=ids, use_cache=True, logits_to_keep=1, **{CACHE_NAME: cache})
        log_probabilities = outputs.logits[:, -1].float().log_softmax(-1)
        scores = log_probabilities[:, first_tokens].cpu()
        scores += _scores_of_rest(subject, outputs[CACHE_NAME], len(batch), candidates, rows)
        require_finite(scores, "class_incremental: the scores of labels")
        chosen |= zip(numbers, scores.argmax(1).tolist(), strict=True)
    return [chosen[number] for number, _ in numbered]


def _scores_of_rest(subject: Subject, cache, batch: int, candidates: list[list[int]], rows: int) -> Tensor:
    """Summed log-probabilities of the candidates' tokens after their first, [B, C]; `cache` has B rows."""
    together = max(1, rows // batch)
    scores = []
    for start in range(0, len(candidates), together):
        part = [torch.tensor(candidate) for candidate in candidates[start : start + together]]
        tokens = torch.nn.utils.rnn.pad_sequence(part, batch_first=True)
        lengths = torch.tensor(list(map(len, part)))
        is_token = torch.arange(tokens.shape[1]) < lengths[:, None]
        # Causal: padding on the right changes no score. Rows: all candidates of the first context, then the second's.
        ids = tokens.repeat(batch, 1).to(subject.model.device)
        repeated = repeat_rows(cache, len(part))
        logits = subject.model(input_ids=ids[:, :-1], use_cache=True, **{CACHE_NAME: repeated}).logits
        log_probabilities = logits.float().log_softmax(-1)
        targets = ids[:, 1:, None]
        of_tokens = log_probabilities.gather(-1, targets).squeeze(-1).cpu()
        is_counted = is_token[:, 1:].repeat(batch, 1)
        sums = of_tokens.where(is_counted, 0.0).sum(1)
        scores.append(sums.view(batch, len(part)))
    return torch.cat(scores, 1)
