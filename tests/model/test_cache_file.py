"""A memory as a value: kept as a file, forked, rolled back, moved; and refused where it does not belong."""

import copy
import stat
import subprocess
import sys

import pytest
import torch
from mixers import ATTENTION, HYBRID, LAYERS, MEMORIES, SPARSE_HYBRID, WINDOW_HYBRID
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import DynamicCache

from hope_hf import HopeCache, HopeForCausalLM
from hope_hf.model import cache_file, fingerprint

MODELS = LAYERS | {
    "paper-2": MEMORIES["paper-2"],
    "attention-first": dict(layer_types=["full_attention", "hope_memory"]),
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
    save_file({"logits": model(ids, cache=cache).logits.contiguous()}, folder + "/logits.safetensors")
"""


def random_ids(*shape, seed=1):
    return torch.randint(64, shape, generator=torch.Generator().manual_seed(seed))


def read(model, ids):
    cache = HopeCache(model.config)
    with torch.no_grad():
        model(ids, cache=cache)
    return cache


def answers(model, cache, ids):
    with torch.no_grad():
        return model(ids, cache=copy.deepcopy(cache)).logits


@pytest.mark.processes
@pytest.mark.usefixtures("warm_python")
@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
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


@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
def test_a_model_whose_weights_lie_on_disk_keeps_and_reads_the_same_file(tiny_model, tmp_path, options):
    model = tiny_model(tie_word_embeddings=True, **options)
    model.save_pretrained(tmp_path)
    offloaded = HopeForCausalLM.from_pretrained(tmp_path, device_map={"": "disk"}, offload_folder=tmp_path / "offload")
    assert {weight.device.type for weight in offloaded.parameters()} == {"meta"}
    cache, ids = read(model, random_ids(2, 21)), random_ids(2, 7, seed=2)
    expected = answers(model, cache, ids)
    read(offloaded, random_ids(2, 21)).save_pretrained(tmp_path / "disk", offloaded)
    cache.save_pretrained(tmp_path / "memory", model)
    for folder in ("disk", "memory"):
        for reader in (model, offloaded):
            loaded = HopeCache.from_pretrained(tmp_path / folder, reader)
            torch.testing.assert_close(answers(reader, loaded, ids), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
def test_rolling_back_forgets_exactly_what_was_read_since(tiny_model, options):
    model = tiny_model(torch.float64, **options)
    cache = read(model, random_ids(2, 10))
    before = cache.snapshot()
    expected = answers(model, cache, random_ids(2, 5, seed=3))
    for seed in (4, 5):
        with torch.no_grad():
            model(random_ids(2, 9, seed=seed), cache=cache)
        assert cache.get_seq_length() == 19
        assert not torch.allclose(answers(model, cache, random_ids(2, 5, seed=3)), expected)
        cache.rollback(before)
        assert cache.get_seq_length() == 10
        assert torch.equal(answers(model, cache, random_ids(2, 5, seed=3)), expected)


def test_a_snapshot_of_other_layers_is_refused(tiny_model):
    memory, attention = (read(tiny_model(**options), random_ids(1, 3)) for options in ({}, ATTENTION))
    with pytest.raises(ValueError, match="snapshot is of a cache with other layers"):
        memory.rollback(attention.snapshot())


@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
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


@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
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
    assert half(random_ids(1, 2), cache=cache).logits.dtype == torch.bfloat16


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
    with pytest.raises(ValueError, match="has the cache format None, and this version of HOPE reads format 3"):
        HopeCache.from_pretrained(tmp_path, model)
    with pytest.raises(ValueError, match="holds no hope_cache.safetensors"):
        HopeCache.from_pretrained(tmp_path / "nowhere", model)


@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
def test_a_flipped_bit_anywhere_in_a_file_is_noticed(tiny_model, tmp_path, options):
    model = tiny_model(**options)
    read(model, random_ids(1, 9)).save_pretrained(tmp_path, model)
    file = tmp_path / "hope_cache.safetensors"
    whole = file.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    for place in [*range(0, header, 7), *range(header, len(whole), 101)]:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"hope_cache.safetensors (is damaged|has the cache format)"):
            HopeCache.from_pretrained(tmp_path, model)
    file.write_bytes(whole)
    HopeCache.from_pretrained(tmp_path, model)


def poison(tensors, name):
    tensors[name].view(-1)[0] = float("nan")


IMPOSSIBLE = {
    "a missing tensor": (lambda held: held.pop("1.conv_tail"), "lacks the tensor '1.conv_tail'"),
    "another tensor": (lambda held: held.update({"2.seen": held["1.seen"]}), "holds '2.seen'"),
    "a layer missing": (
        lambda held: [held.pop(name) for name in [*held] if name[0] == "1"],
        "lacks the tensor '1.columns'",
    ),
    "another shape": (lambda held: held.update({"0.conv_tail": held["0.conv_tail"][..., :2, :]}), "'0.conv_tail' as"),
    "another dtype": (
        lambda held: held.update({"0.conv_tail": held["0.conv_tail"].half()}),
        r"torch.float16, not torch.float32 \(a model in torch.float16 can load it\)",
    ),
    "other rows": (
        lambda held: held.update({"1.seen": held["1.seen"][:1]}),
        r"'1.seen' as \[1\], not \[2\]",
    ),
    "no rows": (lambda held: held.update({"0.seen": held["0.seen"][:0]}), r"'0.seen' as \[0\]"),
    "NaN": (lambda held: poison(held, "1.current.0"), "NaN or infinity, .*in '1.current.0'"),
    "values whose squares overflow": (lambda held: held["0.conv_tail"].fill_(-1e38), "lead to them, in '0.conv_tail'"),
    "a negative length": (
        lambda held: held["0.columns"].copy_(torch.tensor([-9, 1])),
        "impossible counts.*'0.columns'",
    ),
    "other lengths": (lambda held: held["1.columns"].copy_(torch.tensor([8, 0])), "impossible counts.*'1.columns'"),
    "more tokens than columns": (lambda held: held["0.seen"].fill_(10), "impossible counts.*'0.columns'"),
}


@pytest.mark.parametrize(("change", "sentence"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_a_file_that_no_text_can_leave_is_refused(tiny_model, tmp_path, monkeypatch, change, sentence):
    """With a checksum that fits, so that it is the tensors themselves that are refused."""
    model = tiny_model()
    tensors = {name: tensor.clone() for name, tensor in read(model, random_ids(2, 9)).state_tensors().items()}
    change(tensors)
    with monkeypatch.context() as patch:
        patch.setattr(cache_file, "_stays_finite", lambda tensor: True)
        cache_file.write_cache(tmp_path, tensors, fingerprint.fingerprint(model))
    with pytest.raises(ValueError, match=f"hope_cache.safetensors .*{sentence}.*: read the text again"):
        HopeCache.from_pretrained(tmp_path, model)


@pytest.mark.parametrize("model", [None, "", "[" * 100_000, "a b"], ids=["none", "empty", "brackets", "two words"])
def test_a_file_that_names_no_model_is_refused(tiny_model, tmp_path, model):
    metadata = {"format": "pt", "hope_cache": "3"} | ({} if model is None else {"model": model})
    tensors = {"0.seen": torch.zeros(1)}
    metadata["sha256"] = cache_file._checksum(tensors, metadata)
    save_file(tensors, tmp_path / "hope_cache.safetensors", metadata)
    with pytest.raises(ValueError, match="does not say which model wrote it: read the text again") as refusal:
        HopeCache.from_pretrained(tmp_path, tiny_model())
    assert len(str(refusal.value)) < 500
    save_file(tensors, tmp_path / "hope_cache.safetensors", {"hope_cache": "[" * 100_000})
    with pytest.raises(ValueError, match="has the cache format") as refusal:
        HopeCache.from_pretrained(tmp_path, tiny_model())
    assert len(str(refusal.value)) < 500


@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
def test_the_largest_values_that_a_file_may_hold_give_finite_logits(tiny_model, options):
    model = tiny_model(**options)
    tensors = read(model, random_ids(2, 9)).state_tensors()
    for name in [name for name, tensor in tensors.items() if tensor.is_floating_point()]:
        largest = torch.full_like(tensors[name], torch.finfo(torch.float32).max ** 0.5 / tensors[name].shape[-1])
        assert not cache_file._stays_finite(1.01 * largest)
        assert cache_file._stays_finite(0.99 * largest)
        cache = HopeCache.from_state_tensors(model.config, tensors | {name: 0.99 * largest})
        assert answers(model, cache, random_ids(2, 9)).isfinite().all(), name


def test_keys_of_softmax_attention_must_fit_as_well(tiny_model, tmp_path):
    model = tiny_model(**ATTENTION)
    tensors = read(model, random_ids(2, 9)).state_tensors()
    tensors["1.values"] = tensors["1.values"][:, :, :8]
    cache_file.write_cache(tmp_path, tensors, fingerprint.fingerprint(model))
    with pytest.raises(ValueError, match=r"holds '1.values' as \[2, 2, 8, 16\], not \[2, 2, 9, 16\]"):
        HopeCache.from_pretrained(tmp_path, model)


@pytest.mark.parametrize("options", [MODELS["hybrid"], MODELS["attention-first"]], ids=str)
def test_keys_and_memories_must_have_read_the_same(tiny_model, tmp_path, options):
    model = tiny_model(**options)
    tensors = read(model, random_ids(2, 9)).state_tensors()
    layer = model.config.layer_types.index("full_attention")
    name = f"{1 - layer}.columns"
    for kind in ("keys", "values"):
        tensors[f"{layer}.{kind}"] = tensors[f"{layer}.{kind}"][:, :, :8]
    cache_file.write_cache(tmp_path, tensors, fingerprint.fingerprint(model))
    with pytest.raises(ValueError, match=f"impossible counts of tokens in '{name}'"):
        HopeCache.from_pretrained(tmp_path, model)


def test_what_is_not_worth_a_file_is_not_saved(tiny_model, tmp_path):
    model = tiny_model()
    with pytest.raises(ValueError, match="has read nothing"):
        HopeCache(model.config).save_pretrained(tmp_path, model)
    cache = read(model, random_ids(1, 9))
    cache.save_pretrained(tmp_path, model)
    before = (tmp_path / "hope_cache.safetensors").read_bytes()
    cache.layers[1].state.current[0].fill_(float("inf"))
    with pytest.raises(ValueError, match="NaN or infinity, .*in '1.current.0'.*not saved"):
        cache.save_pretrained(tmp_path, model)
    assert (tmp_path / "hope_cache.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["hope_cache.safetensors"]


def test_the_file_is_as_readable_as_any_other(tiny_model, tmp_path):
    model = tiny_model()
    read(model, random_ids(1, 9)).save_pretrained(tmp_path, model)
    (tmp_path / "other").write_text("")
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("hope_cache.safetensors", "other")}
    assert len(modes) == 1


def test_writing_a_file_follows_no_link_and_leaves_nothing_behind(tiny_model, tmp_path, monkeypatch):
    model = tiny_model()
    cache = read(model, random_ids(1, 9))
    victim = tmp_path / "victim"
    victim.write_text("precious")
    folder = tmp_path / "memory"
    folder.mkdir()
    # the names that were once fixed, and the file's own
    for name in (f"{cache_file.CACHE_FILE}.unfinished", cache_file.CACHE_FILE):
        (folder / name).symlink_to(victim)
    cache.save_pretrained(folder, model)
    assert victim.read_text() == "precious" and HopeCache.from_pretrained(folder, model).get_seq_length() == 9
    before = sorted(folder.iterdir())

    def fails(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fails)
    with pytest.raises(OSError, match="No space left"):
        cache.save_pretrained(folder, model)
    assert sorted(folder.iterdir()) == before


def test_a_file_that_was_replaced_since_it_was_read_is_not_written_over(tiny_model, tmp_path):
    model = tiny_model()
    read(model, random_ids(1, 9)).save_pretrained(tmp_path, model)
    one, two = (HopeCache.from_pretrained(tmp_path, model) for _ in range(2))
    for cache, more in ((one, 5), (two, 7)):
        with torch.no_grad():
            model(random_ids(1, more), cache=cache)
    one.save_pretrained(tmp_path, model)
    # again, by the one that wrote it
    one.save_pretrained(tmp_path, model)
    with pytest.raises(ValueError, match="hope_cache.safetensors was replaced since"):
        two.save_pretrained(tmp_path, model)
    assert HopeCache.from_pretrained(tmp_path, model).get_seq_length() == 14
    two.save_pretrained(tmp_path / "other", model)
    # a cache of another text replaces the file, as ever
    read(model, random_ids(1, 3)).save_pretrained(tmp_path, model)


def test_a_file_of_the_older_format_is_refused_by_its_number(tiny_model, tmp_path):
    model = tiny_model()
    read(model, random_ids(1, 9)).save_pretrained(tmp_path, model)
    file = tmp_path / "hope_cache.safetensors"
    with safe_open(file, framework="pt") as saved:
        metadata = saved.metadata()
    save_file(load_file(file), file, {**metadata, "hope_cache": "1"})
    with pytest.raises(ValueError, match="has the cache format 1, and this version of HOPE reads format 3"):
        HopeCache.from_pretrained(tmp_path, model)


@pytest.mark.parametrize("through_data", [False, True], ids=["in place", "through .data"])
@pytest.mark.parametrize("change", [0.5, 1e-6])
def test_one_entry_of_one_weight_makes_another_model(tiny_model, tmp_path, through_data, change):
    model = tiny_model()
    read(model, random_ids(1, 9)).save_pretrained(tmp_path, model)
    weight = model.model.layers[1].continuum.levels[0].up_proj.weight
    with torch.no_grad():
        (weight.data if through_data else weight).view(-1)[weight.numel() // 2 + 3] += change
    with pytest.raises(ValueError, match="written by another model"):
        HopeCache.from_pretrained(tmp_path, model)


@pytest.mark.parametrize(
    "fields",
    [dict(pad_token_id=5), dict(eos_token_id=7), dict(attention_dropout=0.1), dict(output_hidden_states=True)],
)
def test_fields_that_change_no_state_change_not_whose_memory_it_is(tiny_model, tmp_path, fields):
    model = tiny_model()
    cache = HopeCache(model.config)
    model(random_ids(1, 9), cache=cache)
    # as files of before have it
    old = fingerprint.fingerprint(model, all_fields=True)
    cache.save_pretrained(tmp_path, model)
    assert fingerprint.is_of(model, old) and old != fingerprint.fingerprint(model)
    for name, value in fields.items():
        setattr(model.config, name, value)
    assert HopeCache.from_pretrained(tmp_path, model).get_seq_length() == 9
    model.config.rms_norm_eps *= 2
    with pytest.raises(ValueError, match="was written by another model"):
        HopeCache.from_pretrained(tmp_path, model)


def test_a_cache_that_cannot_be_cropped_stays_whole(tiny_model):
    model = tiny_model(layer_types=["full_attention", "hope_memory"])
    cache = HopeCache(model.config)
    model(random_ids(1, 9), cache=cache)
    with pytest.raises(RuntimeError, match="a layer's state cannot unread tokens"):
        cache.crop(-3)
    assert [layer.get_seq_length() for layer in cache.layers] == [9, 9]


def test_a_head_does_not_change_which_model_it_is_and_exchanged_rows_do(tiny_model):
    model = tiny_model()
    first = fingerprint.fingerprint(model)
    with torch.no_grad():
        # a head does not change what is read
        model.lm_head.weight.mul_(2)
    assert fingerprint.fingerprint(model) == first
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(model.model.embed_tokens.weight.flip(0))
    assert fingerprint.fingerprint(model) != first
    model.config.rms_norm_eps = 1e-5
    assert fingerprint.fingerprint(model).exact != fingerprint.fingerprint(tiny_model()).exact
    assert fingerprint.fingerprint(tiny_model()) == first


@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
def test_a_cache_with_a_graph_says_what_to_do_before_it_is_copied(tiny_model, options):
    model = tiny_model(**options)
    cache = HopeCache(model.config)
    model(random_ids(1, 9), cache=cache)
    with pytest.raises(ValueError, match=r"carries the graph.*torch.no_grad\(\), or call detach_\(\)"):
        copy.deepcopy(cache)
    fork = copy.deepcopy(cache.detach_())
    assert torch.equal(answers(model, fork, random_ids(1, 3)), answers(model, cache, random_ids(1, 3)))


def test_a_cache_of_transformers_without_layers_is_given_those_of_the_model(tiny_model):
    model, ids = tiny_model(torch.float64), random_ids(2, 14)
    cache = DynamicCache()
    with torch.no_grad():
        parts = [model(part, cache=cache).logits for part in ids.split([9, 5], dim=1)]
        torch.testing.assert_close(torch.cat(parts, 1), model(ids).logits, rtol=1e-9, atol=1e-9)
        assert cache.get_seq_length() == 14
        options = dict(max_new_tokens=5, do_sample=False, pad_token_id=0)
        assert torch.equal(model.generate(ids, cache=DynamicCache(), **options), model.generate(ids, **options))


def test_a_cache_that_does_not_fit_is_refused_in_a_sentence(tiny_model):
    model, ids = tiny_model(), random_ids(2, 4)
    cache = read(model, random_ids(2, 9))
    refusals = [
        (model, random_ids(3, 4), cache, "holds 2 sequences, and the input 3"),
        (tiny_model(num_hidden_layers=1), ids, cache, "2 layers, and the model has 1"),
        (tiny_model(num_memory_heads=3), ids, cache, "the cache of another model"),
        (tiny_model(torch.float64), ids, cache, "float32 memories.*computes them in torch.float64"),
        (tiny_model(**ATTENTION), ids, cache, "with a HopeMemoryLayer where .*layer of type 'full_attention'"),
        (model, ids, read(tiny_model(**ATTENTION), ids), "with a DynamicLayer where .*layer of type 'hope_memory'"),
        (
            tiny_model(**HYBRID | {"memory_projections": []}),
            ids,
            cache,
            "with a HopeMemoryLayer where .*layer of type 'full_attention'",
        ),
        (tiny_model(memory_projections=["v"]), ids, cache, "2 heads of 1 memories .* have 2 of 2 .*another model"),
        (model, ids, DynamicCache([(ids, ids)]), "DynamicCache of 1 layers, and the model has 2"),
        (model, ids, (), "tuple of no layers"),
    ]
    for reader, tokens, wrong, sentence in refusals:
        with pytest.raises(ValueError, match=sentence):
            reader(tokens, cache=wrong)


def test_a_mask_of_the_wrong_length_is_refused(tiny_model):
    model, ids = tiny_model(), random_ids(2, 4)
    cache = read(model, random_ids(2, 9))
    for shape in ((2, 3), (2, 5), (1, 4)):
        with pytest.raises(ValueError, match=r"attention_mask has the shape.*\(2, 4\) is needed"):
            model(ids, attention_mask=torch.ones(shape))
    with pytest.raises(ValueError, match=r"\(2, 4\), and \(2, 13\) is needed.*9 tokens read before"):
        model(ids, attention_mask=torch.ones(2, 4), cache=cache)
    with pytest.raises(ValueError, match=r"\(2, 5\), and \(2, 13\) is needed.*9 tokens read before"):
        model.generate(ids, attention_mask=torch.ones(2, 5), cache=cache, max_new_tokens=2)


def test_labels_and_inputs_out_of_place_are_refused(tiny_model):
    model, ids = tiny_model(), random_ids(1, 4)
    for wrong in (64, -1):
        labels = ids.clone()
        labels[0, 2] = wrong
        with pytest.raises(ValueError, match=f"labels hold {wrong}: give tokens from 0 to 63, or -100"):
            model(ids, labels=labels)
    embeddings = model.get_input_embeddings()(ids)
    refused = {
        "input_ids hold 64: give tokens from 0 to 63": {"input_ids": ids + 64 - ids[0, 0]},
        "input_ids hold -1": {"input_ids": torch.full_like(ids, -1)},
        r"shape \(4,\), and \(batch, tokens\) is needed.*input_ids\[None\]": {"input_ids": ids[0]},
        "holds torch.float32: give tokens as torch.int64": {"input_ids": ids.float()},
        "the text has no tokens: give at least one": {"input_ids": ids[:, :0]},
        "the text has no tokens: give": {"input_ids": ids[:0]},
        "the text has no tokens": {"inputs_embeds": embeddings[:, :0]},
        r"inputs_embeds has the shape \(4, 32\), and \(batch, tokens, 32\)": {"inputs_embeds": embeddings[0]},
    }
    for reader in (model, tiny_model(**ATTENTION)):
        for sentence, inputs in refused.items():
            with pytest.raises(ValueError, match=sentence):
                reader(**inputs)
            with pytest.raises(ValueError, match=sentence):
                reader.generate(**inputs, max_new_tokens=2, do_sample=False, pad_token_id=0)
    for inputs in ({}, {"input_ids": ids, "inputs_embeds": embeddings}):
        with pytest.raises(ValueError, match="exactly one of input_ids or inputs_embeds"):
            model(**inputs)


@pytest.mark.parametrize("options", [SPARSE_HYBRID, WINDOW_HYBRID], ids=["sparse", "window"])
@pytest.mark.parametrize("field", ["sparse_window", "sliding_window", "attention_sinks"])
def test_fields_of_other_layers_count_where_there_are_some(tiny_model, options, field):
    """A cache of memories is the same model's after fields for other layers have come to the configuration."""
    for model in (tiny_model(), tiny_model(**options)):
        before = fingerprint.fingerprint(model)
        setattr(model.config, field, 1024)
        kind = "sparse_attention" if field == "sparse_window" else "window_attention"
        assert (fingerprint.fingerprint(model) != before) is (kind in model.config.layer_types)
