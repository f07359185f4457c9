"""A memory as a file: it goes on in another process, belongs to one model, and is refused where it is wrong."""

import copy
import stat
import subprocess
import sys

import pytest
import torch
from learning_models import random_ids
from mixers import HYBRID, MEMORIES, MIXED, SPARSE_HYBRID, STATES, WINDOW_HYBRID
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from hope_hf import HopeCache, HopeForCausalLM
from hope_hf.model import cache_file
from hope_hf.model.cache_file import fingerprint, is_of

FILE = "hope_cache.safetensors"
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
    model, ids = tiny_model(**MIXED), random_ids(2, 7, seed=2)
    model.save_pretrained(tmp_path)
    cache = read(model, random_ids(2, 21))
    cache.save_pretrained(tmp_path / "memory", model)
    save_file({"ids": ids}, tmp_path / "ids.safetensors")
    subprocess.run([sys.executable, "-c", IN_ANOTHER_PROCESS, str(tmp_path)], check=True, timeout=300)
    logits = load_file(tmp_path / "logits.safetensors")["logits"]
    torch.testing.assert_close(logits, answers(model, cache, ids), rtol=0, atol=1e-6)
    assert (logits - model(ids).logits).abs().max() > 1e-2, "the memory makes no difference"


READ_ON = STATES | {"paper-2": MEMORIES["paper-2"]}


@pytest.mark.parametrize("options", READ_ON.values(), ids=READ_ON)
def test_a_saved_state_continues_the_text(tiny_model, tmp_path, options):
    model, ids = tiny_model(torch.float64, **options), random_ids(2, 9, seed=2)
    cache = read(model, random_ids(2, 13))
    cache.save_pretrained(tmp_path, model)
    expected, tensors = answers(model, cache, ids), cache.state_tensors()
    for loaded in (HopeCache.from_state_tensors(model.config, tensors), HopeCache.from_pretrained(tmp_path, model)):
        assert loaded.get_seq_length() == 13 and torch.equal(answers(model, loaded, ids), expected)


def test_a_model_whose_weights_lie_on_disk_keeps_and_reads_the_same_file(tiny_model, tmp_path):
    model, ids = tiny_model(tie_word_embeddings=True, **MIXED), random_ids(2, 7, seed=2)
    model.save_pretrained(tmp_path)
    offloaded = HopeForCausalLM.from_pretrained(tmp_path, device_map={"": "disk"}, offload_folder=tmp_path / "offload")
    assert {weight.device.type for weight in offloaded.parameters()} == {"meta"}
    expected = answers(model, read(model, random_ids(2, 21)), ids)
    for name, writer in (("disk", offloaded), ("memory", model)):
        read(writer, random_ids(2, 21)).save_pretrained(tmp_path / name, writer)
        for reader in (model, offloaded):
            loaded = HopeCache.from_pretrained(tmp_path / name, reader)
            torch.testing.assert_close(answers(reader, loaded, ids), expected, rtol=0, atol=1e-6)


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


@pytest.mark.parametrize("name", [None, "", "[" * 100_000, "a b"], ids=["none", "empty", "brackets", "two words"])
def test_a_file_that_names_no_model_is_refused(tiny_model, tmp_path, name):
    metadata = {"format": "pt", "hope_cache": "3"} | ({} if name is None else {"model": name})
    tensors = {"0.seen": torch.zeros(1)}
    metadata["sha256"] = cache_file._checksum(tensors, metadata)
    save_file(tensors, tmp_path / FILE, metadata)
    refused(tmp_path, tiny_model(), "which model")


@pytest.mark.parametrize("options", [{}, MIXED], ids=["memory", "mixed"])
def test_a_flipped_bit_anywhere_in_a_file_is_noticed(tiny_model, tmp_path, options):
    model = tiny_model(**options)
    read(model, random_ids(1, 9)).save_pretrained(tmp_path, model)
    file = tmp_path / FILE
    whole = file.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    for place in [*range(0, header, 17), *range(header, len(whole), 401)]:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        file.write_bytes(damaged)
        refused(tmp_path, model, f"{FILE} (is damaged|has the cache format)")
    file.write_bytes(whole)
    HopeCache.from_pretrained(tmp_path, model)


def cut(name, axis, size):
    return lambda held: held.update({name: held[name].narrow(axis, 0, size).contiguous()})


# what is changed in the tensors of a hybrid, a memory and softmax attention, that has read nine tokens of two rows
IMPOSSIBLE = {
    "a missing tensor": (lambda held: held.pop("0.conv_tail"), "'0.conv_tail'"),
    "another tensor": (lambda held: held.update({"2.seen": held["0.seen"]}), "'2.seen'"),
    "a layer missing": (lambda held: [held.pop(name) for name in [*held] if name[0] == "0"], "'0\\."),
    "another shape": (cut("0.conv_tail", -2, 2), "'0.conv_tail'"),
    "another dtype": (lambda held: held.update({"0.conv_tail": held["0.conv_tail"].half()}), "float16.*float32"),
    "other rows": (cut("0.seen", 0, 1), r"'0\..*\[2, .*\[1, "),
    "no rows": (cut("0.seen", 0, 0), r"'0.seen'.*\[0\]"),
    "NaN": (lambda held: held["0.current.0"].view(-1)[0].fill_(float("nan")), "NaN.*'0.current.0'"),
    "values whose squares overflow": (lambda held: held["0.conv_tail"].fill_(-1e38), "'0.conv_tail'"),
    "a negative length": (lambda held: held["0.columns"].copy_(torch.tensor([-9, 1])), "counts.*'0.columns'"),
    "other lengths": (lambda held: held["0.columns"].copy_(torch.tensor([8, 0])), "counts.*'0.columns'"),
    "more tokens than columns": (lambda held: held["0.seen"].fill_(10), "counts.*'0.columns'"),
    "fewer values": (cut("1.values", -2, 8), r"'1.values'.*\[2, 2, 8, 16\].*\[2, 2, 9, 16\]"),
}


@pytest.mark.parametrize(("change", "words"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_a_file_that_no_text_can_leave_is_refused(tiny_model, tmp_path, monkeypatch, change, words):
    """With a checksum that fits, so that it is the tensors themselves that are refused."""
    model = tiny_model(**HYBRID)
    tensors = {name: tensor.clone() for name, tensor in read(model, random_ids(2, 9)).state_tensors().items()}
    change(tensors)
    with monkeypatch.context() as patch:
        patch.setattr(cache_file, "_stays_finite", lambda tensor: True)
        cache_file.write_cache(tmp_path, tensors, fingerprint(model))
    refused(tmp_path, model, f"{FILE} .*{words}")


@pytest.mark.parametrize("first", ["full_attention", "hope_memory"])
def test_keys_and_memories_must_have_read_the_same(tiny_model, tmp_path, first):
    second = {"full_attention": "hope_memory", "hope_memory": "full_attention"}[first]
    model = tiny_model(layer_types=[first, second])
    tensors, layer = read(model, random_ids(2, 9)).state_tensors(), int(first == "hope_memory")
    for kind in ("keys", "values"):
        cut(f"{layer}.{kind}", -2, 8)(tensors)
    cache_file.write_cache(tmp_path, tensors, fingerprint(model))
    refused(tmp_path, model, f"counts.*'{1 - layer}.columns'")


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
    with pytest.raises(ValueError, match="nothing"):
        HopeCache(model.config).save_pretrained(folder, model)
    before = (folder / FILE).read_bytes()
    cache = read(model, random_ids(1, 9))
    cache.layers[1].state.current[0].fill_(float("inf"))
    with pytest.raises(ValueError, match="'1.current.0'"):
        cache.save_pretrained(folder, model)
    assert (folder / FILE).read_bytes() == before
    assert [path.name for path in folder.iterdir()] == [FILE]
    # it is as readable as any other
    (folder / "other").write_text("")
    assert len({stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}) == 1


def test_writing_a_file_follows_no_link_and_leaves_nothing_behind(tiny_model, tmp_path, monkeypatch):
    model = tiny_model()
    cache, victim, folder = read(model, random_ids(1, 9)), tmp_path / "victim", tmp_path / "memory"
    victim.write_text("precious")
    folder.mkdir()
    # the names that were once fixed, and the file's own
    for name in (f"{FILE}.unfinished", FILE):
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


def test_a_file_that_was_replaced_since_it_was_read_is_not_written_over(saved):
    model, folder = saved
    one, two = (HopeCache.from_pretrained(folder, model) for _ in range(2))
    for cache, more in ((one, 5), (two, 7)):
        read(model, random_ids(1, more), cache)
    one.save_pretrained(folder, model)
    # again, by the one that wrote it
    one.save_pretrained(folder, model)
    with pytest.raises(ValueError, match=FILE):
        two.save_pretrained(folder, model)
    assert HopeCache.from_pretrained(folder, model).get_seq_length() == 14
    two.save_pretrained(folder / "other", model)
    # a cache of another text replaces the file, as ever
    read(model, random_ids(1, 3)).save_pretrained(folder, model)


@pytest.mark.parametrize("through_data", [False, True], ids=["in place", "through .data"])
@pytest.mark.parametrize("change", [0.5, 1e-6])
def test_one_entry_of_one_weight_makes_another_model(saved, through_data, change):
    model, folder = saved
    weight = model.model.layers[1].continuum.levels[0].up_proj.weight
    with torch.no_grad():
        (weight.data if through_data else weight).view(-1)[weight.numel() // 2 + 3] += change
    refused(folder, model, "another model")


def test_fields_and_heads_that_change_no_state_change_not_whose_memory_it_is(saved, tiny_model):
    model, folder = saved
    first = fingerprint(model)
    # as files of before have it
    old = fingerprint(model, all_fields=True)
    assert is_of(model, old) and old != first
    for name, value in dict(pad_token_id=5, eos_token_id=7, attention_dropout=0.1, output_hidden_states=True).items():
        setattr(model.config, name, value)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    assert fingerprint(model) == first and HopeCache.from_pretrained(folder, model).get_seq_length() == 9
    model.config.rms_norm_eps *= 2
    refused(folder, model, "another model")
    exchanged = tiny_model()
    with torch.no_grad():
        exchanged.model.embed_tokens.weight.copy_(exchanged.model.embed_tokens.weight.flip(0))
    assert fingerprint(exchanged) != first == fingerprint(tiny_model())


@pytest.mark.parametrize("options", [SPARSE_HYBRID, WINDOW_HYBRID], ids=["sparse", "window"])
@pytest.mark.parametrize("field", ["sparse_window", "sliding_window", "attention_sinks"])
def test_fields_of_other_layers_count_where_there_are_some(tiny_model, options, field):
    """A cache of memories is the same model's after fields for other layers have come to the configuration."""
    for model in (tiny_model(), tiny_model(**options)):
        before = fingerprint(model)
        setattr(model.config, field, 1024)
        kind = "sparse_attention" if field == "sparse_window" else "window_attention"
        assert (fingerprint(model) != before) is (kind in model.config.layer_types)
