"""Small GGUF files with random weights, and what llama.cpp computes from them, in float64."""

import gguf
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

# heads, heads of keys, channels of a head, and the rest
SIZES = dict(heads=4, key_heads=2, head_dim=8, hidden=32, units=48, layers=2, vocab=64)
WORDS = ["w", *"0123456789", *(f"w{index}" for index in range(51)), "<eos>", "<pad>"]
BASE = 1e4


class Gguf:
    """A model: its fields and tensors, which a test may change before it writes them.

    Attributes:
        fields: those below the architecture's name.
        others: all others.
        tensors: by llama.cpp's names, in float32 and in llama.cpp's order of channels.
    """

    def __init__(self, architecture: str = "llama", biases: tuple[str, ...] = (), tied: bool = False, **sizes):
        self.architecture, self.sizes = architecture, SIZES | sizes
        self.fields = {
            "context_length": 512,
            "embedding_length": self.sizes["hidden"],
            "block_count": self.sizes["layers"],
            "feed_forward_length": self.sizes["units"],
            "attention.head_count": self.sizes["heads"],
            "attention.head_count_kv": self.sizes["key_heads"],
            "attention.layer_norm_rms_epsilon": 1e-5,
            "rope.freq_base": BASE,
        }
        if self.sizes["hidden"] != self.sizes["heads"] * self.sizes["head_dim"]:
            self.fields["attention.key_length"] = self.fields["attention.value_length"] = self.sizes["head_dim"]
        self.others = tokens_of_words()
        self.tensors = self._random(biases, tied)

    def write(self, path) -> None:
        """Write the file."""
        writer = gguf.GGUFWriter(path, self.architecture)
        fields = {f"{self.architecture}.{name}": value for name, value in self.fields.items()}
        for name, value in (fields | self.others).items():
            _add(writer, name, value)
        for name, array in self.tensors.items():
            kind = gguf.GGMLQuantizationType.Q8_0 if array.dtype == np.uint8 else None
            writer.add_tensor(name, array, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    @torch.no_grad()
    def logits(self, ids, frequencies=None, scale: float = 1.0, window: int | None = None) -> np.ndarray:
        """Logits [T, V] of token ids [T], in float64.

        `frequencies`: radians a token [head_dim / 2] (`None`: those of the base); `scale`: of cosines and sines;
        `window`: tokens that each sees.
        """
        weights = {name: torch.from_numpy(array).double() for name, array in self.tensors.items()}
        position = torch.arange(len(ids))
        distance = position[:, None] - position
        sees = (distance >= 0) & (distance < (window or len(ids)))
        if frequencies is None:
            frequencies = plain_frequencies(self.sizes["head_dim"])
        angles = position[:, None] * torch.as_tensor(frequencies)
        turns = torch.polar(torch.full_like(angles, scale), angles)
        hidden = weights["token_embd.weight"][ids]
        for layer in range(self.sizes["layers"]):
            block = {name.removeprefix(f"blk.{layer}."): weight for name, weight in weights.items()}
            hidden = hidden + self._attention(block, _norm(hidden, block["attn_norm.weight"]), turns, sees)
            read = _norm(hidden, block["ffn_norm.weight"])
            units = F.silu(_map(block, "ffn_gate", read)) * _map(block, "ffn_up", read)
            hidden = hidden + _map(block, "ffn_down", units)
        head = weights.get("output.weight", weights["token_embd.weight"])
        return (_norm(hidden, weights["output_norm.weight"]) @ head.T).numpy()

    def _attention(self, block, read, turns, sees) -> Tensor:
        heads = (-1, self.sizes["head_dim"])
        query = _map(block, "attn_q", read).unflatten(-1, heads).transpose(0, 1)
        key = _map(block, "attn_k", read).unflatten(-1, heads).transpose(0, 1)
        value = _map(block, "attn_v", read).unflatten(-1, heads).transpose(0, 1)
        if "attn_q_norm.weight" in block:
            query, key = _norm(query, block["attn_q_norm.weight"]), _norm(key, block["attn_k_norm.weight"])
        query, key = self._turned(query, turns), self._turned(key, turns)
        output = F.scaled_dot_product_attention(query, key, value, attn_mask=sees, enable_gqa=True)
        return _map(block, "attn_output", output.transpose(0, 1).flatten(1))

    def _turned(self, heads, turns) -> Tensor:
        """Rotary positions: Llama's pairs are neighbours, and Qwen's lie half a head apart."""
        if self.architecture == "llama":
            pairs = torch.view_as_complex(heads.unflatten(-1, (-1, 2)).contiguous())
            return torch.view_as_real(pairs * turns).flatten(-2)
        turned = torch.complex(*heads.chunk(2, dim=-1)) * turns
        return torch.cat([turned.real, turned.imag], dim=-1)

    def _random(self, biases, tied) -> dict[str, np.ndarray]:
        size = self.sizes
        hidden, units, width = size["hidden"], size["units"], size["head_dim"]
        rows, key_rows = size["heads"] * width, size["key_heads"] * width
        shapes = {"attn_norm": (hidden,)}
        if self.architecture == "qwen2":
            biases = ("attn_q", "attn_k", "attn_v")
        if self.architecture == "qwen3":
            shapes |= {"attn_q_norm": (width,), "attn_k_norm": (width,)}
        shapes |= {"attn_q": (rows, hidden), "attn_k": (key_rows, hidden), "attn_v": (key_rows, hidden)}
        shapes |= {"attn_output": (hidden, rows), "ffn_norm": (hidden,)}
        shapes |= {"ffn_gate": (units, hidden), "ffn_up": (units, hidden), "ffn_down": (hidden, units)}
        draw = np.random.default_rng(0)
        tensors = {"token_embd.weight": _drawn(draw, size["vocab"], hidden)}
        for layer in range(size["layers"]):
            for name, shape in shapes.items():
                tensors[f"blk.{layer}.{name}.weight"] = _drawn(draw, *shape)
                if name in biases:
                    tensors[f"blk.{layer}.{name}.bias"] = _drawn(draw, shape[0])
        tensors["output_norm.weight"] = _drawn(draw, hidden)
        if not tied:
            tensors["output.weight"] = _drawn(draw, size["vocab"], hidden)
        for name, tensor in tensors.items():
            if "norm" in name:
                tensor += 1
        return tensors


def _drawn(draw, *shape: int) -> np.ndarray:
    return (0.3 * draw.normal(size=shape)).astype(np.float32)


def plain_frequencies(head_dim: int, base: float = BASE) -> np.ndarray:
    """Radians a token of each pair of channels [head_dim / 2]."""
    return base ** (-np.arange(0, head_dim, 2) / head_dim)


def tokens_of_words() -> dict:
    """The fields of a vocabulary of 64 tokens."""
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": WORDS,
        "tokenizer.ggml.token_type": [1] * 62 + [3, 3],
        "tokenizer.ggml.merges": ["w 0"],
        "tokenizer.ggml.eos_token_id": 62,
        "tokenizer.ggml.padding_token_id": 63,
    }


def _add(writer, name: str, value) -> None:
    """Write a field with the type that llama.cpp's converters give it."""
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    add.get(type(value), writer.add_array)(name, value)


def _norm(values: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(values, weight.shape, weight, eps=1e-5)


def _map(block, name: str, values: Tensor) -> Tensor:
    return F.linear(values, block[f"{name}.weight"], block.get(f"{name}.bias"))
