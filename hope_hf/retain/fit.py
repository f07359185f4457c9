"""Scores of tokens, fitted layer by layer, and the numbers of tokens that heads retain.

No gradient passes through the model.

Axes: N token of the training texts, G head of keys.
"""

from dataclasses import dataclass, field
from statistics import fmean

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, gelu, linear

from hope_hf import HopeForCausalLM
from hope_hf.common.progress import progress

from .interest import LayerReading, read_with_full_attention
from .texts import AskedText

# the fewest tokens that a head retains
FEWEST = 16
# steps of a layer's scores, tokens of a step, learning rate
STEPS, BATCH, LEARNING_RATE = 1500, 1024, 2e-3
# logit of a score before it has learned: most tokens are of no interest
FIRST_LOGIT = -3.0
# width of the map that scores tokens, as in the model
WIDTH = 64
# first texts, which tell which layers lack most
TEXTS_OF_CHOICE = 3

# the buffers of a layer's `TokenScores`, by name
Scores = dict[str, Tensor]


@dataclass
class LayerReadings:
    """What a layer read of every text, see `LayerReading`; inputs in float16, since those of all texts are held."""

    inputs: list[Tensor] = field(default_factory=list)
    interest: list[Tensor] = field(default_factory=list)
    lacking: list[float] = field(default_factory=list)

    def add(self, reading: LayerReading) -> None:
        """Add what the layer read of one more text."""
        self.inputs.append(reading.inputs.half())
        self.interest.append(reading.interest.float())
        self.lacking.append(reading.lacking)


# of each layer
Readings = dict[int, LayerReadings]


def read_texts(model: HopeForCausalLM, texts: list[AskedText], candidates: list[int], count: int) -> Readings:
    """What the `count` layers that lack most read of every text.

    A layer lacks the share of what questions read that a window would hide. The first texts tell which layers these
    are; of the others, their readings alone are kept.
    """
    readings = {}
    for layer in candidates:
        readings[layer] = LayerReadings()
    texts_of_choice = min(TEXTS_OF_CHOICE, len(texts))
    for number, text in enumerate(progress(texts, "texts"), start=1):
        for reading in read_with_full_attention(model, text, readings.keys()):
            readings[reading.layer].add(reading)
        if number == texts_of_choice:
            readings = most_lacking(readings, count)
    return readings


def most_lacking(readings: Readings, count: int) -> Readings:
    """The readings of the `count` layers in which questions lack most, in the order of the layers."""
    by_share = sorted(readings, key=lambda layer: fmean(readings[layer].lacking), reverse=True)
    chosen = sorted(by_share[:count])
    return {layer: readings[layer] for layer in chosen}


def fit_layers(readings: Readings) -> tuple[dict[int, Scores], Tensor]:
    """The scores of each layer, and those of all tokens that the window has passed [N, heads of all layers].

    The readings are taken out of the dictionary, which frees their memory.
    """
    scores_by_layer = {}
    results = []
    for layer in progress(list(readings), "layers"):
        readings_of_layer = readings.pop(layer)
        inputs = torch.cat(readings_of_layer.inputs)
        interest = torch.cat(readings_of_layer.interest)
        scores = fit(inputs, interest)
        scores_by_layer[layer] = scores
        result = apply_scores(scores, inputs.float())
        results.append(result)
    return scores_by_layer, torch.cat(results, dim=1)


def apply_scores(scores: Scores, inputs: Tensor) -> Tensor:
    """As `TokenScores`, for inputs [N, hidden_size] to [N, G]."""
    hidden = gelu(linear(inputs, scores["up_weight"], scores["up_bias"]))
    return linear(hidden, scores["down_weight"], scores["down_bias"])


def fit(inputs: Tensor, interest: Tensor) -> Scores:
    """Scores whose sigmoid is the root of the interest [N, G] in tokens with inputs [N, hidden_size]."""
    device = inputs.device
    number, hidden_size = inputs.shape
    # inputs have a layer's own scale
    scale = inputs[:4096].float().std()
    targets = interest.sqrt()
    heads = targets.shape[1]
    up = torch.nn.Linear(hidden_size, WIDTH, device=device)
    down = torch.nn.Linear(WIDTH, heads, device=device)
    torch.nn.init.zeros_(down.weight)
    torch.nn.init.constant_(down.bias, FIRST_LOGIT)
    optimizer = torch.optim.AdamW([*up.parameters(), *down.parameters()], lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=STEPS)
    for _ in range(STEPS):
        chosen = torch.randint(number, (BATCH,), device=device)
        scaled = inputs[chosen].float() / scale
        hidden = gelu(up(scaled))
        logits = down(hidden)
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
    highest = scores.flatten().topk(number).values
    is_highest = scores >= highest[-1]
    counts = is_highest.sum(0) / texts
    counts = counts.round().int()
    return counts.clamp(min=FEWEST).tolist()
