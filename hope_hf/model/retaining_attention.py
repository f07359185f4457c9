"""Softmax attention to a window, a document's first tokens, and a fixed number of older tokens that it retains.

Each head of keys retains those of the tokens behind its window that have the highest scores. The score of a token is
a small map of the layer's input, which learns how much later questions attend to the token (`hope-hf retain`). Heads
retain different numbers of tokens, `config.retained_tokens`, so that the state has one size however long the text is.

Tokens are counted in blocks of K = `retained_block_size` from their document's beginning. All queries of a block b see
the same older tokens; the token at position p of block b sees:

- sinks: the tokens t < `attention_sinks`;
- the window: the tokens t with b K - W <= t <= p, the last W = `sliding_window` ones or up to K - 1 more;
- of each head, the tokens that it retains of those with t < b K - W.

When a block ends, K tokens leave the window. A head then retains the tokens with the highest scores among those that
it has and those that leave. A token is given up before it is farther away than the positions that the model knows.

Axes: B row, T token of the call, S slot of the call (`chunks`), H head of keys, D head width; K block, W window;
M keys of a call: the window before the call, then its slots; N tokens that a layer retains, head after head.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.configuration_utils import PreTrainedConfig

from .attention import HopeAttention
from .chunks import TokenPlan
from .retaining_plan import RetainingPlan, Sizes
from .retaining_reads import RetainingState, read_in_graph, read_retaining
from .streams import Angles, make_streams

# width of the map that scores tokens
_SCORE_WIDTH = 64
# The first layer scores the same words alike but for the rounding of its products, which depends on the call's length:
# whatever the calls, these scores must be equal.
_SCORE_STEP = 2**-10


class TokenScores(nn.Module):
    """How much a token will be asked for after the window, for each head of keys: [..., hidden_size] to [..., H].

    The map is made of buffers, since no gradient of a loss reaches it; `hope-hf retain` fits it.
    """

    has_initial_values = True

    def __init__(self, config: PreTrainedConfig):
        super().__init__()
        heads = config.num_key_value_heads
        self.register_buffer("up_weight", torch.empty(_SCORE_WIDTH, config.hidden_size))
        self.register_buffer("up_bias", torch.empty(_SCORE_WIDTH))
        self.register_buffer("down_weight", torch.empty(heads, _SCORE_WIDTH))
        self.register_buffer("down_bias", torch.empty(heads))

    @torch.no_grad()
    def forward(self, hidden_states: Tensor) -> Tensor:
        """Scores in float32 or wider, multiples of `_SCORE_STEP`."""
        dtype = torch.promote_types(hidden_states.dtype, torch.float32)
        with torch.autocast(hidden_states.device.type, enabled=False):
            up_weight = self.up_weight.to(dtype)
            up_bias = self.up_bias.to(dtype)
            down_weight = self.down_weight.to(dtype)
            down_bias = self.down_bias.to(dtype)
            hidden = F.linear(hidden_states.to(dtype), up_weight, up_bias)
            scores = F.linear(F.gelu(hidden), down_weight, down_bias)
            return (scores / _SCORE_STEP).round() * _SCORE_STEP

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Scores of a new model know nothing of a token, but differ."""
        init.normal_(self.up_weight, std=self.up_weight.shape[1] ** -0.5)
        init.zeros_(self.up_bias)
        init.normal_(self.down_weight, std=_SCORE_WIDTH**-0.5)
        init.zeros_(self.down_bias)


class HopeRetainingAttention(HopeAttention):
    """Causal attention to a window, the first `attention_sinks` tokens, and the tokens that each head retains.

    Its parameters are those of `HopeAttention`; keys keep the rotary positions of their own tokens.
    """

    state_class = RetainingState
    needs = frozenset({"retained", "rotary"})
    own_fields = ("sliding_window", "attention_sinks", "retained_")
    name = "softmax attention that retains tokens"

    def __init__(self, config: PreTrainedConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.sizes = Sizes.of(config)
        number = config.layer_types[:layer_idx].count("retaining_attention")
        # tokens that each head retains
        self.counts = config.retained_tokens[number]
        self.scores = TokenScores(config)

    def forward(
        self,
        hidden_states: Tensor,
        state: RetainingState | None = None,
        *,
        retained: RetainingPlan | TokenPlan,
        retained_angles: tuple[Angles, Angles | None],
        need_state: bool = False,
        **_,
    ) -> tuple[Tensor, RetainingState | None, None]:
        """[B, T, hidden_size]; the state after the call; no weights.

        Args:
            hidden_states: [B, T, hidden_size].
            state: state after the previous call, or `None` at a text's start.
            retained: plan of the call's tokens.
            retained_angles: the result of `retaining_angles`.
            need_state: whether to return the state after the last token.
        """
        if state is not None:
            self._check_retained(state.retained.shape[1])
        streams = make_streams(self, hidden_states, *retained_angles)
        scores = self.scores(hidden_states).transpose(1, 2).unsqueeze(-1)
        dropout = self.attention_dropout if self.training else 0.0
        read = read_in_graph if isinstance(retained, TokenPlan) else read_retaining
        reads, state = read(streams, scores, state, retained, self.sizes, self.counts, need_state, dropout)
        by_token = reads.transpose(1, 2)
        return self.o_proj(by_token.flatten(2)), state, None

    def _check_retained(self, number: int) -> None:
        """ValueError unless a state's number of retained tokens is the layer's; other layers have other ones."""
        expected = sum(self.counts)
        if number != expected:
            raise ValueError(
                f"the cache retains {number} tokens in layer {self.layer_idx}, and this model {expected}: it is the "
                "cache of another model"
            )

    @classmethod
    def describe(cls, config: PreTrainedConfig) -> str:
        """The mixer in a model card."""
        return f"{cls.name} ({_mean_retained(config):,.0f} a head)"

    @staticmethod
    def check_config(config: PreTrainedConfig) -> None:
        layers = config.layer_types.count("retaining_attention")
        counts = config.retained_tokens
        if not layers:
            if counts is None:
                return
            raise ValueError(
                "`retained_tokens` is given and no layer retains tokens: name the layers 'retaining_attention' in "
                "`layer_types`, or leave it out"
            )
        heads = config.num_key_value_heads
        if counts is None:
            # kinds of layers that were changed after the configuration was made
            raise ValueError(
                f"`retained_tokens` is missing: give a list for each of the {layers} layers of 'retaining_attention', "
                f"with a number for each of the {heads} heads of keys"
            )
        if [len(of_layer) for of_layer in counts] != [heads] * layers:
            raise ValueError(
                f"`retained_tokens` has the lengths {[len(of_layer) for of_layer in counts]}: give a list for each of "
                f"the {layers} layers of 'retaining_attention', with a number for each of the {heads} heads of keys"
            )
        if min(map(min, counts)) < 1:
            raise ValueError(f"`retained_tokens` holds {min(map(min, counts))}: a head retains at least one token")
        if config.retained_block_size < max(1, config.attention_sinks):
            raise ValueError(
                f"`retained_block_size` ({config.retained_block_size}) must be at least 1 and at least "
                f"`attention_sinks` ({config.attention_sinks})"
            )
        sizes = Sizes.of(config)
        if sizes.window + sizes.block >= sizes.reach:
            raise ValueError(
                f"`sliding_window` and `retained_block_size` are {sizes.window} and {sizes.block} tokens, and the "
                f"model knows {sizes.reach} positions, so that no token behind the window could be retained: give "
                "smaller ones"
            )

    @staticmethod
    def check_state(state: RetainingState, config: PreTrainedConfig, dtype: torch.dtype) -> None:
        _, heads, slots, width = state.window.shape
        expected_slots = config.sliding_window + config.retained_block_size
        key_heads = config.num_key_value_heads
        sinks = state.sinks.shape[2]
        expected = key_heads, expected_slots, 2 * config.head_dim, config.attention_sinks
        if (heads, slots, width, sinks) != expected:
            raise ValueError(
                f"the cache holds windows of {slots} tokens and {sinks} sinks with {heads} heads of width "
                f"{width // 2}, and this model has {expected_slots} tokens and {config.attention_sinks} sinks with "
                f"{key_heads} heads of width {config.head_dim}: it is the cache of another model"
            )

    @staticmethod
    def tensor_parallel_maps(config: PreTrainedConfig) -> dict[str, str]:
        """Every rank computes the whole layer; only the weights of its linear maps are sharded."""
        maps = "q_proj", "k_proj", "v_proj", "o_proj"
        return dict.fromkeys(maps, "colwise_gather_output")

    @staticmethod
    def rounds(config: PreTrainedConfig) -> tuple[int, int]:
        """A round is a block, from where on a window is full; a short text has whole blocks."""
        block = config.retained_block_size
        blocks_of_window = math.ceil(config.sliding_window / block)
        return (blocks_of_window + 2) * block, block

    @staticmethod
    def mixing_flops(config: PreTrainedConfig, sequence_length: int) -> int:
        """4 per channel for every key that a query sees: window, half a block, sinks, and retained tokens."""
        window = config.sliding_window + (config.retained_block_size - 1) / 2
        most = window + config.attention_sinks + _mean_retained(config)
        most = min(most, sequence_length)
        keys = most - most**2 / (2 * sequence_length)
        channels = config.num_attention_heads * config.head_dim
        return round(4 * keys * channels)

    @staticmethod
    def cache_bytes(config: PreTrainedConfig, tokens: int) -> int:
        """Keys, values and scores of sinks, window and retained tokens, and the positions of the latter."""
        heads = config.num_key_value_heads
        width = config.head_dim
        window = config.sliding_window + config.retained_block_size
        retained = _mean_retained(config)
        entry = 2 * width
        numbers = config.attention_sinks * entry
        numbers += window * (entry + 1)
        # a position takes 8 bytes
        numbers += retained * (entry + 3)
        return math.ceil(4 * heads * numbers)


def _mean_retained(config: PreTrainedConfig) -> float:
    """Tokens that a head retains, the mean of all heads of all layers."""
    counts = config.retained_tokens
    return sum(map(sum, counts)) / sum(map(len, counts))
