"""The comparison with PEFT's tests finds what Mamba-2 passes and ours do not, except prefix tuning of HOPE."""

from tests.peft_suite.run import compare, tiny_models

PASSED = {"test_a[LoraConfig]": "passed", "test_a[PrefixTuningConfig]": "passed", "test_prefix_tuning_b": "passed"}


def test_what_the_peer_passes_must_pass_here_too():
    assert compare("HOPE", PASSED, PASSED) == compare("HOPE", PASSED, dict.fromkeys(PASSED, "failed")) == []
    for outcome in ("failed", "skipped"):
        faults = compare("HOPE", dict.fromkeys(PASSED, outcome), PASSED)
        assert faults == [f"HOPE: test_a[LoraConfig] is {outcome}, and Mamba-2 passes it."]
        assert len(compare("Hope-Attention", dict.fromkeys(PASSED, outcome), PASSED)) == 3
    assert compare("HOPE", {}, PASSED) == compare("HOPE", PASSED, {}) == ["HOPE or Mamba-2 ran no test."]


def test_the_models_are_alike_in_width_and_depth():
    models = tiny_models()
    assert list(models) == ["HOPE", "Hope-Attention", "Mamba-2"]
    assert len({(m.config.hidden_size, m.config.num_hidden_layers, m.config.vocab_size) for m in models.values()}) == 1
