"""A GGUF file as a model of transformers: its configuration and its weights.

transformers' own reader leaves out fields and tensors that it does not know, and then the logits are others. Here each
field below the architecture's name, and each tensor, is read or refused by its name.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen3Config,
)

from hope_hf.common.process import MISTAKES, one_line

from .gguf_positions import Positions, read_positions
from .gguf_tokenizer import Vocabulary

# Sizes, and their fields of transformers.
SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
# Others that are read here or in gguf_positions.py.
READ = (
    "attention.head_count_kv", "attention.layer_norm_rms_epsilon", "attention.key_length", "attention.value_length",
    "vocab_size", "rope.dimension_count", "rope.freq_base", "rope.scaling.type", "rope.scaling.factor",
    "rope.scale_linear", "rope.scaling.attn_factor", "rope.scaling.original_context_length",
    "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow", "rope.scaling.finetuned",
)  # fmt: skip
# Fields that change nothing at these values.
NEUTRAL = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.scale": (0.0,),
    "attention.sliding_window": (0,),
    "attn_logit_softcapping": (0.0,),
    "embedding_scale": (0.0, 1.0),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "final_logit_softcapping": (0.0,),
    "logit_scale": (0.0, 1.0),
    "pooling_type": (0,),
    "residual_scale": (0.0, 1.0),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (1.0,),
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "tensor_data_layout": ("Meta AI original pth",),
    "use_parallel_residual": (False,),
}
ARCHITECTURES = ("llama", "qwen2", "qwen3")
# Tensors, and their modules in transformers.
MODULES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
MODULES_OF_BLOCKS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
FACTORS = "rope_freqs.weight"
# Bytes of the weights that are held, and written, at once.
SHARD = 2**31


class GgufFile:
    """A GGUF file that HOPE can express.

    Attributes:
        name: of the file.
        config: of the model of transformers with the same logits, in float32.
        positions: as llama.cpp computes them; `config` gives the same.
        license: what the file says, in the Hub's form; None if it says nothing of it.
    """

    name: str
    config: PreTrainedConfig
    positions: Positions
    license: str | None

    def __init__(self, path: Path, named: str):
        """Read all but the weights.

        Raises ValueError that begins with `named` for what HOPE cannot express; many errors for a damaged file.
        """
        # Not a dependency.
        from gguf import GGUFReader

        self.name, self._named = path.name, named
        reader = GGUFReader(path)
        self._metadata = {name: field.contents() for name, field in reader.fields.items()}
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        license = str(self._metadata.get("general.license", ""))
        self.license = license if re.fullmatch(r"[\w.-]+", license) else None
        self._architecture = self._metadata.get("general.architecture")
        if self._architecture not in ARCHITECTURES:
            raise ValueError(
                f"{named} is a {self._architecture}, which HOPE cannot express: of GGUF files these work: "
                f"{', '.join(ARCHITECTURES)}."
            )
        if self._metadata.get("split.count", 0) > 1:
            raise ValueError(f"{named} is one of several (split.count): join them with llama-gguf-split --merge.")
        self._fields = {}
        for name, value in self._metadata.items():
            architecture, _, field = name.partition(".")
            if architecture == self._architecture:
                self._fields[field] = _plain(value)
        self._vocabulary = Vocabulary(self._metadata, named)
        self.config = self._read_config()
        self._check_tensors()

    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The tokenizer of the file's vocabulary; None if it has none. ValueError if it cannot be built exactly."""
        if not self._vocabulary.tokens:
            return None
        try:
            return self._vocabulary.tokenizer(self.config.vocab_size)
        except ValueError:
            raise
        # The tokenizers library raises a bare Exception for merges that it cannot use.
        except Exception as error:
            raise ValueError(f"{self._named} has a vocabulary that cannot be used: {one_line(error)}") from error

    def spells(self, tokenizer: PreTrainedTokenizerBase) -> bool:
        """Whether the tokenizer has the ids of the file's vocabulary."""
        return self._vocabulary.is_of(tokenizer)

    def write(self, folder: Path) -> list[Path]:
        """Write the weights to new safetensors in `folder`, in float32. Returns their paths."""
        folder.mkdir()
        paths, weights, size = [], {}, 0
        for name, weight in self._weights():
            if weights and size + weight.nbytes > SHARD:
                paths.append(_save(weights, folder, len(paths)))
                weights, size = {}, 0
            weights[name] = weight
            size += weight.nbytes
        return [*paths, _save(weights, folder, len(paths))]

    def _read_config(self) -> PreTrainedConfig:
        sizes = {ours: self._needed(name) for name, ours in SIZES.items()}
        heads = sizes["num_attention_heads"]
        head_dim = self._fields.get("attention.key_length", sizes["hidden_size"] // heads)
        window = self._fields.get("attention.sliding_window", 0) if self._architecture == "llama" else 0
        self._check_fields(head_dim, window)
        factors = self._array(FACTORS) if FACTORS in self._tensors else None
        self.positions = read_positions(self._fields, factors, head_dim, sizes["max_position_embeddings"])
        vocab_size = self._vocab_size()
        values = {
            "vocab_size": vocab_size,
            "head_dim": head_dim,
            "num_key_value_heads": self._fields.get("attention.head_count_kv", heads),
            "rms_norm_eps": self._needed("attention.layer_norm_rms_epsilon"),
            "rope_parameters": self.positions.parameters,
            "tie_word_embeddings": "output.weight" not in self._tensors,
            # Mistral's default is a window of 4,096 tokens
            "sliding_window": window or None,
            "dtype": torch.float32,
        }
        for name, field in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
            token = self._metadata.get(f"tokenizer.ggml.{field}_token_id")
            if token is None or token < vocab_size:
                values[f"{name}_token_id"] = token
        config = self._kind(window)(**sizes, **values, **self._biases())
        self.positions.check(config, self._named)
        return config

    def _kind(self, window: int) -> type[PreTrainedConfig]:
        """The architecture of transformers with these tensors and this window."""
        if self._architecture != "llama":
            return {"qwen2": Qwen2Config, "qwen3": Qwen3Config}[self._architecture]
        if window:
            return MistralConfig
        with_bias = self._modules_with_bias()
        # biases of three maps are Qwen2's, and of all four Llama's
        return Qwen2Config if "attn_q" in with_bias and "attn_output" not in with_bias else LlamaConfig

    def _biases(self) -> dict:
        with_bias = self._modules_with_bias()
        return {"attention_bias": "attn_q" in with_bias, "mlp_bias": "ffn_up" in with_bias}

    def _modules_with_bias(self) -> set[str]:
        return {name.split(".")[-2] for name in self._tensors if name.endswith(".bias")}

    def _needed(self, name: str):
        if name not in self._fields:
            raise ValueError(f"{self._named} has no field {self._architecture}.{name}: it is not a whole model.")
        return self._fields[name]

    def _vocab_size(self) -> int:
        if "token_embd.weight" not in self._tensors:
            raise ValueError(f"{self._named} has no tensor token_embd.weight: it is not a whole model.")
        rows = int(self._tensors["token_embd.weight"].shape[-1])
        size = self._fields.get("vocab_size", rows)
        if size != rows:
            raise ValueError(f"{self._named} has a vocab_size of {size}, and token_embd.weight has {rows} rows.")
        return rows

    def _check_fields(self, head_dim: int, window: int) -> None:
        neutral = NEUTRAL | {
            "attention.value_length": (head_dim,),
            "rope.dimension_count": (head_dim,),
            "attention.scale": (0.0, _shortest(head_dim**-0.5)),
            "attention.sliding_window": (window,),
        }
        for name, value in self._fields.items():
            if name in neutral:
                is_known = value in neutral[name]
            else:
                is_known = name in SIZES or name in READ
            # of lists with different values none is known
            if not is_known or isinstance(value, list):
                shown = f"{value[:3]} ..." if isinstance(value, list) else f"{value!r}"
                raise ValueError(
                    f"{self._named} has the field {self._architecture}.{name} of {shown}, which HOPE cannot express."
                )

    def _check_tensors(self) -> None:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(self.config)
        expected = {name: list(weight.shape) for name, weight in model.state_dict().items()}
        if self.config.tie_word_embeddings:
            del expected["lm_head.weight"]
        theirs = {self._their_name(name): name for name in self._tensors if name != FACTORS}
        for name, tensor in theirs.items():
            if name not in expected:
                raise ValueError(f"{self._named} has the tensor {tensor}, which HOPE cannot express.")
            # the file has the rows last
            shape = [int(size) for size in reversed(self._tensors[tensor].shape)]
            if shape != expected[name]:
                raise ValueError(f"{self._named} has a {tensor} of {shape}, and its fields give {expected[name]}.")
        for name in sorted(expected.keys() - theirs.keys()):
            raise ValueError(f"{self._named} has no tensor for {name} of transformers: it is not a whole model.")

    def _their_name(self, tensor: str) -> str:
        """The name in transformers, or the name itself."""
        block = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", tensor)
        if block is not None and block[2] in MODULES_OF_BLOCKS:
            return f"model.layers.{block[1]}.{MODULES_OF_BLOCKS[block[2]]}.{block[3]}"
        module, _, kind = tensor.rpartition(".")
        return f"{MODULES[module]}.{kind}" if module in MODULES else tensor

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name in transformers and values of every weight, in float32, one after the other."""
        heads = {"attn_q": self.config.num_attention_heads, "attn_k": self.config.num_key_value_heads}
        for tensor in self._tensors:
            if tensor == FACTORS:
                continue
            array = self._array(tensor)
            module = tensor.split(".")[-2]
            if self._architecture == "llama" and module in heads:
                array = _halves_apart(array, heads[module])
            # a copy: those in float32 lie in the file
            yield self._their_name(tensor), torch.from_numpy(np.array(array, dtype=np.float32))

    def _array(self, name: str) -> np.ndarray:
        from gguf import dequantize

        tensor = self._tensors[name]
        try:
            return dequantize(tensor.data, tensor.tensor_type)
        except MISTAKES as error:
            kind = tensor.tensor_type.name
            raise ValueError(f"{self._named} has a {name} of {kind}, which cannot be read: {error}") from error


def _plain(value):
    """A field's value: a list of equal numbers, one for each layer, as this number."""
    if isinstance(value, list) and value and all(other == value[0] for other in value):
        value = value[0]
    return _shortest(value) if isinstance(value, float) else value


def _shortest(value: float) -> float:
    """1e-05 and not 9.999999747378752e-06: the number that was rounded to float32."""
    return float(str(np.float32(value)))


def _halves_apart(array: np.ndarray, heads: int) -> np.ndarray:
    """The rows of a head as transformers has them: llama.cpp has the two channels that rotate next to each other."""
    rows, *others = array.shape
    pairs = rows // heads // 2
    by_pair = array.reshape(heads, pairs, 2, *others)
    return by_pair.swapaxes(1, 2).reshape(array.shape)


def _save(weights: dict[str, torch.Tensor], folder: Path, number: int) -> Path:
    path = folder / f"weights-{number}.safetensors"
    save_file(weights, path, metadata={"format": "pt"})
    return path
