"""One compiled graph of the whole forward computes what the plain model does; one serves every generated token."""

import pytest
import torch
from mixers import LAYERS, MEMORIES, SPARSE
from transformers.generation import CompileConfig

# Faults of torch's own: what Inductor imports, and how the tracer meets an autograd function.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]

# two chunks, of which the first is recomputed in the backward pass
SMALL = dict(num_hidden_layers=1, memory_chunk_size=16, recompute_chunks=1)
MODELS = {"memory": {}, "paper-1": MEMORIES["paper-1"], "attention": dict(layer_types=["full_attention"])}


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def random_ids(*shape, seed=1):
    return torch.randint(62, shape, generator=torch.Generator().manual_seed(seed))


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
@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
def test_the_forward_and_its_gradients_are_one_graph(tiny_model, options):
    model = tiny_model(**options, **SMALL)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    inputs = {"input_ids": random_ids(2, 19)}
    (logits, gradients), (ours, own) = step(model, model, **inputs), step(model, compiled, **inputs)
    torch.testing.assert_close(ours, logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(own, gradients, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["memory", "attention"])
def test_one_graph_serves_every_mask(tiny_model, kind):
    model = tiny_model(**MODELS[kind], **SMALL)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    ids = random_ids(2, 19)
    for mask in (mask_of(19, 11), mask_of(4, 17), mask_of(19, 19)):
        ours, plain = compiled(ids, attention_mask=mask).logits, model(ids, attention_mask=mask).logits
        torch.testing.assert_close(ours[mask.bool()], plain[mask.bool()], rtol=1e-5, atol=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.long
@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
def test_compiled_code_computes_the_same(tiny_model, options):
    if "memory_rule" in options:
        # Inductor has had wrong gradients where errors are clipped, which rounding hides in float32.
        options = options | dict(paper_rule={"error_clip": 0.5})
    model = tiny_model(torch.float64, **options, **SMALL)
    compiled = torch.compile(model, fullgraph=True)
    inputs = {"input_ids": random_ids(2, 19)}
    (logits, gradients), (ours, own) = step(model, model, **inputs), step(model, compiled, **inputs)
    torch.testing.assert_close(ours, logits, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(own, gradients, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind, rows", [("memory", 1), *((kind, 2) for kind in LAYERS)])
def test_one_graph_serves_every_generated_token(tiny_model, kind, rows):
    model = tiny_model(**LAYERS[kind])
    options = dict(
        max_new_tokens=14, do_sample=False, pad_token_id=63, return_dict_in_generate=True, output_logits=True
    )
    options["attention_mask"] = mask_of(11, 19)[:rows]
    ids = random_ids(rows, 19)
    plain = model.generate(ids, **options)
    compile_config = CompileConfig(fullgraph=True, dynamic=False, backend="aot_eager", mode=None)
    # on a GPU `generate` needs no word
    compile_config._compile_all_devices = True
    made = model.generate(ids, cache_implementation="static", compile_config=compile_config, **options)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert torch.equal(made.sequences, plain.sequences)
    torch.testing.assert_close(torch.stack(made.logits), torch.stack(plain.logits), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_documents_and_continued_texts_stay_outside_the_graph(tiny_model):
    model = tiny_model(**SMALL)
    compiled = torch.compile(model, backend="aot_eager")
    ids, positions = random_ids(2, 19), torch.tensor([[*range(7), *range(12)], [*range(3), *range(16)]])
    whole = model(ids, position_ids=positions)
    torch.testing.assert_close(compiled(ids, position_ids=positions).logits, whole.logits)
    torch._dynamo.reset()
    strict = torch.compile(model, backend="aot_eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="documents, earlier calls and other lengths"):
        strict(ids, position_ids=positions)
    cache = compiled(ids[:, :5], use_cache=True).past_key_values
    for start, stop in ((5, 6), (6, 19)):
        out = compiled(ids[:, start:stop], past_key_values=cache)
    torch.testing.assert_close(out.logits, model(ids).logits[:, 6:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", [{}, SPARSE | dict(layer_types=["sparse_attention"])], ids=["memory", "sparse"])
def test_texts_of_other_lengths_are_read_outside_the_graph(tiny_model, options):
    """Traced, the chunks of a length that may vary never ended."""
    model = tiny_model(**SMALL, **options)
    compiled, graphs = torch.compile(model, backend="eager"), []
    for length in (20, 30, 41, 53, 64):
        inputs = {"input_ids": random_ids(2, length), "attention_mask": torch.ones(2, length, dtype=torch.long)}
        inputs["attention_mask"][0, :7] = 0
        (logits, gradients), (ours, own) = step(model, model, **inputs), step(model, compiled, **inputs)
        real = inputs["attention_mask"].bool()
        torch.testing.assert_close(ours[real], logits[real], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(own, gradients, rtol=1e-4, atol=1e-5)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    # a graph of any length for each of the functions around the memories
    assert graphs[3] == graphs[4]
