"""The exceptions to transformers' common suite are frozen, and the comparison with peers finds what it should."""

from tests.hf_suite.exceptions import EXCEPTIONS
from tests.hf_suite.run import PEERS, compare, read_report

ATTENTION = """
    test_can_load_from_already_mapped_keys test_reverse_loading_mapping
    test_eager_matches_batched_and_grouped_inference_0_fp16 test_eager_matches_batched_and_grouped_inference_1_fp32
    test_eager_matches_batched_and_grouped_inference_2_bf16 test_moe_models_record_router_logits
    test_moe_parallel_plans_shard_experts test_output_router_logits_from_config test_model_rope_with_partial_rotation
    test_recurrent_layers_mask_padding_on_continued_forward
""".split()
HYBRID = [name for name in ATTENTION if "recurrent_layers" not in name]


def test_exceptions_are_these_and_each_has_a_reason():
    assert EXCEPTIONS.keys() == PEERS.keys()
    assert EXCEPTIONS["HopeMemory"] == {}
    assert sorted(EXCEPTIONS["HopeAttention"]) == sorted(ATTENTION)
    assert sorted(EXCEPTIONS["HopeHybrid"]) == sorted(HYBRID)
    assert all(len(reason.split()) > 2 for reasons in EXCEPTIONS.values() for reason in reasons.values())


def test_what_a_peer_runs_must_run_here_too():
    skipped, passed = dict.fromkeys(ATTENTION, "skipped"), dict.fromkeys(ATTENTION, "passed")
    ours, theirs = "HopeAttention", "Qwen3NextModelTest"
    peer = {theirs: passed | {"test_a": "passed", "test_b": "skipped"}}
    assert compare(ours, theirs, {ours: skipped | {"test_a": "passed"}, **peer}) == []
    faults = compare(ours, theirs, {ours: skipped | {"test_a": "skipped"}, **peer})
    assert faults == ["HopeAttention.test_a is skipped, and Qwen3NextModelTest passes it."]
    faults = compare(ours, theirs, {ours: skipped | {"test_b": "failed"}, **peer})
    assert faults == ["HopeAttention.test_b failed."]
    needless = skipped | {ATTENTION[0]: "passed"}
    faults = compare(ours, theirs, {ours: needless, **peer})
    assert faults == [f"HopeAttention.{ATTENTION[0]} is an exception without need."]
    assert compare(ours, theirs, {}) == ["HopeAttention or Qwen3NextModelTest ran no test."]


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
