"""Classes learned from examples in the context: weights stay unchanged, and the model's state stores the classes.

The state is that of the mixers, and with `learn` also what levels learn from the examples.

No new head is needed: the chosen label is the one whose words are the likeliest after the sentence.
"""

import random
from collections import Counter
from contextlib import nullcontext

import torch
from torch import Tensor

from hope_hf import CACHE_NAME, frozen_memories

from ..display import progress
from ..streams import PIECE, repeat_rows
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
    shown = [_examples(groups, group, shots) for group in range(len(groups.names))]
    everything = [example for part in shown for example in part]
    _require_room(subject, groups, everything)
    shuffled = random.Random(f"joint {seed}").sample(everything, len(everything))
    cache, hits, controls = read(subject, [subject.start], learn=learn), [], {}
    has_frozen = learn or subject.has_memory
    with progress(None, name, len(shown) + 1 + has_frozen) as bar:
        for index, part in enumerate(shown):
            cache = read(subject, _tokens(subject, groups, part), cache, learn)
            hits.append(questions(subject, cache, groups, index + 1, rows))
            bar.update()
        cache = read(subject, [subject.start, *_tokens(subject, groups, shuffled)], learn=learn)
        controls["joint"] = questions(subject, cache, groups, len(shown), rows)
        bar.update()
        if has_frozen:
            with nullcontext() if learn else frozen_memories(subject.model):
                cache = read(subject, [subject.start, *_tokens(subject, groups, everything)])
                controls["frozen"] = questions(subject, cache, groups, len(shown), rows)
            bar.update()
    return hits, controls


def questions(subject: Subject, cache, groups: ClassGroups, seen: int, rows: int) -> Hits:
    """Which test examples of the first `seen` groups are right, among the classes of these groups."""
    labels = groups.labels[: groups.classes[seen - 1].stop]
    candidates = [label_of(subject, label) for label in labels]
    hits = []
    for test in groups.test[:seen]:
        answers = choose(subject, cache, [context_of(subject, example) for example in test], candidates, rows)
        hits.append([float(answer == example.label) for answer, example in zip(answers, test, strict=True)])
    return hits


def _examples(groups: ClassGroups, group: int, shots: int) -> list[Example]:
    """The first `shots` examples of every class of a group, in the group's order."""
    found = first_of_each_class(groups.train[group], shots)
    if len(found) < shots * len(groups.classes[group]):
        fewest = min(Counter(example.label for example in found).values())
        raise ValueError(f"--num_fewshot {shots} is more than the {fewest} examples that a class has: lower it.")
    return found


def _tokens(subject: Subject, groups: ClassGroups, examples: list[Example]) -> list[int]:
    parts = ((context_of(subject, one), label_of(subject, groups.labels[one.label])) for one in examples)
    return [token for context, label in parts for token in (*context, *label)]


def _require_room(subject: Subject, groups: ClassGroups, examples: list[Example]):
    bound = subject.longest_input
    if bound is None:
        return
    longest = max(len(context_of(subject, example)) for test in groups.test for example in test)
    need = 1 + len(_tokens(subject, groups, examples)) + longest
    need += max(len(label_of(subject, label)) for label in groups.labels)
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
        ids = torch.tensor([tokens[start : start + PIECE]], device=subject.model.device)
        outputs = subject.model(input_ids=ids, use_cache=True, logits_to_keep=1, **{CACHE_NAME: cache}, **options)
        cache = outputs[CACHE_NAME]
    return cache


@torch.no_grad()
def choose(subject: Subject, prefix, contexts: list[list[int]], candidates: list[list[int]], rows: int) -> list[int]:
    """The likeliest of `candidates` after each of `contexts`, which follow `prefix`: a cache of one row, unchanged.

    At most about `rows` rows are read at once.
    """
    chosen: dict[int, int] = {}
    together = max(1, rows // len(candidates))
    # Contexts of one length are read together, so that nothing is padded.
    for size in sorted({len(context) for context in contexts}):
        alike = [index for index, context in enumerate(contexts) if len(context) == size]
        for start in range(0, len(alike), together):
            part = alike[start : start + together]
            ids = torch.tensor([contexts[index] for index in part], device=subject.model.device)
            cache = repeat_rows(prefix, len(part))
            outputs = subject.model(input_ids=ids, use_cache=True, logits_to_keep=1, **{CACHE_NAME: cache})
            scores = _first(outputs.logits, candidates) + _rest(
                subject, outputs[CACHE_NAME], len(part), candidates, rows
            )
            require_finite(scores, "class_incremental: the scores of labels")
            chosen |= zip(part, scores.argmax(1).tolist(), strict=True)
    return [chosen[index] for index in range(len(contexts))]


def _first(logits: Tensor, candidates: list[list[int]]) -> Tensor:
    """Log-probabilities of the candidates' first tokens, [B, C]; logits [B, 1, V]."""
    return logits[:, -1].float().log_softmax(-1)[:, [candidate[0] for candidate in candidates]].cpu()


def _rest(subject: Subject, cache, batch: int, candidates: list[list[int]], rows: int) -> Tensor:
    """Summed log-probabilities of the candidates' tokens after their first, [B, C]; `cache` has B rows."""
    found = []
    together = max(1, rows // batch)
    for start in range(0, len(candidates), together):
        part = candidates[start : start + together]
        tokens = torch.nn.utils.rnn.pad_sequence([torch.tensor(one) for one in part], batch_first=True)
        counted = torch.arange(tokens.shape[1]) < torch.tensor([len(one) for one in part])[:, None]
        # Causal: padding on the right changes no score. Rows: all candidates of the first context, then the second's.
        ids = tokens.repeat(batch, 1).to(subject.model.device)
        logits = subject.model(
            input_ids=ids[:, :-1], use_cache=True, **{CACHE_NAME: repeat_rows(cache, len(part))}
        ).logits
        scores = logits.float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0].cpu()
        scores = scores.where(counted[:, 1:].repeat(batch, 1), 0.0).sum(1)
        found.append(scores.view(batch, len(part)))
    return torch.cat(found, 1)
