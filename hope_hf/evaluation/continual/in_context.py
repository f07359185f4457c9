"""Classes learned from examples in the context: weights stay unchanged, and the model's state stores the classes.

The state is that of the mixers, and with `learn` also what levels learn from the examples.

No new head is needed: the chosen label is the one whose words are the likeliest after the sentence.
"""

import random
from contextlib import nullcontext
from itertools import chain

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hope_hf import frozen_memories
from hope_hf.common.progress import progress

from ..streams import PIECE, batches_of_one_length, in_batches, read_on, repeat_rows
from ..subject import Subject, require_finite
from .classes import ClassGroups, Example, Hits, first_of_each_class

SHOTS = 1
Tokens = list[int]


def learn_in_context(
    subject: Subject, groups: ClassGroups, shots: int, rows: int, seed: int, name: str, learn: bool = False
) -> tuple[list[Hits], dict[str, Hits]]:
    """The hits after reading `shots` examples of every class, group after group, and the controls' hits.

    Controls: `joint`, the same examples in a drawn order, and `frozen`: levels stay as trained if they learn, else
    memories stay at their initial state if there are any. Raises ValueError for a model with fewer positions than the
    examples need.
    """
    count = len(groups.names)
    examples = []
    for examples_of_group, labels in zip(groups.train, groups.classes, strict=True):
        examples.append(_examples(examples_of_group, shots, len(labels)))
    all_examples = list(chain.from_iterable(examples))
    _require_room(subject, groups, all_examples)
    begin = [subject.start]
    has_frozen = learn or subject.has_memory
    hits = []
    controls = {}
    with progress(None, name, count + 1 + has_frozen) as bar:
        cache = read(subject, begin, learn=learn)
        for index, examples_of_group in enumerate(examples, start=1):
            tokens = _tokens(subject, groups, examples_of_group)
            cache = read(subject, tokens, cache, learn)
            hits.append(questions(subject, cache, groups, index, rows))
            bar.update()
        draw = random.Random(f"joint {seed}")
        shuffled = draw.sample(all_examples, len(all_examples))
        tokens = begin + _tokens(subject, groups, shuffled)
        cache = read(subject, tokens, learn=learn)
        controls["joint"] = questions(subject, cache, groups, count, rows)
        bar.update()
        if has_frozen:
            tokens = begin + _tokens(subject, groups, all_examples)
            with nullcontext() if learn else frozen_memories(subject.model):
                cache = read(subject, tokens)
                controls["frozen"] = questions(subject, cache, groups, count, rows)
            bar.update()
    return hits, controls


def questions(subject: Subject, cache, groups: ClassGroups, num_groups: int, rows: int) -> Hits:
    """Which test examples of the first `num_groups` groups are right, among the classes of these groups."""
    last_label = groups.classes[num_groups - 1].stop
    candidates = [label_of(subject, label) for label in groups.labels[:last_label]]
    hits = []
    for examples in groups.test[:num_groups]:
        contexts = [context_of(subject, example) for example in examples]
        answers = choose(subject, cache, contexts, candidates, rows)
        hits_of_group = []
        for example, answer in zip(examples, answers, strict=True):
            is_right = answer == example.label
            hits_of_group.append(float(is_right))
        hits.append(hits_of_group)
    return hits


def _examples(examples: list[Example], shots: int, num_classes: int) -> list[Example]:
    """The first `shots` examples of every class of a group, in the group's order."""
    first = first_of_each_class(examples, shots)
    if len(first) == shots * num_classes:
        return first
    labels = [example.label for example in first]
    fewest = min(map(labels.count, labels))
    raise ValueError(f"--num_fewshot {shots} is more than the {fewest} examples that a class has: lower it.")


def _tokens(subject: Subject, groups: ClassGroups, examples: list[Example]) -> Tokens:
    """The examples' sentences, each with its label."""
    tokens = []
    for example in examples:
        label = groups.labels[example.label]
        tokens += context_of(subject, example)
        tokens += label_of(subject, label)
    return tokens


def _require_room(subject: Subject, groups: ClassGroups, examples: list[Example]):
    bound = subject.longest_input
    if bound is None:
        return
    longest_context = 0
    for example in chain.from_iterable(groups.test):
        context = context_of(subject, example)
        longest_context = max(longest_context, len(context))
    longest_label = 0
    for label in groups.labels:
        longest_label = max(longest_label, len(label_of(subject, label)))
    tokens = _tokens(subject, groups, examples)
    need = 1 + len(tokens) + longest_context + longest_label
    if need > bound:
        raise ValueError(
            f"The examples of all classes and a question take {need:,} tokens, and the model has {bound:,} positions "
            "(max_position_embeddings): lower --num_fewshot, or leave the in-context task out of --tasks."
        )


def context_of(subject: Subject, example: Example) -> Tokens:
    """Tokens of the sentence, up to its label."""
    return subject.encode(f"Query: {example.text}\nIntent:")


def label_of(subject: Subject, label: str) -> Tokens:
    """Tokens of a label and a line break, so that no label is the beginning of another one."""
    return subject.encode(f" {label}\n")


@torch.no_grad()
def read(subject: Subject, tokens: Tokens, cache=None, learn: bool = False):
    """A cache of one row after `tokens`, which follow those of `cache`; the given one may be changed.

    `learn`: whether levels learn from the tokens.
    """
    options = {"logits_to_keep": 1}
    if learn:
        # other models have no such argument
        options["learn"] = True
    for piece in in_batches(tokens, PIECE):
        input_ids = torch.tensor([piece])
        _, cache = read_on(subject.model, input_ids, cache, **options)
    return cache


@torch.no_grad()
def choose(subject: Subject, prefix, contexts: list[Tokens], candidates: list[Tokens], rows: int) -> list[int]:
    """The likeliest of `candidates` after each of `contexts`, which follow `prefix`: a cache of one row, unchanged.

    At most about `rows` rows are read at once.
    """
    chosen: dict[int, int] = {}
    first_tokens = [candidate[0] for candidate in candidates]
    lengths = list(map(len, contexts))
    contexts_at_once = max(1, rows // len(candidates))
    for numbers in batches_of_one_length(range(len(contexts)), lengths.__getitem__, contexts_at_once):
        contexts_of_batch = [contexts[number] for number in numbers]
        ids = torch.tensor(contexts_of_batch)
        cache = repeat_rows(prefix, len(numbers))
        logits, cache = read_on(subject.model, ids, cache, logits_to_keep=1)
        log_probabilities = logits[:, -1].float().log_softmax(-1)
        scores = log_probabilities[:, first_tokens].cpu()
        candidates_at_once = max(1, rows // len(numbers))
        for start in range(0, len(candidates), candidates_at_once):
            part = slice(start, start + candidates_at_once)
            scores[:, part] += _scores_of_rest(subject, cache, len(numbers), candidates[part])
        require_finite(scores, "class_incremental: the scores of labels")
        likeliest = scores.argmax(1).tolist()
        chosen |= zip(numbers, likeliest, strict=True)
    return list(map(chosen.get, range(len(contexts))))


def _scores_of_rest(subject: Subject, cache, batch: int, candidates: list[Tokens]) -> Tensor:
    """Summed log-probabilities of the candidates' tokens after their first, [B, C]; `cache` has B rows."""
    rows = list(map(torch.tensor, candidates))
    tokens = pad_sequence(rows, batch_first=True)
    lengths = torch.tensor(list(map(len, candidates)))
    column = torch.arange(tokens.shape[1])
    is_token = column < lengths[:, None]
    # Causal: padding on the right changes no score. Rows: all candidates of the first context, then the second's.
    ids = tokens.repeat(batch, 1).to(subject.model.device)
    cache = repeat_rows(cache, len(candidates))
    logits, _ = read_on(subject.model, ids[:, :-1], cache)
    log_probabilities = logits.float().log_softmax(-1)
    targets = ids[:, 1:, None]
    of_tokens = log_probabilities.gather(-1, targets)
    of_tokens = of_tokens.squeeze(-1).cpu()
    is_counted = is_token[:, 1:].repeat(batch, 1)
    sums = of_tokens.where(is_counted, 0.0).sum(1)
    return sums.view(batch, len(candidates))
