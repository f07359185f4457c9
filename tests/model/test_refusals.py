"""Calls that a model refuses, and the words that its sentence must hold: the argument, and the number at fault."""

import copy

import pytest
import torch
from mixers import ATTENTION, HYBRID, MIXED, RETAINING, SPARSE, STATES, WINDOW, random_ids
from transformers import DynamicCache

from hope_hf import HopeCache, HopeForTokenClassification

IDS = random_ids(1, 21)
STARTS = torch.tensor([0, 5, 14, 15, 21], dtype=torch.int32)
NUMBERS = torch.repeat_interleave(torch.tensor([5, 9, 1, 6]))[None] + 1
RESTARTS = torch.cat([torch.arange(n) for n in (5, 9, 1, 6)])[None]
BLOCK = torch.ones(1, 1, 21, 21, dtype=torch.bool).tril()


def text(**call):
    return dict(input_ids=IDS) | call


INPUTS = {
    "input_ids hold 64": dict(input_ids=torch.full((1, 4), 64)),
    r"\(4,\).*input_ids\[None\]": dict(input_ids=IDS[0, :4]),
    "torch.float32.*torch.int64": dict(input_ids=IDS.float()),
    "no tokens": dict(input_ids=IDS[:, :0]),
    "the text has no tokens": dict(inputs_embeds=torch.zeros(1, 0, 32)),
    r"inputs_embeds.*\(4, 32\)": dict(inputs_embeds=torch.zeros(4, 32)),
}
CALLS = {
    "exactly one of input_ids or inputs_embeds": {},
    "labels hold 64": text(labels=IDS * 0 + 64),
    "skip_logits=True.*labels": text(skip_logits=True),
    r"position_ids.*\(21,\)": text(position_ids=torch.arange(21)),
    r"attention_mask.*\(1, 3\).*\(1, 21\)": text(attention_mask=torch.ones(1, 3)),
    "attention_mask holds values": text(attention_mask=torch.full((1, 21), 0.5)),
    "attention_mask holds values from -1": text(attention_mask=-torch.ones(1, 21, dtype=torch.long)),
    "layers that keep a state": text(attention_mask=BLOCK),
    "seq_idx and position_ids disagree.*token 5 of row 0": text(seq_idx=NUMBERS * 0, position_ids=RESTARTS),
    "cu_seqlens and seq_idx disagree.*token 14 of row": text(cu_seqlens=STARTS[[0, 1, 4]], seq_idx=NUMBERS),
    "cu_seq_lens_q and attention_mask disagree": text(cu_seq_lens_q=STARTS, attention_mask=NUMBERS // 2 + 1),
    r"cu_seqlens.*\[0\].*\[15\].*21": text(cu_seqlens=STARTS[:-1]),
    "cu_seqlens goes": text(cu_seqlens=STARTS[[0, 2, 1, 4]]),
    r"seq_idx.*\(1, 20\).*\(1, 21\)": text(seq_idx=NUMBERS[:, 1:]),
    "cu_seqlens.*one row to the next": dict(input_ids=IDS[:, 1:].view(2, 10), cu_seqlens=STARTS - STARTS // 21),
}


@pytest.fixture(scope="module")
def models():
    """Of each set of options the model, made once."""
    return {}


@pytest.fixture
def model_of(models, tiny_model):
    def find(options, dtype=torch.float32):
        key = str(options), dtype
        if key not in models:
            models[key] = tiny_model(dtype, **options)
        return models[key]

    return find


def test_calls_of_a_model(model_of):
    for kind in ("mixed", "memory"):
        for words, call in (INPUTS | CALLS).items():
            with pytest.raises(ValueError, match=words):
                model_of(STATES[kind])(**call)


def test_options_of_a_language_model_reach_no_other_head(model_of):
    model = model_of(STATES["mixed"])
    head = HopeForTokenClassification(model.config)
    for option in ("learn", "skip_logits", "recall", "learn_generated"):
        for call in (model.model, head):
            call(IDS, **{option: False})
            with pytest.raises(ValueError, match=f"{option}=True.*HopeForCausalLM"):
                call(IDS, **{option: True})
    with pytest.raises(ValueError, match="recall=True.*generate"):
        model(IDS, recall=True)


def test_inputs_of_generate_and_of_attention_alone(model_of):
    model = model_of(ATTENTION)
    for words, call in INPUTS.items():
        with pytest.raises(ValueError, match=words):
            model(**call)
        with pytest.raises(ValueError, match=words):
            model.generate(**call, max_new_tokens=2, do_sample=False, pad_token_id=0)


def test_masks_of_attention_alone(model_of):
    model = copy.deepcopy(model_of(ATTENTION))
    with pytest.raises(ValueError, match=r"\(1, 21, 21\).*sdpa"):
        model(IDS, attention_mask=BLOCK[0])
    model.config._attn_implementation_internal = "flash_attention_2"
    ids, numbers = IDS.repeat(2, 1), NUMBERS.repeat(2, 1)
    numbers[0, :3] = 0
    with pytest.raises(ValueError, match="flash attention.*padding"):
        model(ids, attention_mask=numbers)
    with pytest.raises(ValueError, match=r"\(2, 1, 21, 21\).*flash_attention_2"):
        model(ids, attention_mask=torch.ones(2, 1, 21, 21))


def test_generate_goes_on_with_one_text_a_row(model_of):
    ways = [dict(cu_seq_lens_q=STARTS), dict(seq_idx=NUMBERS), dict(position_ids=RESTARTS)]
    ways += [dict(attention_mask=mask) for mask in (NUMBERS, BLOCK)]
    for way in ways:
        with pytest.raises(ValueError, match="one text a row"):
            model_of(MIXED).generate(IDS, max_new_tokens=2, pad_token_id=0, **way)


def read(model, ids=IDS):
    cache = HopeCache(model.config)
    with torch.no_grad():
        model(ids, cache=cache)
    return cache


def test_documents_after_a_cache(model_of):
    model = model_of(MIXED)
    cache = read(model)
    with pytest.raises(ValueError, match="cu_seqlens.*cache"):
        model(IDS, cache=cache, cu_seqlens=STARTS)
    with pytest.raises(ValueError, match="attention_mask.*cache"):
        model(IDS, cache=cache, attention_mask=torch.cat([NUMBERS, NUMBERS], 1))
    with pytest.raises(ValueError, match=r"\(1, 21\).*\(1, 42\).*21 tokens read"):
        model(IDS, cache=cache, attention_mask=torch.ones(1, 21))
    for new in (slice(0, 15), slice(5, 6)):
        with pytest.raises(ValueError, match="position_ids.*full_attention"):
            model(IDS[:, new], position_ids=RESTARTS[:, new], cache=read(model))


NARROW = SPARSE | dict(sparse_block_size=8, sparse_compress_stride=8)
RETAINS = RETAINING | dict(retained_tokens=[[3, 2], [4, 1]])
# the model that wrote the cache, the one that reads it, and words
OTHERS = {
    "fewer layers": ({}, dict(num_hidden_layers=1), "2 layers.*1"),
    "attention": ({}, ATTENTION, "HopeMemoryLayer.*full_attention"),
    "memories": (ATTENTION, {}, "DynamicLayer.*hope_memory"),
    "another layer": ({}, HYBRID | dict(memory_projections=[]), "HopeMemoryLayer.*full_attention"),
    "other projections": ({}, dict(memory_projections=["v"]), "2 heads of 1 memories.*2 of 2.*another model"),
    "strides": (SPARSE, NARROW, "strides of 4.*strides of 8"),
    "convolutions": (SPARSE, SPARSE | dict(conv_kernel_size=2), "convolutions of 4 tokens.*of 2 tokens"),
    "retained": (RETAINS, RETAINS | dict(retained_tokens=[[3, 2], [4, 2]]), "5 tokens in layer 1.*6.*another model"),
    "retaining window": (RETAINING, RETAINING | dict(sliding_window=7), "windows of 10 tokens.*11 tokens"),
    "window": (WINDOW, WINDOW | dict(sliding_window=11), "windows of 8 tokens.*13 tokens"),
}


@pytest.mark.parametrize("writer, reader, words", OTHERS.values(), ids=OTHERS)
def test_a_cache_of_another_model(model_of, writer, reader, words):
    with pytest.raises(ValueError, match=words):
        model_of(reader)(IDS, cache=read(model_of(writer)))


@torch.no_grad()
@pytest.mark.parametrize("kind", STATES)
def test_a_cache_of_other_rows_or_another_dtype(model_of, kind):
    model = model_of(STATES[kind])
    cache = read(model)
    with pytest.raises(ValueError, match="1 sequences.*3.*batch_select_indices"):
        model(random_ids(3, 2), cache=cache)
    with pytest.raises(ValueError, match="float32.*torch.float64"):
        model_of(STATES[kind], torch.float64)(IDS, cache=cache)
    for wrong, words in ((DynamicCache([(IDS, IDS)]), "DynamicCache of 1 layers"), ((), "tuple of no layers")):
        with pytest.raises(ValueError, match=words):
            model(IDS, cache=wrong)


@torch.no_grad()
def test_what_a_cache_of_another_dtype_or_window_serves(model_of):
    # states of memories are float32 in bfloat16
    assert model_of({}, torch.bfloat16)(IDS, cache=read(model_of({}))).logits.isfinite().all()
    # what is read of these states is the reading model's
    model_of(SPARSE | dict(sparse_window=16))(IDS, cache=read(model_of(SPARSE)))


@pytest.mark.filterwarnings("ignore:`torch.jit.trace` is deprecated")
def test_what_a_recurrent_state_cannot_do(model_of):
    model = model_of({})
    with pytest.raises(ValueError, match="stateful models"):
        model.generate(IDS, prompt_lookup_num_tokens=2, max_new_tokens=3)
    with pytest.raises(ValueError, match="vmap.*rows"):
        torch.func.vmap(lambda tokens: model(tokens[None]).logits)(IDS)
    with pytest.raises(ValueError, match="jit.trace.*torch.export"):
        torch.jit.trace(lambda tokens: model(tokens).logits, IDS)


@torch.no_grad()
def test_a_compiled_graph_takes_masks_of_0_and_1(model_of):
    with pytest.raises(RuntimeError, match="0 and 1"):
        torch.compile(model_of(dict(num_hidden_layers=1)), backend="eager")(IDS, attention_mask=NUMBERS)
