"""The exceptions to transformers' common suite are frozen, and the comparison with peers finds what it should."""

from tests.hf_suite.exceptions import EXCEPTIONS
from tests.hf_suite.run import PEERS, compare, read_report


def test_each_exception_has_a_reason():
    assert EXCEPTIONS.keys() == PEERS.keys() and EXCEPTIONS["HopeMemory"] == {}
    assert all(len(reason.split()) > 2 for reasons in EXCEPTIONS.values() for reason in reasons.values())


def test_what_a_peer_runs_must_run_here_too():
    names = [*EXCEPTIONS["HopeAttention"]]
    skipped, passed = dict.fromkeys(names, "skipped"), dict.fromkeys(names, "passed")
    ours, theirs = "HopeAttention", "Qwen3NextModelTest"
    peer = {theirs: passed | {"test_a": "passed", "test_b": "skipped"}}
    assert compare(ours, theirs, {ours: skipped | {"test_a": "passed"}, **peer}) == []
    faults = compare(ours, theirs, {ours: skipped | {"test_a": "skipped"}, **peer})
    assert faults == ["HopeAttention.test_a is skipped, and Qwen3NextModelTest passes it."]
    faults = compare(ours, theirs, {ours: skipped | {"test_b": "failed"}, **peer})
    assert faults == ["HopeAttention.test_b failed."]
    needless = skipped | {names[0]: "passed"}
    faults = compare(ours, theirs, {ours: needless, **peer})
    assert faults == [f"HopeAttention.{names[0]} is an exception without need."]
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
