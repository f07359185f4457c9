"""The exceptions to transformers' common suite are frozen, and the comparison with peers sees what it should."""

from tests.hf_suite.exceptions import EXCEPTIONS
from tests.hf_suite.run import PEERS, compare, read_report

MEMORY = """
    test_generate_compilation_all_outputs test_generate_compile_model_forward_fullgraph
    test_generate_from_inputs_embeds_with_static_cache test_generate_with_static_cache
    test_static_cache_no_recompile_with_smaller_length test_recurrent_layers_mask_padding_on_continued_forward
""".split()
ATTENTION = """
    test_generate_compilation_all_outputs test_generate_compile_model_forward_fullgraph
    test_generate_from_inputs_embeds_with_static_cache test_generate_with_static_cache
    test_static_cache_no_recompile_with_smaller_length test_custom_4d_attention_mask
    test_can_load_from_already_mapped_keys test_reverse_loading_mapping
    test_eager_matches_batched_and_grouped_inference_0_fp16 test_eager_matches_batched_and_grouped_inference_1_fp32
    test_eager_matches_batched_and_grouped_inference_2_bf16 test_moe_models_record_router_logits
    test_moe_parallel_plans_shard_experts test_output_router_logits_from_config test_model_rope_with_partial_rotation
    test_recurrent_layers_mask_padding_on_continued_forward
""".split()


def test_exceptions_are_these_and_each_has_a_reason():
    assert EXCEPTIONS.keys() == PEERS.keys()
    assert sorted(EXCEPTIONS["HopeMemory"]) == sorted(MEMORY)
    assert sorted(EXCEPTIONS["HopeAttention"]) == sorted(ATTENTION)
    assert all(len(reason.split()) > 2 for reasons in EXCEPTIONS.values() for reason in reasons.values())


def test_what_a_peer_runs_must_run_here_too():
    skipped, passed = dict.fromkeys(MEMORY, "skipped"), dict.fromkeys(MEMORY, "passed")
    peer = {"Mamba2ModelTest": passed | {"test_a": "passed", "test_b": "skipped"}}
    assert compare("HopeMemory", "Mamba2ModelTest", {"HopeMemory": skipped | {"test_a": "passed"}, **peer}) == []
    faults = compare("HopeMemory", "Mamba2ModelTest", {"HopeMemory": skipped | {"test_a": "skipped"}, **peer})
    assert faults == ["HopeMemory.test_a is skipped, and Mamba2ModelTest passes it."]
    faults = compare("HopeMemory", "Mamba2ModelTest", {"HopeMemory": skipped | {"test_b": "failed"}, **peer})
    assert faults == ["HopeMemory.test_b failed."]
    needless = skipped | {MEMORY[0]: "passed"}
    faults = compare("HopeMemory", "Mamba2ModelTest", {"HopeMemory": needless, **peer})
    assert faults == [f"HopeMemory.{MEMORY[0]} is an exception without need."]
    assert compare("HopeMemory", "Mamba2ModelTest", {}) == ["HopeMemory or Mamba2ModelTest ran no test."]


def test_a_report_is_read_by_class_and_outcome(tmp_path):
    report = tmp_path / "report.xml"
    report.write_text(
        "<testsuites><testsuite>"
        '<testcase classname="tests.x.A" name="test_a"/>'
        '<testcase classname="tests.x.A" name="test_b"><skipped message="no"/></testcase>'
        '<testcase classname="B" name="test_a"><failure message="no"/></testcase>'
        '<testcase classname="B" name="test_b"><error message="no"/></testcase>'
        "</testsuite></testsuites>"
    )
    assert read_report(report) == {
        "A": {"test_a": "passed", "test_b": "skipped"},
        "B": {"test_a": "failed", "test_b": "failed"},
    }
