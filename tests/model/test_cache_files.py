"""A memory as a value: kept as a file, forked, rolled back, moved; and refused where it does not belong."""

import copy
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from hope_hf import HopeCache

MIXERS = {
    "self_modifying": {},
    "momentum-depth-2": dict(memory_momentum=True, memory_depth=2),
    "attention": dict(mixer="attention"),
}
IN_ANOTHER_PROCESS = """
import sys, torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from hope_hf import HopeCache
folder = sys.argv[1]
model = AutoModelForCausalLM.from_pretrained(folder)
cache = HopeCache.from_pretrained(folder + "/memory", model)
ids = load_file(folder + "/ids.safetensors")["ids"]
with torch.no_grad():
    save_file({"logits": model(ids, past_key_values=cache).logits.contiguous()}, folder + "/logits.safetensors")
"""


def random_ids(*shape, seed=1):
    return torch.randint(64, shape, generator=torch.Generator().manual_seed(seed))


def read(model, ids):
    cache = HopeCache(model.config)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    return cache


def answers(model, cache, ids):
    with torch.no_grad():
        return model(ids, past_key_values=copy.deepcopy(cache)).logits


@pytest.mark.parametrize("options", MIXERS.values(), ids=MIXERS)
def test_a_memory_kept_as_a_file_goes_on_in_another_process(tiny_model, tmp_path, options):
    model = tiny_model(**options)
    model.save_pretrained(tmp_path)
    cache = read(model, random_ids(2, 21))
    cache.save_pretrained(tmp_path / "memory", model)
    ids = random_ids(2, 7, seed=2)
    save_file({"ids": ids}, tmp_path / "ids.safetensors")
    subprocess.run([sys.executable, "-c", IN_ANOTHER_PROCESS, str(tmp_path)], check=True, timeout=300)
    logits = load_file(tmp_path / "logits.safetensors")["logits"]
    torch.testing.assert_close(logits, answers(model, cache, ids), rtol=0, atol=1e-6)
    assert (logits - model(ids).logits).abs().max() > 1e-2, "the memory makes no difference"


@pytest.mark.parametrize("options", MIXERS.values(), ids=MIXERS)
def test_rolling_back_forgets_exactly_what_was_read_since(tiny_model, options):
    model = tiny_model(torch.float64, **options)
    cache = read(model, random_ids(2, 10))
    before = cache.snapshot()
    expected = answers(model, cache, random_ids(2, 5, seed=3))
    for seed in (4, 5):
        with torch.no_grad():
            model(random_ids(2, 9, seed=seed), past_key_values=cache)
        assert cache.get_seq_length() == 19
        assert not torch.allclose(answers(model, cache, random_ids(2, 5, seed=3)), expected)
        cache.rollback(before)
        assert cache.get_seq_length() == 10
        assert torch.equal(answers(model, cache, random_ids(2, 5, seed=3)), expected)


def test_a_snapshot_of_other_layers_is_refused(tiny_model):
    memory, attention = (read(tiny_model(mixer=mixer), random_ids(1, 3)) for mixer in ("self_modifying", "attention"))
    with pytest.raises(ValueError, match="snapshot is of a cache with other layers"):
        memory.rollback(attention.snapshot())


@pytest.mark.parametrize("options", MIXERS.values(), ids=MIXERS)
def test_rows_are_chosen_repeated_and_reordered(tiny_model, options):
    model = tiny_model(torch.float64, **options)
    ids, after = random_ids(3, 11), random_ids(3, 4, seed=2)
    cache = read(model, ids)
    whole = answers(model, cache, after)
    chosen = copy.deepcopy(cache)
    chosen.batch_select_indices(torch.tensor([2, 0]))
    torch.testing.assert_close(answers(model, chosen, after[[2, 0]]), whole[[2, 0]])
    repeated = copy.deepcopy(cache)
    repeated.batch_repeat_interleave(2)
    torch.testing.assert_close(answers(model, repeated, after.repeat_interleave(2, 0)), whole.repeat_interleave(2, 0))
    reordered = copy.deepcopy(cache)
    reordered.reorder_cache(torch.tensor([1, 1, 0]))
    torch.testing.assert_close(answers(model, reordered, after[[1, 1, 0]]), whole[[1, 1, 0]])


@pytest.mark.parametrize("options", MIXERS.values(), ids=MIXERS)
def test_a_cache_moves_to_another_device(tiny_model, options):
    model = tiny_model(**options)
    cache = read(model, random_ids(1, 9)).to("meta")
    assert {tensor.device.type for name, tensor in cache.state_tensors().items() if "columns" not in name} == {"meta"}
    assert {layer.device.type for layer in cache.layers} == {"meta"}


def test_half_precision_does_not_change_whose_memory_it_is(tiny_model, tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path)
    read(model, random_ids(1, 9)).save_pretrained(tmp_path, model)
    half = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16)
    cache = HopeCache.from_pretrained(tmp_path, half)
    assert half(random_ids(1, 2), past_key_values=cache).logits.dtype == torch.bfloat16


def test_a_file_of_another_model_or_damaged_is_refused_in_a_sentence(tiny_model, tmp_path):
    model = tiny_model()
    read(model, random_ids(1, 9)).save_pretrained(tmp_path, model)
    file = tmp_path / "hope_cache.safetensors"
    for other in (tiny_model(seed=1), tiny_model(memory_chunk_size=8)):
        with pytest.raises(ValueError, match="another model"):
            HopeCache.from_pretrained(tmp_path, other)
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="hope_cache.safetensors is damaged"):
        HopeCache.from_pretrained(tmp_path, model)
    save_file({"x": torch.zeros(1)}, file)
    with pytest.raises(ValueError, match="no cache of this version"):
        HopeCache.from_pretrained(tmp_path, model)
    with pytest.raises(ValueError, match="holds no hope_cache.safetensors"):
        HopeCache.from_pretrained(tmp_path / "nowhere", model)


def test_a_cache_that_does_not_fit_is_refused_in_a_sentence(tiny_model):
    from transformers import DynamicCache

    model, ids = tiny_model(), random_ids(2, 4)
    cache = read(model, random_ids(2, 9))
    refusals = [
        (model, random_ids(3, 4), cache, "holds 2 sequences, and the input 3"),
        (tiny_model(num_hidden_layers=1), ids, cache, "2 layers, and the model has 1"),
        (tiny_model(num_attention_heads=3), ids, cache, "the cache of another model"),
        (tiny_model(torch.float64), ids, cache, "float32 memories.*computes them in torch.float64"),
        (tiny_model(mixer="attention"), ids, cache, "HopeMemoryLayers.*mixer='attention'"),
        (model, ids, read(tiny_model(mixer="attention"), ids), "DynamicLayers.*mixer='self_modifying'"),
        (model, ids, DynamicCache(), "DynamicCache of 0 layers"),
        (model, ids, (), "tuple of no layers"),
    ]
    for reader, tokens, wrong, sentence in refusals:
        with pytest.raises(ValueError, match=sentence):
            reader(tokens, past_key_values=wrong)


def test_a_mask_of_the_wrong_length_is_refused(tiny_model):
    model, ids = tiny_model(), random_ids(2, 4)
    cache = read(model, random_ids(2, 9))
    for shape in ((2, 3), (2, 5), (1, 4)):
        with pytest.raises(ValueError, match=r"attention_mask has the shape.*\(2, 4\) is needed"):
            model(ids, attention_mask=torch.ones(shape))
    with pytest.raises(ValueError, match=r"\(2, 4\), and \(2, 13\) is needed.*9 tokens read before"):
        model(ids, attention_mask=torch.ones(2, 4), past_key_values=cache)


def test_labels_and_inputs_out_of_place_are_refused(tiny_model):
    model, ids = tiny_model(), random_ids(1, 4)
    for wrong in (64, -1):
        labels = ids.clone()
        labels[0, 2] = wrong
        with pytest.raises(ValueError, match=f"labels hold {wrong}: give tokens from 0 to 63, or -100"):
            model(ids, labels=labels)
    for inputs in ({}, {"input_ids": ids, "inputs_embeds": model.get_input_embeddings()(ids)}):
        with pytest.raises(ValueError, match="exactly one of input_ids or inputs_embeds"):
            model(**inputs)
