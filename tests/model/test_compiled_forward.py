"""One compiled graph of the whole forward computes what the plain model does; one serves every generated token."""

import time

import pytest
import torch
from mixers import HYBRID, MEMORIES, MIXED
from transformers import StaticCache
from transformers.generation import CompileConfig

from hope_hf.model import memory_paper
from hope_hf.model.cache_hope import CACHE_NAME

# Faults of torch's own: what Inductor imports, and how the tracer meets an autograd function.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]

# two chunks, of which the first is recomputed in the backward pass
SMALL = dict(num_hidden_layers=1, memory_chunk_size=16, recompute_chunks=1)
# layers whose loops depend on the text
LOOPS = MIXED | dict(num_hidden_layers=3, layer_types=["hope_memory", "sparse_attention", "window_attention"])
QUICK_AND_ALL = [pytest.param({}, id="memory"), pytest.param(LOOPS, id="all", marks=pytest.mark.long)]
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
def test_compiled_code_computes_the_same(tiny_model, options, monkeypatch):
    # Inductor has had wrong gradients where errors are clipped, which rounding hides in float32.
    monkeypatch.setattr(memory_paper, "ERROR_CLIP", 0.5)
    model = tiny_model(torch.float64, **options, **SMALL)
    compiled = torch.compile(model, fullgraph=True)
    inputs = {"input_ids": random_ids(2, 19)}
    (logits, gradients), (ours, own) = step(model, model, **inputs), step(model, compiled, **inputs)
    torch.testing.assert_close(ours, logits, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(own, gradients, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("options, rows", [({}, 1), (MIXED, 2)], ids=["memory", "mixed"])
def test_one_graph_serves_every_generated_token(tiny_model, options, rows):
    model = tiny_model(**options)
    asked = dict(max_new_tokens=9, do_sample=False, pad_token_id=63, return_dict_in_generate=True, output_logits=True)
    asked["attention_mask"] = mask_of(11, 19)[:rows]
    ids = random_ids(rows, 19)
    plain = model.generate(ids, **asked)
    compile_config = CompileConfig(fullgraph=True, dynamic=False, backend="aot_eager", mode=None)
    # on a GPU `generate` needs no word
    compile_config._compile_all_devices = True
    made = model.generate(ids, cache_implementation="static", compile_config=compile_config, **asked)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert torch.equal(made.sequences, plain.sequences)
    torch.testing.assert_close(torch.stack(made.logits), torch.stack(plain.logits), rtol=1e-5, atol=1e-5)


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def rows_of_documents(length):
    """Positions of two rows, of two and three documents."""
    parts = ([length // 3, length - length // 3], [5, 2, length - 7])
    return torch.stack([torch.cat([torch.arange(part) for part in row]) for row in parts])


def padded(length):
    mask = torch.ones(2, length, dtype=torch.long)
    mask[0, :7] = 0
    return mask


LENGTHS = (20, 30, 41)
# options of the model, and what a call of a length gets
WAYS = {
    "documents": (LOOPS, lambda length: {"position_ids": rows_of_documents(length), "skip_logits": True}),
    "padding": (HYBRID | {"num_hidden_layers": 2}, lambda length: {"attention_mask": padded(length)}),
}


@pytest.mark.parametrize("options, given", WAYS.values(), ids=WAYS)
def test_one_graph_serves_every_length_in_training(tiny_model, options, given):
    model = tiny_model(torch.float64, **SMALL | options)
    compiled, seconds = torch.compile(model, backend="eager", fullgraph=True), []
    for length in LENGTHS:
        ids = random_ids(2, length)
        inputs = {"input_ids": ids, "labels": ids, "use_cache": False} | given(length)
        results = []
        for call in (model, compiled):
            model.zero_grad()
            start = time.process_time()
            call(**inputs).loss.backward()
            seconds.append(time.process_time() - start)
            results.append([parameter.grad for parameter in model.parameters()])
        torch.testing.assert_close(*results, rtol=0, atol=1e-11)
    # one for the first length, and one for all others
    assert graphs() <= 2
    # the compiled call of the third length
    assert seconds[5] <= 1


@pytest.mark.parametrize("options", QUICK_AND_ALL)
def test_a_recomputed_block_is_in_the_graph(tiny_model, options):
    model = tiny_model(torch.float64, **SMALL | options).train()
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False})
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    inputs = {"input_ids": random_ids(2, 19), "attention_mask": mask_of(19, 11)}
    (_, gradients), (_, own) = step(model, model, **inputs), step(model, compiled, **inputs)
    torch.testing.assert_close(own, gradients, rtol=0, atol=1e-11)


@torch.no_grad()
@pytest.mark.long
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_one_graph_serves_every_continued_text(tiny_model, backend):
    """The quick tests have one such text in `test_equivalence.py`."""
    model = tiny_model(torch.float64, **SMALL | LOOPS)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for length in LENGTHS:
        ids, caches = random_ids(2, length + 12), []
        for call in (model, compiled):
            out = call(ids[:, :length], position_ids=rows_of_documents(length), use_cache=True)
            caches.append((call, out[CACHE_NAME]))
        for start, stop in ((0, 3), (3, 4), (4, 5), (5, 11), (11, 12)):
            part = ids[:, length + start : length + stop]
            plain, ours = (call(part, cache=cache).logits for call, cache in caches)
            torch.testing.assert_close(ours, plain, rtol=0, atol=1e-11)
    # prompts, single tokens and parts of a text: one for the first number of tokens, and one for all others
    assert graphs() <= 6


@torch.no_grad()
@pytest.mark.parametrize("options", QUICK_AND_ALL)
def test_one_graph_serves_a_cache_of_fixed_length_after_every_prompt(tiny_model, options):
    model = tiny_model(torch.float64, **SMALL | options)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for length in LENGTHS:
        ids = random_ids(2, length + 2)
        cache = StaticCache(model.config, max_cache_len=80)
        compiled(ids[:, :length], cache=cache)
        for at in (length, length + 1):
            logits = compiled(ids[:, at : at + 1], cache=cache).logits
        torch.testing.assert_close(logits[:, 0], model(ids).logits[:, -1], rtol=0, atol=1e-11)
    # two for prompts, one for tokens
    assert graphs() <= 3
