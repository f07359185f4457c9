"""Rotary positions whose frequencies stay the same, however long a text gets.

The rope types "dynamic" and "longrope" define other frequencies for texts beyond the trained length. transformers
changes them while a text is read, and keys that are read already keep the old ones: a text read in pieces, or in a
batch with a longer one, gives other values. Here texts have the frequencies of the trained length. Windows need no
others, since no distance in them is longer; other attention refuses longer texts.
"""

import torch
from transformers.configuration_utils import PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding


def rotary_reach(config: PreTrainedConfig) -> int | None:
    """Tokens up to which the frequencies are those of the rope type; `None` for types that have one set of them."""
    fields = config.rope_parameters or {}
    kind = fields.get("rope_type", "default")
    if "dynamic" in kind:
        return config.max_position_embeddings
    if kind == "longrope":
        return fields.get("original_max_position_embeddings", config.max_position_embeddings)
    return None


def check_reach(config: PreTrainedConfig, position_ids: torch.Tensor, columns: int | torch.Tensor) -> None:
    """ValueError if a position [B, T] lies beyond the reach.

    Args:
        columns: tokens of the call and of those before, padding included: no position is higher.
    """
    reach = rotary_reach(config)
    if reach is None:
        return
    kind = config.rope_parameters["rope_type"]
    told = (
        f"`rope_parameters` has the rope_type '{kind}', whose frequencies change after {reach} tokens, and keys that "
        "are read keep theirs: read shorter texts, give a window (`sliding_window`), or set another rope_type"
    )
    if torch.compiler.is_compiling():
        torch._assert_async((position_ids < reach).all(), told)
    elif (not isinstance(columns, int) or columns > reach) and int(position_ids.max()) >= reach:
        raise ValueError(told)


class HopeRotaryEmbedding(LlamaRotaryEmbedding):
    """Cosines and sines [B, T, head_dim] of positions [B, T], in the dtype of `x`.

    `model.to(torch.bfloat16)`, and DeepSpeed, round every buffer, `from_pretrained(dtype=torch.bfloat16)` does not:
    frequencies stay as exact as they were made.
    """

    def _apply(self, fn, recurse=True):
        exact = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, frequencies in exact.items():
            moved = self._buffers[name]
            if moved.dtype != frequencies.dtype:
                self._buffers[name] = frequencies.to(moved.device)
        return self

    @torch.no_grad()
    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # transformers' forward changes the frequencies first
        angles = position_ids[..., None].float() * self.inv_freq.to(device=x.device, dtype=torch.float)
        angles = torch.cat((angles, angles), dim=-1)
        return tuple((part * self.attention_scaling).to(x.dtype) for part in (angles.cos(), angles.sin()))
