"""A mixer by itself, small and in float64."""

import torch

from hope_hf import HopeConfig
from hope_hf.model.chunk_layout import plan_chunks
from hope_hf.model.modeling_hope import HopeBlock


def build_mixer(seed=0, **options):
    """A float64 mixer of two heads of 8 whose gates are spread, so that no factor hides behind a default."""
    options = dict(num_memory_heads=2, memory_chunk_size=8) | options
    config = HopeConfig(vocab_size=8, hidden_size=16, num_hidden_layers=1, head_dim=8, **options)
    torch.manual_seed(seed)
    block = HopeBlock(config, 0).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in block.mixer.named_parameters():
            scale = 0.5 if "memory" in name else 0.3
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * scale)
        block.mixer.gates.dt_bias.sub_(2.0)
    return block.mixer


def run_fast(mixer, hidden_states):
    """The mixer's output for texts that begin with `hidden_states` [B, T, hidden_size]."""
    plan = plan_chunks(mixer.config, hidden_states.shape[:2], hidden_states.device)
    return mixer(hidden_states, plan)[0]
