"""Tests of transformers' common suite that a peer of transformers runs and HOPE does not, each with the reason.

`make hf-suite` fails for a test that is missing here, and for one that is not needed here.
"""

_NO_EXPERTS = "no mixture of experts"
_NO_MAPPING = "weights have the names of the modules: nothing to convert while loading"

_AGAINST_QWEN3_NEXT = {
    "test_can_load_from_already_mapped_keys": _NO_MAPPING,
    "test_reverse_loading_mapping": _NO_MAPPING,
    "test_eager_matches_batched_and_grouped_inference_0_fp16": _NO_EXPERTS,
    "test_eager_matches_batched_and_grouped_inference_1_fp32": _NO_EXPERTS,
    "test_eager_matches_batched_and_grouped_inference_2_bf16": _NO_EXPERTS,
    "test_moe_models_record_router_logits": _NO_EXPERTS,
    "test_moe_parallel_plans_shard_experts": _NO_EXPERTS,
    "test_output_router_logits_from_config": _NO_EXPERTS,
    "test_model_rope_with_partial_rotation": "the rotation covers the whole head, as in Llama",
}

EXCEPTIONS: dict[str, dict[str, str]] = {
    # against Mamba-2
    "HopeMemory": {},
    "HopeSparseHybrid": {},
    "HopeAttention": _AGAINST_QWEN3_NEXT
    | {"test_recurrent_layers_mask_padding_on_continued_forward": "no recurrent layers"},
    "HopeHybrid": _AGAINST_QWEN3_NEXT,
}
