"""Operators on fake tensors run on meta tensors, without the checks of torch's `FakeTensorMode`, and give the same."""

from models import small_config

from hope_hf.plan import as_if_real
from hope_hf.plan.launch import Mode, StepOptions
from hope_hf.plan.tracer import Layer, Tracer

KINDS = ["hope_memory", "sparse_attention", "window_attention", "retaining_attention"]
SIZES = {"sliding_window": 20, "attention_sinks": 4, "num_key_value_heads": 1, "recompute_chunks": 2}
SIZES["retained_block_size"] = 32


def test_operators_on_meta_tensors_allocate_what_fake_tensor_mode_says(monkeypatch):
    config = small_config("tiny", num_hidden_layers=4, layer_types=KINDS, **SIZES)
    enter = as_if_real.in_kernel_invocation_manager
    runs = []

    def counted(fake):
        runs.append(fake)
        return enter(fake)

    def traced() -> list:
        tracer = Tracer(config, StepOptions(1, 1), Mode("bf16", is_cast=True), "none")
        parts = [tracer.block(Layer(kind), 2, 200, config.recompute_chunks) for kind in KINDS]
        return [*parts, tracer.ends(2, 200, in_place=True)]

    monkeypatch.setattr(as_if_real, "in_kernel_invocation_manager", counted)
    on_meta = traced()
    # most operators: that is why a plan takes seconds
    assert len(runs) > 0.7 * sum(part.operators for part in on_meta[:4])
    monkeypatch.setattr(as_if_real, "_is_as_of_meta", lambda function: False)
    runs.clear()
    assert traced() == on_meta and not runs
