"""One compiled graph of the whole forward computes what the plain model does; one serves every generated token."""

import time

import pytest
import torch
from mixers import MEMORIES, MIXED, SIZES, random_ids
from transformers.generation import CompileConfig

from hope_hf.model import memory_paper

# Faults of torch's own: what Inductor imports, and how the tracer meets an autograd function.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]

# two chunks, of which the first is recomputed in the backward pass
SMALL = dict(num_hidden_layers=1, memory_chunk_size=16, recompute_chunks=1)
# layers whose loops depend on the text, a few at a time; all of them in the long tests
SPARSE = SIZES | dict(layer_types=["hope_memory", "sparse_attention"], num_hidden_layers=2)
WINDOW = MIXED | dict(layer_types=["hope_memory", "window_attention", "retaining_attention"], num_hidden_layers=3)
ALL = MIXED | dict(num_hidden_layers=4)
ALL["layer_types"] = ["hope_memory", "sparse_attention", "window_attention", "retaining_attention"]
MODELS = {"memory": {}, "paper-1": MEMORIES["paper-1"], "attention": dict(layer_types=["full_attention"])}


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def step(model, call, **inputs):
    """Logits, and all gradients of the loss."""
    model.zero_grad()
    out = call(**inputs, labels=inputs["input_ids"], use_cache=False)
    out.loss.backward()
    return out.logits.detach(), [parameter.grad for parameter in model.parameters()]


def mask_of(*real):
    """Left padding."""
    return torch.stack([(torch.arange(19) >= 19 - count).long() for count in real])


# The tracer's own graph is run as it is: what the default suite can afford. Inductor's code is in the long test.
def test_one_graph_serves_the_forward_and_its_gradients_of_every_mask(tiny_model):
    model = tiny_model(**SMALL | dict(num_hidden_layers=2, layer_types=["hope_memory", "full_attention"]))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for mask in (mask_of(19, 11), mask_of(4, 17)):
        inputs = {"input_ids": random_ids(2, 19), "attention_mask": mask}
        logits, gradients = step(model, model, **inputs)
        found, found_gradients = step(model, compiled, **inputs)
        torch.testing.assert_close(found[mask.bool()], logits[mask.bool()], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found_gradients, gradients, rtol=1e-4, atol=1e-5)
    assert graphs() == 1


@pytest.mark.long
@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
def test_compiled_code_computes_the_same(tiny_model, options, monkeypatch):
    # Inductor has had wrong gradients where errors are clipped, which rounding hides in float32.
    monkeypatch.setattr(memory_paper, "ERROR_CLIP", 0.5)
    model = tiny_model(torch.float64, **options, **SMALL)
    compiled = torch.compile(model, fullgraph=True)
    inputs = {"input_ids": random_ids(2, 19)}
    expected = step(model, model, **inputs)
    torch.testing.assert_close(step(model, compiled, **inputs), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [WINDOW, pytest.param(ALL, marks=pytest.mark.long)], ids=["window", "all"])
def test_one_graph_serves_every_generated_token(tiny_model, options):
    model = tiny_model(**SMALL | options)
    asked = dict(max_new_tokens=9, do_sample=False, pad_token_id=63, return_dict_in_generate=True, output_logits=True)
    asked["attention_mask"] = mask_of(11, 19)
    ids = random_ids(2, 19)
    plain = model.generate(ids, **asked)
    compile_config = CompileConfig(fullgraph=True, dynamic=False, backend="aot_eager", mode=None)
    # on a GPU `generate` needs no word
    compile_config._compile_all_devices = True
    out = model.generate(ids, cache_implementation="static", compile_config=compile_config, **asked)
    assert graphs() == 1
    assert torch.equal(out.sequences, plain.sequences)
    torch.testing.assert_close(out.logits, plain.logits, rtol=1e-5, atol=1e-5)


def rows_of_documents(length):
    """Positions of two rows, of two and three documents."""
    parts = ([length // 3, length - length // 3], [5, 2, length - 7])
    return torch.stack([torch.cat([torch.arange(part) for part in row]) for row in parts])


@pytest.mark.parametrize("options", [SPARSE, pytest.param(ALL, marks=pytest.mark.long)], ids=["sparse", "all"])
def test_one_graph_serves_every_length_in_training(tiny_model, options):
    model = tiny_model(torch.float64, **SMALL | options)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for length in (20, 30, 41):
        ids = random_ids(2, length)
        inputs = {"input_ids": ids, "position_ids": rows_of_documents(length)}
        _, gradients = step(model, model, **inputs)
        start = time.process_time()
        torch.testing.assert_close(step(model, compiled, **inputs)[1], gradients, rtol=0, atol=1e-11)
        seconds = time.process_time() - start
    # one for the first length, and one for all others
    assert graphs() <= 2
    assert seconds <= 1


def test_a_recomputed_block_is_in_the_graph(tiny_model):
    model = tiny_model(torch.float64, **SMALL).train()
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False})
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    inputs = {"input_ids": random_ids(2, 19), "attention_mask": mask_of(19, 11)}
    _, gradients = step(model, model, **inputs)
    torch.testing.assert_close(step(model, compiled, **inputs)[1], gradients, rtol=0, atol=1e-11)
