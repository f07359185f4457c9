"""Scores of tokens, fitted layer by layer, and the numbers of tokens that heads retain.

No gradient passes through the model.

Axes: N token of the training texts, G head of keys.
"""

from collections import defaultdict
from statistics import fmean

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, gelu, linear

from hope_hf import HopeForCausalLM
from hope_hf.common.progress import progress

from .interest import read_with_full_attention
from .texts import AskedText

# the fewest tokens that a head retains
FEWEST = 16
# steps of a layer's scores, tokens of a step, learning rate
STEPS, BATCH, LEARNING_RATE = 1500, 1024, 2e-3
# logit of a score before it has learned: most tokens are of no interest
FIRST_LOGIT = -3.0
# width of the map that scores tokens, as in the model
WIDTH = 64
# texts that tell which layers lack most
TEXTS_OF_CHOICE = 3

# the buffers of a layer's `TokenScores`, by name
Scores = dict[str, Tensor]


def choose_layers(model: HopeForCausalLM, texts: list[AskedText], candidates: list[int], count: int) -> list[int]:
    """The `count` layers in which questions lack the largest share of what they read, if a window hides the rest."""
    shares = defaultdict(list)
    for text in progress(texts, "texts that choose layers"):
        for reading in read_with_full_attention(model, text, candidates):
            shares[reading.layer].append(reading.lacking)
    by_share = sorted(candidates, key=lambda layer: -fmean(shares[layer]))
    return sorted(by_share[:count])


def fit_layers(model: HopeForCausalLM, texts: list[AskedText], layers: list[int]) -> tuple[dict[int, Scores], Tensor]:
    """The scores of each layer, and those of all tokens that the window has passed [N, heads of all layers]."""
    inputs = defaultdict(list)
    interests = defaultdict(list)
    for text in progress(texts, "texts"):
        for reading in read_with_full_attention(model, text, layers):
            inputs[reading.layer].append(reading.inputs.half())
            interests[reading.layer].append(reading.interest.float())
    fitted = {}
    scores_of_layers = []
    for layer in progress(layers, "layers"):
        inputs_of_layer = torch.cat(inputs.pop(layer))
        scores = fit(inputs_of_layer, torch.cat(interests.pop(layer)))
        fitted[layer] = scores
        scores_of_layers.append(apply_scores(scores, inputs_of_layer.float()))
    return fitted, torch.cat(scores_of_layers, dim=1)


def apply_scores(scores: Scores, inputs: Tensor) -> Tensor:
    """As `TokenScores`, for inputs [N, hidden_size] to [N, G]."""
    hidden = linear(inputs, scores["up_weight"], scores["up_bias"])
    return linear(gelu(hidden), scores["down_weight"], scores["down_bias"])


def fit(inputs: Tensor, interest: Tensor) -> Scores:
    """Scores whose sigmoid is the root of the interest [N, G] in tokens with inputs [N, hidden_size]."""
    device = inputs.device
    # inputs have a layer's own scale
    scale = inputs[:4096].float().std()
    targets = interest.sqrt()
    up = torch.nn.Linear(inputs.shape[1], WIDTH, device=device)
    down = torch.nn.Linear(WIDTH, targets.shape[1], device=device)
    torch.nn.init.zeros_(down.weight)
    torch.nn.init.constant_(down.bias, FIRST_LOGIT)
    optimizer = torch.optim.AdamW([*up.parameters(), *down.parameters()], lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=STEPS)
    for _ in range(STEPS):
        chosen = torch.randint(len(inputs), (BATCH,), device=device)
        logits = down(gelu(up(inputs[chosen].float() / scale)))
        loss = binary_cross_entropy_with_logits(logits, targets[chosen])
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return {
        "up_weight": up.weight.detach() / scale,
        "up_bias": up.bias.detach(),
        "down_weight": down.weight.detach(),
        "down_bias": down.bias.detach(),
    }


def share_out(scores: Tensor, texts: int, mean: int) -> list[int]:
    """How many tokens each head retains, `mean` of them on average.

    Scores of all heads are compared [N, heads]: a head retains, of a text, as many tokens as it has among the highest
    scores of all heads in the training texts. The sum is that of heads that retain the same number.
    """
    heads = scores.shape[1]
    number = min(texts * mean * heads, scores.numel())
    lowest = scores.flatten().topk(number).values[-1]
    counts = (scores >= lowest).sum(0) / texts
    return counts.round().int().clamp(min=FEWEST).tolist()
