"""PyTorch HOPE model: mixers and levels in transformers' model classes."""

from itertools import islice
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import MODEL_MAPPING, AutoModel
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.dynamic_module_utils import custom_object_save
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
    GradientCheckpointingLayer,
)
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .attention import HopeAttention, HopeRotaryEmbedding
from .backends import FAST, asked_kernels, borrow_fast_paths
from .cache_hope import CACHE_NAME, takes_cache
from .calls import Call, FreezesMemories, check_labels, prepare_call
from .configuration_hope import HopeConfig
from .continuum import CONTINUA, ContinuumMemory
from .generation_hope import HopeGenerationMixin
from .layers import HopeRMSNorm
from .level_reading import LearnsFromText
from .loss import HopeHead, with_ignored
from .mixers import MIXERS

# before a model of this code is made
borrow_fast_paths()

# Above this width the head starts with smaller weights, or the first loss exceeds that of a uniform guess.
_HEAD_WIDTH = 768


class HopeBlock(GradientCheckpointingLayer):
    """A mixer, then the continuum memory, each with its normalisation and residual connection.

    The mixer returns its output and its state after the call (`None` without a state); `context` is the same for all
    blocks. It does not change the given state: the model writes the cache, so that a checkpointed block can be
    recomputed in the backward pass without a second write. Without gradients, attention writes into the cache itself.
    """

    def __init__(self, config: HopeConfig, layer_idx: int):
        super().__init__()
        self.kernels = asked_kernels()
        self.input_layernorm = HopeRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mixer = MIXERS[config.layer_types[layer_idx]](config, layer_idx)
        self.continuum = CONTINUA[config.level_variant](config)
        self.mixer.o_proj.ends_branch = True
        for level in self.continuum.levels:
            level.down_proj.ends_branch = True

    def forward(
        self,
        hidden_states: Tensor,
        state: tuple | None = None,
        deltas: dict[int, dict] | None = None,
        **context,
    ) -> tuple[Tensor, tuple | None]:
        """Hidden states [B, T, hidden_size] of the next block, and the mixer's state.

        Args:
            hidden_states: [B, T, hidden_size].
            state: the mixer's state.
            deltas: what the text so far has taught this block's levels (`level_learning.deltas_by_block`).
            context: what `Mixer.needs` names.
        """
        # of a single token, see `hope_hf.fast.one_token`
        fast_mixer = fast_levels = None
        token_paths = FAST.get("token")
        # they look at tracers and transforms by themselves, once a token
        if token_paths is not None and self.kernels != "plain":
            fast_mixer, fast_levels = token_paths(self, hidden_states, state)
        if fast_mixer is None:
            normed = self.input_layernorm(hidden_states)
            # attention also returns its weights, which transformers records
            mixed, state, *_ = self.mixer(normed, state, **context)
            hidden_states = hidden_states + mixed
        else:
            hidden_states, state = fast_mixer.read(hidden_states, state, context["chunks"])
        if fast_levels is None or deltas:
            hidden_states = self.continuum(hidden_states, deltas)
        else:
            hidden_states = fast_levels(hidden_states)
        return hidden_states, state


class HopePreTrainedModel(FreezesMemories, PreTrainedModel):
    """Base of the HOPE models: initialisation, and attributes that transformers' tools read."""

    config: HopeConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    model_tags = ["hope", "nested-learning"]
    _no_split_modules = ["HopeBlock"]
    _skip_keys_device_placement = ["cache", "past_key_values"]
    _can_record_outputs = {"hidden_states": HopeBlock, "attentions": OutputRecorder(HopeAttention, index=2)}
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True

    @property
    def _is_stateful(self) -> bool:
        """Whether a text cannot be read back token by token, as assisted generation needs."""
        return self.config.keeps_state

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """All initial values of a HOPE model.

        | parameters | initial value |
        |---|---|
        | linear maps, embedding | normal, `initializer_range` |
        | queries, keys, values of sparse attention beside memories | normal, `1 / sqrt(hidden_size)` |
        | o_proj, down_proj | normal, `initializer_range / sqrt(2 * num_hidden_layers)` |
        | embedding and head wider than 768 | times `sqrt(768 / hidden_size)` |
        | norms, level mix, value shares | 1 |
        | initial memories | 0; paper's rule: normal, 0.05 / sqrt(width), inner layers orthogonal times 2 |
        | convolutions | uniform, +-1/sqrt(kernel); delta rule: the token's own weight in its key a tenth |
        | delta rule: projection and convolution of queries | those of keys, the convolution one token later |
        | gates | see `MemoryGates` |
        | compression of sparse attention | the mean |
        """
        super()._init_weights(module)
        std = self.config.initializer_range
        if hasattr(module, "begins_as"):
            other, change = module.begins_as  # defined first, so it is already initialised
            init.copy_(module.weight, change(other.weight))
        elif getattr(module, "has_initial_values", False):
            module.reset_parameters()
        elif getattr(module, "ends_branch", False):
            # Keeps the scale of the residual stream at any depth, with two branches per layer. A flag on the Linear,
            # because `_init_weights` is only called for modules that own parameters.
            branches = 2 * self.config.num_hidden_layers
            init.normal_(module.weight, std=std / branches**0.5)
        elif getattr(module, "keeps_scale", False):
            # memories normalise values, attention does not
            init.normal_(module.weight, std=module.in_features**-0.5)
        elif isinstance(module, nn.Embedding) or getattr(module, "is_head", False):
            factor = min(1.0, _HEAD_WIDTH / self.config.hidden_size)
            init.normal_(module.weight, std=std * factor**0.5)

    def compile(self, *args, **kwargs):
        """`nn.Module.compile` of the parts that are the same for every call: with memories, the blocks' levels.

        `torch.compile(model)` has mixers in the graph, on torch's operators, and takes eight times as long to compile;
        here their kernels run uncompiled (docs/log).
        """
        # CODEPATH: 'full_attention' layers alone keep no state.
        if not self.config.keeps_state:
            return super().compile(*args, **kwargs)
        for module in self.modules():
            if isinstance(module, ContinuumMemory):
                module.compile(*args, **kwargs)

    def add_model_tags(self, tags: list[str] | str) -> None:
        # copied, since transformers would append to the list of the class
        self.model_tags = [*self.model_tags]
        super().add_model_tags(tags)

    def save_pretrained(self, save_directory, is_main_process: bool = True, **kwargs):
        """As in transformers, but the configuration names the code of every Auto class."""
        own = {auto: f"modeling_hope.{model_class.__name__}" for auto, model_class in AUTO_CLASSES.items()}
        self.config.auto_map = {**own, **(getattr(self.config, "auto_map", None) or {})}
        wrapped = type(self)
        if not wrapped.__module__.startswith("torch."):
            return super().save_pretrained(save_directory, is_main_process=is_main_process, **kwargs)
        # `fully_shard` derives a class from ours in torch's module, whose files would be copied as the model's code
        if is_main_process:
            Path(save_directory).mkdir(parents=True, exist_ok=True)
            own_class = next(cls for cls in wrapped.__mro__ if not cls.__module__.startswith("torch."))
            custom_object_save(object.__new__(own_class), save_directory, config=self.config)
        wrapped._auto_class = None
        try:
            return super().save_pretrained(save_directory, is_main_process=is_main_process, **kwargs)
        finally:
            del wrapped._auto_class


class HopeModel(HopePreTrainedModel):
    """HOPE without a head: embedding, blocks, final normalisation.

    Example:

    ```python
    >>> import torch
    >>> from hope_hf import HopeConfig, HopeModel
    >>> model = HopeModel(HopeConfig(vocab_size=100, hidden_size=64, num_hidden_layers=2))
    >>> model(input_ids=torch.tensor([[1, 2, 3]])).last_hidden_state.shape
    torch.Size([1, 3, 64])
    ```
    """

    def __init__(self, config: HopeConfig):
        # `from_pretrained(..., field=value)` sets fields that are not checked yet
        config.validate()
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList()
        for layer_idx in range(config.num_hidden_layers):
            self.layers.append(HopeBlock(config, layer_idx))
        self.norm = HopeRMSNorm(config.hidden_size, config.rms_norm_eps)
        # CODEPATH: layers that need positions, as attention does, or none.
        self.rotary_emb = HopeRotaryEmbedding(config) if config.has_positions else None
        self.gradient_checkpointing = False
        # read by every call
        self.needs = config.needs
        self.has_state = config.keeps_state
        self.post_init()

    @takes_cache
    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        use_cache: bool | None = None,
        freeze_memories: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPast:
        """Hidden states [B, T, hidden_size] after the last block.

        Args:
            input_ids: [B, T]; or `inputs_embeds` [B, T, hidden_size] instead.
            attention_mask: [B, columns seen + T]: 0 for padding, which does not change a memory; 1 for tokens, or the
                number of every token's document. A model with softmax attention alone also takes 4-D masks.
            position_ids: [B, T]; position 0 begins a document, whose memories start from their initial state.
            cache: a `HopeCache`, which is read and updated.
            use_cache: whether to make a cache if none is given.
            freeze_memories: whether memories neither write nor forget; `None`: if the call is in `frozen_memories`.
            kwargs: boundaries of documents (`documents.BOUNDARIES`), and options of the attention's kernels, among
                others.

        Raises:
            ValueError: the arguments do not fit the model, the cache or the tokens.
        """
        call = prepare_call(
            self,
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            freeze_memories=freeze_memories,
            options=kwargs,
        )
        forget_text = FAST.get("forget_text")
        if forget_text is not None and call.hidden_states.shape[1] == 1:
            forget_text(self.layers, call.cache)
        hidden_states = call.hidden_states
        without_graph = range(call.graph_from)
        with_graph = range(call.graph_from, len(self.layers))
        if without_graph:
            with torch.no_grad():
                hidden_states = self._read_blocks(call, hidden_states, without_graph)
        hidden_states = self._read_blocks(call, hidden_states, with_graph)
        hidden_states = self.norm(hidden_states)
        return BaseModelOutputWithPast(last_hidden_state=hidden_states, **{CACHE_NAME: call.cache})

    def _read_blocks(self, call: Call, hidden_states: Tensor, indices: range) -> Tensor:
        """Hidden states [B, T, hidden_size] after some blocks, whose states go back to the layers of the cache."""
        for index, block in islice(enumerate(self.layers), indices.start, indices.stop):
            layer = call.cache_layers[index] if call.cache_layers else None
            state = getattr(layer, "state", None)
            deltas = call.deltas.get(index)
            hidden_states, state = block(hidden_states, state, deltas, **call.context)
            if layer is not None and state is not None:
                layer.update_state(state, call.counts_after)
        return hidden_states


class HopeForCausalLM(LearnsFromText, HopePreTrainedModel, HopeGenerationMixin):
    """HOPE with a language-modelling head.

    Example:

    ```python
    >>> import torch
    >>> from hope_hf import HopeConfig, HopeForCausalLM
    >>> model = HopeForCausalLM(HopeConfig(vocab_size=100, hidden_size=64, num_hidden_layers=2))
    >>> ids = torch.tensor([[1, 2, 3]])
    >>> model(input_ids=ids, labels=ids).loss.backward()
    >>> model.generate(ids, max_new_tokens=2, do_sample=False).shape
    torch.Size([1, 5])
    ```
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _pp_plan = {"lm_head": (["hidden_states"], ["logits"])}
    _fsdp_plan = {"lm_head": "keep_full_weight"}

    def __init__(self, config: HopeConfig):
        super().__init__(config)
        self.model = HopeModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = HopeHead(config.hidden_size, config.vocab_size)
        self.post_init()

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        # `resize_token_embeddings` passes torch's own linear map, which computes no loss
        if type(new_embeddings) is nn.Linear and new_embeddings.bias is None:
            new_embeddings.__class__ = HopeHead
        super().set_output_embeddings(new_embeddings)

    def flops_per_token(self, sequence_length: int) -> int:
        """Matrix FLOPs of forward and backward per token of a text of `sequence_length` tokens.

        6 per parameter of a matrix that multiplies every token (the head counts, the embedding does not), and three
        times the forward cost of the mixers' own products (`HopeConfig.mixing_flops_per_token`). A test compares both
        with torch's counter, which leaves out triangular solves. Recomputation is not counted.
        """
        matrices = 0
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2 and "embed_tokens" not in name:
                matrices += parameter.numel()
        if self.config.tie_word_embeddings:
            matrices += self.lm_head.weight.numel()
        return 6 * matrices + 3 * self.config.mixing_flops_per_token(sequence_length)

    @takes_cache
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        skip_logits: bool = False,
        learn: bool = False,
        freeze_memories: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> CausalLMOutputWithPast:
        """Logits [B, T, vocab_size] and, with labels, the mean next-token loss in nats.

        Args:
            input_ids: [B, T], int64; or `inputs_embeds` [B, T, hidden_size] instead.
            attention_mask: [B, columns seen + T]: 0 for padding, which does not change a memory; 1 for tokens, or the
                number of every token's document. A model with softmax attention alone also takes 4-D masks.
            position_ids: [B, T]; position 0 begins a document, whose memories start from their initial state.
            cache: a `HopeCache`, which is read and updated.
            labels: [B, T], the inputs themselves (they are shifted here); -100 is not scored.
            use_cache: whether to make a cache if none is given.
            logits_to_keep: number of last positions, or their indices, for which to compute logits; 0 for all.
            skip_logits: with labels, return the loss without logits, which are then never held for all tokens.
            learn: whether levels learn from the tokens while they are read (`config.level_learning`). What they learn
                is kept in `cache`; the weights do not change.
            freeze_memories: whether memories neither write nor forget; `None`: if the call is in `frozen_memories`.
            kwargs: `num_items_in_batch`, the number of scored tokens that divides the summed loss; `ignore_index`,
                another label that is not scored; and the `kwargs` of `HopeModel.forward`.

        Raises:
            ValueError: the arguments do not fit the model, the cache or the tokens.
        """
        if skip_logits and labels is None:
            raise ValueError("skip_logits=True returns the loss alone: give labels, or leave skip_logits out")
        ignore_index = kwargs.pop("ignore_index", None)
        if ignore_index is not None:
            labels = with_ignored(labels, ignore_index)
            kwargs["shift_labels"] = with_ignored(kwargs.get("shift_labels"), ignore_index)
        columns = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        arguments = dict(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            freeze_memories=freeze_memories,
        )
        if learn:
            columns_with_logits = None if skip_logits else columns
            return self._learn(**arguments, labels=labels, columns_with_logits=columns_with_logits, **kwargs)
        outputs = self.model(**arguments, **kwargs)
        if labels is not None:
            check_labels(labels, self.config.vocab_size)
        loss = logits = None
        # a head that PEFT wraps, or whose vocabulary is sharded, computes logits only; another loss may need them
        has_loss = isinstance(self.lm_head, HopeHead) and self.tp_size is None
        if skip_logits and has_loss and self.loss_function is ForCausalLMLoss:
            loss = self.lm_head.mean_loss(outputs.last_hidden_state, labels, **kwargs)
        else:
            logits = self.lm_head(outputs.last_hidden_state[:, columns])
            if labels is not None:
                loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=None if skip_logits else logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            **{CACHE_NAME: getattr(outputs, CACHE_NAME)},
        )


class OverTrunk:
    """Base of the heads that build their trunk through AutoModel.

    From a local folder transformers loads configuration and model as two copies of the code. No import registers the
    two together, so the first model registers them.
    """

    def __init__(self, config: HopeConfig):
        if type(config) not in MODEL_MAPPING:
            AutoModel.register(type(config), HopeModel)
        super().__init__(config)


class HopeForSequenceClassification(OverTrunk, GenericForSequenceClassification, HopePreTrainedModel):
    """HOPE with a linear head on the last token that is not padding.

    Example:

    ```python
    >>> import torch
    >>> from hope_hf import HopeConfig, HopeForSequenceClassification
    >>> config = HopeConfig(vocab_size=100, hidden_size=64, num_hidden_layers=2, num_labels=3)
    >>> HopeForSequenceClassification(config)(torch.tensor([[1, 2, 3]])).logits.shape
    torch.Size([1, 3])
    ```
    """


class HopeForTokenClassification(OverTrunk, GenericForTokenClassification, HopePreTrainedModel):
    """HOPE with a linear head on every token; a token's scores depend only on itself and the tokens before it.

    Example:

    ```python
    >>> import torch
    >>> from hope_hf import HopeConfig, HopeForTokenClassification
    >>> config = HopeConfig(vocab_size=100, hidden_size=64, num_hidden_layers=2, num_labels=5)
    >>> HopeForTokenClassification(config)(torch.tensor([[1, 2, 3]])).logits.shape
    torch.Size([1, 3, 5])
    ```
    """


class HopeForQuestionAnswering(OverTrunk, GenericForQuestionAnswering, HopePreTrainedModel):
    """HOPE with two scores per token, for the answer's first and last token.

    Example:

    ```python
    >>> import torch
    >>> from hope_hf import HopeConfig, HopeForQuestionAnswering
    >>> config = HopeConfig(vocab_size=100, hidden_size=64, num_hidden_layers=2)
    >>> HopeForQuestionAnswering(config)(torch.tensor([[1, 2, 3]])).start_logits.shape
    torch.Size([1, 3])
    ```
    """


# The model class of each Auto class.
AUTO_CLASSES = {
    "AutoModel": HopeModel,
    "AutoModelForCausalLM": HopeForCausalLM,
    "AutoModelForSequenceClassification": HopeForSequenceClassification,
    "AutoModelForTokenClassification": HopeForTokenClassification,
    "AutoModelForQuestionAnswering": HopeForQuestionAnswering,
}

__all__ = [
    "HopeForCausalLM",
    "HopeForQuestionAnswering",
    "HopeForSequenceClassification",
    "HopeForTokenClassification",
    "HopeModel",
    "HopePreTrainedModel",
]
