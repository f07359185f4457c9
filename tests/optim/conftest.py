"""A model with every kind of parameter that the optimizer treats differently."""

import pytest
import torch
from torch import nn

TOKENS_PER_STEP = 100


class Level(nn.Module):
    def __init__(self, level: int, period: int, width: int):
        super().__init__()
        self.level, self.period = level, period
        self.input_layernorm = nn.LayerNorm(width)
        self.up_proj = nn.Linear(width, width)

    def forward(self, x):
        return x + self.up_proj(self.input_layernorm(x))


class Memories(nn.Module):
    is_initial_state = True

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 1, width, width) / width)

    def forward(self, x):
        return x @ self.weight.sum((0, 1))


class Mixer(nn.Module):
    _no_weight_decay = {"rate", "gate.weight", "absent"}

    def __init__(self, width: int):
        super().__init__()
        self.short_conv_weight = nn.Parameter(torch.randn(width, 1, 4))
        self.conv = nn.Conv1d(width, width, 3, padding=1)
        self.heads = nn.Parameter(torch.randn(2, width // 2, width) / width)
        self.head_bias = nn.Parameter(torch.zeros(2, width // 2))
        self.head_norm = nn.ParameterDict({"weight": nn.Parameter(torch.ones(2, width // 2))})
        self.gate = nn.Linear(width, width)
        self.rate = nn.Parameter(torch.ones(width, width) / width)
        self.memories = Memories(width)

    def forward(self, x):
        y = torch.einsum("hoi,bi->bho", self.heads, x)
        y = ((y + self.head_bias) * self.head_norm["weight"]).flatten(1)
        y = y * self.gate(x @ self.rate) + self.conv(x.T[None])[0].T
        return self.memories(y) + x * self.short_conv_weight.sum((1, 2))


class LeveledModel(nn.Module):
    def __init__(self, periods=(100, 400, 1600), width: int = 8, tied: bool = True):
        super().__init__()
        self.embed_tokens = nn.Embedding(16, width)
        self.mixer = Mixer(width)
        self.levels = nn.ModuleList(Level(level, period, width) for level, period in enumerate(periods))
        self.norm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, 16, bias=False)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight

    def get_input_embeddings(self):
        return self.embed_tokens

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, tokens):
        x = self.mixer(self.embed_tokens(tokens))
        for level in self.levels:
            x = level(x)
        return nn.functional.cross_entropy(self.lm_head(self.norm(x[:-1])), tokens[1:])


@pytest.fixture
def leveled_model():
    """Build a model, always with the same weights."""

    def build(**kwargs):
        torch.manual_seed(0)
        return LeveledModel(**kwargs)

    return build


@pytest.fixture
def set_gradients():
    """Give every parameter the gradient of batch `step`, the same for the same weights."""

    def gradients(model, step: int):
        tokens = torch.randint(16, (12,), generator=torch.Generator().manual_seed(step))
        model.zero_grad()
        model(tokens).backward()

    return gradients


@pytest.fixture
def settings():
    """`build_optimizer`'s arguments but the model and the name."""
    return {
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "betas": (0.9, 0.95),
        "eps": 1e-8,
        "tokens_per_step": TOKENS_PER_STEP,
    }
