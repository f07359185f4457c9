"""HOPE with one ingredient removed, added or changed: fields of `HopeConfig` that differ from the default.

`level_periods` count in optimizer steps and `level_intermediate_sizes` in thirds of all levels together. Variants of
the paper's rule are to be compared with `paper`.
"""


def paper(**rule) -> dict:
    """The paper's rule with these of its fields changed."""
    return {"memory_rule": "paper", "paper_rule": rule}


VARIANTS = {
    "keys_and_values_from_memories": {"memory_projections": ["k", "v"]},
    "keys_from_memories": {"memory_projections": ["k"]},
    "values_from_memories": {"memory_projections": ["v"]},
    "projection_memories_at_full_rate": {"memory_projections": ["k", "v"], "projection_memory_rate": 1.0},
    "no_value_gate": {"memory_value_gate": False},
    "no_retention": {"retention_bias": [16.0, 16.0]},
    "horizons_spread": {"retention_bias": [1.0, 8.0]},
    "longer_horizons_spread": {"retention_bias": [3.0, 8.0]},
    "small_learning_rate": {"memory_learning_rate_bias": [-3.0, -3.0]},
    "spread_learning_rates": {"memory_learning_rate_bias": [-3.0, 3.0]},
    "largest_learning_rate_1_99": {"memory_learning_rate_max": 1.99},
    "heads_of_the_streams_width": {"num_memory_heads": 2},
    "chunks_of_16": {"memory_chunk_size": 16},
    "chunks_of_128": {"memory_chunk_size": 128},
    "one_level": {"level_periods": [1], "level_intermediate_sizes": [3]},
    "clocks_1_2_4": {"level_periods": [1, 2, 4], "level_intermediate_sizes": [1, 1, 1]},
    "clocks_1_4_16": {"level_periods": [1, 4, 16], "level_intermediate_sizes": [1, 1, 1]},
    "levels_side_by_side": {"level_variant": "independent"},
    "four_layers": {"num_hidden_layers": 4, "num_memory_heads": 2, "level_intermediate_sizes": [26, 26, 26]},
    "paper": paper(),
    "paper_no_erasing": paper(erase="none"),
    "paper_no_unit_targets": paper(target_norm=False),
    "paper_retention_to_zero": paper(decay_to="zero"),
    "paper_read_before_the_write": paper(read_mode="exclusive"),
    "paper_depth_2": paper(depth=2),
    "paper_depth_2_frozen_inner_layer": paper(depth=2, inner_rate=0.0),
    "paper_depth_2_inner_layer_at_full_rate": paper(depth=2, inner_rate=1.0),
    "paper_depth_2_erasing_in_both_layers": paper(depth=2, erase="both"),
}
