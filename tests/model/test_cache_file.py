"""A memory as a file: it goes on in another process, belongs to one model, and is refused where it is wrong."""

import copy
import subprocess
import sys

import pytest
import torch
from mixers import HYBRID, MEMORIES, MIXED, STATES, random_ids
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from hope_hf import HopeCache, HopeForCausalLM
from hope_hf.model import cache_file
from hope_hf.model.cache_file import fingerprint, is_of

FILE = "hope_cache.safetensors"
IDS = random_ids(2, 7, seed=2)
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


@torch.no_grad()
def read(model, ids, cache=None):
    cache = HopeCache(model.config) if cache is None else cache
    model(ids, cache=cache)
    return cache


@torch.no_grad()
def answers(model, cache, ids):
    return model(ids, cache=copy.deepcopy(cache)).logits


@pytest.fixture
def saved(tiny_model, tmp_path):
    """A model, and the folder of what it has read of nine tokens."""
    model = tiny_model()
    read(model, random_ids(1, 9)).save_pretrained(tmp_path, model)
    return model, tmp_path


def refused(folder, model, words):
    with pytest.raises(ValueError, match=words) as refusal:
        HopeCache.from_pretrained(folder, model)
    assert len(str(refusal.value)) < 500


@pytest.mark.processes
@pytest.mark.usefixtures("warm_python")
def test_a_memory_kept_as_a_file_goes_on_in_another_process(tiny_model, tmp_path):
    model = tiny_model(**MIXED)
    model.save_pretrained(tmp_path)
    cache = read(model, random_ids(2, 21))
    cache.save_pretrained(tmp_path / "memory", model)
    save_file({"ids": IDS}, tmp_path / "ids.safetensors")
    subprocess.run([sys.executable, "-c", IN_ANOTHER_PROCESS, str(tmp_path)], check=True, timeout=300)
    logits = load_file(tmp_path / "logits.safetensors")["logits"]
    torch.testing.assert_close(logits, answers(model, cache, IDS), rtol=0, atol=1e-6)
    assert (logits - model(IDS).logits).abs().max() > 1e-2, "the memory makes no difference"


READ_ON = STATES | {"paper-2": MEMORIES["paper-2"]}


@pytest.mark.parametrize("options", READ_ON.values(), ids=READ_ON)
def test_a_saved_state_continues_the_text(tiny_model, tmp_path, options):
    model = tiny_model(torch.float64, **options)
    ids = random_ids(2, 9, seed=2)
    cache = read(model, random_ids(2, 13))
    cache.save_pretrained(tmp_path, model)
    expected = answers(model, cache, ids)
    from_tensors = HopeCache.from_state_tensors(model.config, cache.state_tensors())
    for loaded in (from_tensors, HopeCache.from_pretrained(tmp_path, model)):
        assert loaded.get_seq_length() == 13 and torch.equal(answers(model, loaded, ids), expected)


def test_a_model_whose_weights_lie_on_disk_keeps_and_reads_the_same_file(tiny_model, tmp_path):
    model = tiny_model(tie_word_embeddings=True, **MIXED)
    model.save_pretrained(tmp_path)
    offloaded = HopeForCausalLM.from_pretrained(tmp_path, device_map={"": "disk"}, offload_folder=tmp_path / "offload")
    assert fingerprint(offloaded) == fingerprint(model)
    cache = read(offloaded, random_ids(2, 21))
    cache.save_pretrained(tmp_path / "memory", offloaded)
    expected = answers(model, cache, IDS)
    for reader in (model, offloaded):
        loaded = HopeCache.from_pretrained(tmp_path / "memory", reader)
        torch.testing.assert_close(answers(reader, loaded, IDS), expected, rtol=0, atol=1e-6)


def test_half_precision_does_not_change_whose_memory_it_is(saved):
    model, folder = saved
    model.save_pretrained(folder)
    half = type(model).from_pretrained(folder, dtype=torch.bfloat16)
    assert half(random_ids(1, 2), cache=HopeCache.from_pretrained(folder, half)).logits.dtype == torch.bfloat16


def test_a_file_of_another_model_format_or_a_damaged_one_is_refused(saved, tiny_model):
    model, folder = saved
    file = folder / FILE
    for other in (tiny_model(seed=1), tiny_model(memory_chunk_size=8)):
        refused(folder, other, "another model")
    tensors, whole = load_file(file), file.read_bytes()
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
    save_file(tensors, file, {**metadata, "hope_cache": "1"})
    refused(folder, model, f"{FILE}.*format 1.*format 3")
    file.write_bytes(whole[: len(whole) // 2])
    refused(folder, model, f"{FILE}.*damaged")
    for unknown in (None, {"hope_cache": "[" * 100_000}):
        save_file({"x": torch.zeros(1)}, file, unknown)
        refused(folder, model, "format")
    refused(folder / "nowhere", model, f"no {FILE}")


def test_a_file_that_names_no_model_is_refused(tiny_model, tmp_path):
    model = tiny_model()
    tensors = {"0.seen": torch.zeros(1)}
    for name in ({}, {"model": "[" * 100_000}, {"model": "a b"}):
        metadata = {"format": "pt", "hope_cache": "3"} | name
        metadata["sha256"] = cache_file._checksum(tensors, metadata)
        save_file(tensors, tmp_path / FILE, metadata)
        refused(tmp_path, model, "which model")


def test_a_flipped_bit_anywhere_in_a_file_is_noticed(saved):
    model, folder = saved
    file = folder / FILE
    whole = file.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    for place in [*range(0, header, 17), *range(header, len(whole), 401)]:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        file.write_bytes(damaged)
        refused(folder, model, f"{FILE} (is damaged|has the cache format)")


def without(*names):
    return lambda held: [held.pop(name) for name in names]


def cut(name, axis, size):
    return lambda held: held.update({name: held[name].narrow(axis, 0, size).contiguous()})


def filled(name, value):
    return lambda held: held[name].fill_(value)


# what is changed in the tensors of a hybrid, a memory and softmax attention, that has read nine tokens of two rows
IMPOSSIBLE = {
    "a missing tensor": (without("0.conv_tail"), "'0.conv_tail'"),
    "another tensor": (lambda held: held.update({"2.seen": held["0.seen"]}), "'2.seen'"),
    "another shape": (cut("0.conv_tail", -2, 2), "'0.conv_tail'"),
    "another dtype": (lambda held: held.update({"0.conv_tail": held["0.conv_tail"].half()}), "float16.*float32"),
    "other rows": (cut("0.seen", 0, 1), r"'0\..*\[2, .*\[1, "),
    "no rows": (cut("0.seen", 0, 0), r"'0.seen'.*\[0\]"),
    "NaN": (filled("0.current.0", float("nan")), "NaN.*'0.current.0'"),
    "values whose squares overflow": (filled("0.conv_tail", -1e38), "'0.conv_tail'"),
    "a negative length": (filled("0.columns", -9), "counts.*'0.columns'"),
    "other lengths": (filled("0.columns", 8), "counts.*'0.columns'"),
    "more tokens than columns": (filled("0.seen", 10), "counts.*'0.columns'"),
    "fewer values": (cut("1.values", -2, 8), r"'1.values'.*\[2, 2, 8, 16\].*\[2, 2, 9, 16\]"),
}


def test_a_file_that_no_text_can_leave_is_refused(tiny_model, tmp_path, monkeypatch):
    """With a checksum that fits, so that it is the tensors themselves that are refused."""
    model = tiny_model(**HYBRID)
    tensors = read(model, random_ids(2, 9)).state_tensors()
    for name, (change, words) in IMPOSSIBLE.items():
        changed = {tensor: value.clone() for tensor, value in tensors.items()}
        change(changed)
        with monkeypatch.context() as patch:
            patch.setattr(cache_file, "_stays_finite", lambda tensor: True)
            cache_file.write_cache(tmp_path / name, changed, fingerprint(model))
        refused(tmp_path / name, model, f"{FILE} .*{words}")


def test_keys_and_memories_must_have_read_the_same(tiny_model, tmp_path):
    model = tiny_model(**HYBRID)
    tensors = read(model, random_ids(2, 9)).state_tensors()
    for kind in ("keys", "values"):
        cut(f"1.{kind}", -2, 8)(tensors)
    cache_file.write_cache(tmp_path, tensors, fingerprint(model))
    refused(tmp_path, model, "counts.*'0.columns'")


@pytest.mark.parametrize("options", READ_ON.values(), ids=READ_ON)
def test_the_largest_values_that_a_file_may_hold_give_finite_logits(tiny_model, options):
    model = tiny_model(**options)
    tensors = read(model, random_ids(2, 9)).state_tensors()
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            largest = torch.full_like(tensor, torch.finfo(torch.float32).max ** 0.5 / tensor.shape[-1])
            assert not cache_file._stays_finite(1.01 * largest) and cache_file._stays_finite(0.99 * largest)
            cache = HopeCache.from_state_tensors(model.config, tensors | {name: 0.99 * largest})
            assert answers(model, cache, random_ids(2, 9)).isfinite().all(), name


def test_what_is_not_worth_a_file_is_not_saved(saved):
    model, folder = saved
    before = (folder / FILE).read_bytes()
    with pytest.raises(ValueError, match="nothing"):
        HopeCache(model.config).save_pretrained(folder, model)
    cache = read(model, random_ids(1, 9))
    cache.layers[1].state.current[0].fill_(float("inf"))
    with pytest.raises(ValueError, match="'1.current.0'"):
        cache.save_pretrained(folder, model)
    assert (folder / FILE).read_bytes() == before


def test_writing_a_file_follows_no_link_and_leaves_nothing_behind(tiny_model, tmp_path, monkeypatch):
    model = tiny_model()
    cache, victim, folder = read(model, random_ids(1, 9)), tmp_path / "victim", tmp_path / "memory"
    victim.write_text("precious")
    folder.mkdir()
    (folder / FILE).symlink_to(victim)
    cache.save_pretrained(folder, model)
    assert victim.read_text() == "precious" and HopeCache.from_pretrained(folder, model).get_seq_length() == 9
    before = sorted(folder.iterdir())

    def fails(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fails)
    with pytest.raises(OSError, match="No space left"):
        cache.save_pretrained(folder, model)
    assert sorted(folder.iterdir()) == before


def test_a_file_that_was_replaced_since_it_was_read_is_not_written_over(saved):
    model, folder = saved
    one, two = (HopeCache.from_pretrained(folder, model) for _ in range(2))
    for cache, more in ((one, 5), (two, 7)):
        read(model, random_ids(1, more), cache)
    one.save_pretrained(folder, model)
    with pytest.raises(ValueError, match=FILE):
        two.save_pretrained(folder, model)
    assert HopeCache.from_pretrained(folder, model).get_seq_length() == 14
    # a cache of another text replaces the file, as ever
    read(model, random_ids(1, 3)).save_pretrained(folder, model)


def test_one_entry_of_one_weight_makes_another_model(saved):
    model, folder = saved
    weight = model.model.layers[1].continuum.levels[0].up_proj.weight
    weight.data.view(-1)[weight.numel() // 2 + 3] += 1e-6
    refused(folder, model, "another model")


def test_fields_and_heads_that_change_no_state_change_not_whose_memory_it_is(saved):
    model, folder = saved
    # as files of before have it
    assert is_of(model, fingerprint(model, all_fields=True))
    model.config.eos_token_id = 7
    model.config.attention_dropout = 0.1
    model.lm_head.weight.data.mul_(2)
    assert HopeCache.from_pretrained(folder, model).get_seq_length() == 9
    model.config.rms_norm_eps *= 2
    refused(folder, model, "another model")


def test_fields_of_other_layers_count_where_there_are_some(tiny_model):
    """A cache of memories is the same model's after fields for other layers have come to the configuration."""
    for options in ({}, MIXED):
        model = tiny_model(**options)
        for field in ("sparse_window", "sliding_window", "attention_sinks"):
            before = fingerprint(model)
            setattr(model.config, field, 1024)
            assert (fingerprint(model) != before) is bool(options)
