"""HOPE with one ingredient taken out, added or changed: fields of `HopeConfig` that differ from the default.

`level_periods` count in optimizer steps and `level_intermediate_sizes` in thirds of all levels together.
"""

VARIANTS = {
    "no_self_modification": {"projection_memory_rate": 0.0},
    "full_rate_projections": {"projection_memory_rate": 1.0},
    "no_delta_rule": {"memory_erase": "none"},
    "momentum": {"memory_momentum": True},
    "no_retention": {"retention_bias_min": 16.0, "retention_bias_max": 16.0},
    "retention_to_zero": {"memory_decay_to": "zero"},
    "static_k": {"adaptive_k": False},
    "static_v": {"adaptive_v": False},
    "adaptive_q": {"adaptive_q": True},
    "gates_from_memories": {"gate_mode": "memory"},
    "small_learning_rate": {"memory_learning_rate_bias": -3.0},
    "largest_learning_rate_2": {"memory_learning_rate_max": 2.0},
    "heads_of_the_streams_width": {"num_attention_heads": 2},
    "longer_horizons": {"retention_bias_min": 3.0},
    "depth_2": {"memory_depth": 2},
    "depth_2_frozen_inner_layer": {"memory_depth": 2, "inner_layer_rate": 0.0},
    "depth_2_inner_layer_at_full_rate": {"memory_depth": 2, "inner_layer_rate": 1.0},
    "depth_2_delta_rule_on_both_layers": {"memory_depth": 2, "memory_erase": "both"},
    "depth_2_expansion_2": {"memory_depth": 2, "memory_expansion": 2},
    "depth_2_expansion_4": {"memory_depth": 2, "memory_expansion": 4},
    "read_before_the_write": {"memory_read_mode": "exclusive"},
    "read_at_the_chunk_start": {"memory_read_mode": "start"},
    "content_chunks_of_16": {"memory_chunk_size": 16},
    "content_chunks_of_128": {"memory_chunk_size": 128},
    "projection_chunks_of_16": {"projection_chunk_size": 16},
    "projection_chunks_of_128": {"projection_chunk_size": 128},
    "one_level": {"level_periods": [1], "level_intermediate_sizes": [3]},
    "clocks_1_2_4": {"level_periods": [1, 2, 4], "level_intermediate_sizes": [1, 1, 1]},
    "clocks_1_4_16": {"level_periods": [1, 4, 16], "level_intermediate_sizes": [1, 1, 1]},
    "levels_side_by_side": {"level_variant": "independent"},
    "four_layers": {"num_hidden_layers": 4, "num_attention_heads": 2, "level_intermediate_sizes": [26, 26, 26]},
    "no_unit_targets": {"memory_target_norm": False},
}
