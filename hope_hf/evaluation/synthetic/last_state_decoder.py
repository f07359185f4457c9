"""The decoder of the compression task: predicts all symbols of a sequence from the model's last state."""

import torch
from torch import Tensor, nn


class LastStateDecoder(nn.Module):
    """A causal language model without its head, and a small network that reads its last state at every position.

    The auto-encoder of MAD (Poli et al. 2024): state plus sinusoidal position, two layers as wide as the model, then
    logits. The model's own head is not used.
    """

    def __init__(self, model: nn.Module, length: int, symbols: int):
        super().__init__()
        width = model.config.hidden_size
        self.model = model
        self.register_buffer("positions", sinusoids(length, width).to(model.dtype), persistent=False)
        self.decoder = nn.Sequential(
            nn.RMSNorm(width), nn.Linear(width, width), nn.GELU(),
            nn.RMSNorm(width), nn.Linear(width, width), nn.GELU(),
            nn.RMSNorm(width), nn.Linear(width, symbols),
        ).to(model.dtype)  # fmt: skip

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits [B, T, symbols] of the symbols at all positions, from token ids [B, T] with T at most `length`."""
        states = self.model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
        return self.decoder(states[:, -1:] + self.positions[: input_ids.shape[1]])


def sinusoids(length: int, width: int) -> Tensor:
    """Sines and cosines of wave lengths from 2 pi to 10,000 times that, [length, width] float32; width is even."""
    frequencies = 10_000.0 ** -torch.linspace(0, 1, width // 2)
    angles = torch.arange(length)[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], -1)
