"""benchmarks/speed.py: models of one size, what is measured, and its tables; small, every model has its row."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

from benchmarks import speed, speed_report
from benchmarks.measuring import Calls, CountingCache, Decoder, held_bytes, in_turn, seconds

pytestmark = pytest.mark.benchmarks
PEERS = ("llama", "mamba2", "gated_deltanet", "kimi_linear")


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
    torch.set_flush_denormal(False)


def rows_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "speed.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("preset", [None, "tiny", "small"])
def test_peers_have_hopes_parameters(preset):
    options = speed.make_parser().parse_args(["peers", "--vocab_size", "320"])
    case = speed.Peers(options, preset)
    hope = case.new("hope").num_parameters()
    for name in PEERS:
        assert case.new(name).num_parameters() == pytest.approx(hope, rel=0.005 if name == "llama" else 0.02), name


def test_every_model_has_every_measure(tmp_path, capsys):
    words = ["peers", "--output_dir", str(tmp_path), "--lengths", "64", "--rounds", "1", "--new_tokens", "2"]
    models = ["hope_fla", "hope", *PEERS]
    words += ["--vocab_size", "320", "--measures", "step", "prefill", "token", "cache"]
    speed.main([*words, "--models", *models])
    rows = [row for row in rows_of(tmp_path) if row["measure"] != "note"]
    found = {(row["model"], row["tokens"], row["measure"]) for row in rows}
    expected = {("step", 64), *((name, length) for name in ("prefill", "token", "cache") for length in (64, 128))}
    assert found == {(model, tokens, name) for model in models[1:] for name, tokens in expected}
    assert all(value > 0 for row in rows for value in row["values"])
    # a recurrent model carries as much after any text, Llama twice as much after twice the text
    cache = {(row["model"], row["tokens"]): row["values"][0] for row in rows if row["measure"] == "cache"}
    assert cache["llama", 128] == pytest.approx(2 * cache["llama", 64], rel=0.01)
    assert all(cache[name, 128] == cache[name, 64] for name in models[1:] if name != "llama")
    # what cannot run says why, and the others go on
    printed = capsys.readouterr().out
    assert "hope_fla, 64 tokens: ValueError: " in printed and "the model is on a CPU" in printed
    speed.main([*words, "--report"])
    assert capsys.readouterr().out == printed and (tmp_path / "speed.png").stat().st_size > 10_000


def test_a_preset_and_a_batch_are_measured_alone(tmp_path, capsys):
    words = ["--output_dir", str(tmp_path), "--measures", "step", "token", "peak", "--models", "hope"]
    words += ["--tokens_per_step", "16", "--lengths", "8", "--contexts", "4", "--new_tokens", "1", "--rounds", "1"]
    speed.main(["peers", "--presets", "tiny-hybrid", *words])
    found = {(row["preset"], row["tokens"], row["measure"]) for row in rows_of(tmp_path) if row["values"][0] > 0}
    expected = [(8, "step"), (8, "peak"), (4, "token"), (4, "cache")]
    assert found == {("tiny-hybrid", *measured) for measured in expected}
    assert "CPU, preset tiny-hybrid\n" in capsys.readouterr().out


def test_sparse_attention_is_measured_beside_sdpa(tmp_path, capsys):
    speed.main(["mixers", "--output_dir", str(tmp_path), "--rounds", "1", "--lengths", "640"])
    found = {(row["model"], row["measure"]) for row in rows_of(tmp_path) if row["values"][0] > 0}
    assert found == {(kind, measure) for kind in (speed.SDPA, speed.SPARSE) for measure in ("step", "peak")}
    assert capsys.readouterr().out.count("| 640 |") == 2 and (tmp_path / "speed.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["peers", "--report"], "speed.jsonl is missing: run this without --report first"),
        (["peers", "--device", "cuda"], "--device cuda: torch finds no GPU; --device cpu measures this processor"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_what_cannot_be_measured_is_one_sentence(words, sentence, tmp_path):
    with pytest.raises(SystemExit, match=sentence):
        speed.main([*words, "--output_dir", str(tmp_path)])


def test_bytes_need_the_kernels(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="pip install fla-core triton"):
        speed.main(["bytes"])


def test_a_gpus_rows_have_speed_and_mfu_and_a_model_without_memory_has_its_reason(tmp_path, monkeypatch):
    """The GPU's path of the program, with a processor in the place of the GPU."""
    options = speed.make_parser().parse_args([
        "peers", "--models", "hope", "llama", "--lengths", "16", "--contexts", "8", "--rounds", "1",
        "--new_tokens", "1", "--vocab_size", "320",
    ])  # fmt: skip
    case = speed.Peers(options, None)
    networks = {name: case.new(name) for name in options.models}

    def largest():
        if networks["llama"].training and peaks:
            raise RuntimeError("out of memory")
        peaks.append(8 * 2**20)
        return peaks[-1]

    def step(network, input_ids):
        if network is networks["llama"] and len(input_ids) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        speed.train_step(network, input_ids)

    peaks = []
    monkeypatch.setattr(case, "step", step)
    monkeypatch.setattr(case, "device", "cuda")
    monkeypatch.setattr(case, "new", networks.get)
    monkeypatch.setattr(case, "inputs", lambda length, rows=2: torch.randint(320, (rows, length)))
    monkeypatch.setattr(speed, "seconds", lambda function, device: seconds(function))
    monkeypatch.setattr(speed, "peak_flops", lambda device, precision: 1e12)
    for name, value in {
        "get_device_name": lambda: "a GPU", "memory_allocated": lambda: 2**20, "max_memory_allocated": largest,
        "reset_peak_memory_stats": lambda: None, "empty_cache": lambda: None,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    speed.measure(options, case, None, tmp_path / "speed.jsonl")
    rows = {(row["model"], row["measure"]): row for row in rows_of(tmp_path)}
    assert {row["device"] for row in rows.values()} == {"a GPU"}
    # the GPU's memory holds half of the other model's rows
    for name, tokens in (("hope", 32), ("llama", 16)):
        took, tokens_per_second = (rows[name, measure]["values"][0] for measure in ("step", "speed"))
        assert tokens_per_second == pytest.approx(tokens / took, rel=1e-2) and rows[name, "mfu"]["values"][0] > 0
    assert rows["hope", "peak"]["values"] == [7] and ("llama", "peak") not in rows
    notes = [row["note"] for row in rows_of(tmp_path) if row["model"] == "llama" and "note" in row]
    assert notes == ["1 of 2 rows: more do not fit the GPU's memory", "RuntimeError: out of memory"]
    assert rows["llama", "token"]["values"][0] > 0


def test_a_ratio_is_hopes_value_over_the_models_with_its_range_over_rounds():
    def row(model, values):
        return {"model": model, "tokens": 512, "measure": "step", "values": values}

    rows = [row("hope", [2.0, 4.0, 3.0]), row("llama", [1.0, 2.0, 3.0]), row("mamba2", [4.0, 16.0, 10.0])]
    rows.append({"model": "kimi_linear", "tokens": 512, "measure": "note", "note": "no kernel"})
    lines = speed_report.table(rows, ranges=True).splitlines()
    assert lines[2] == "| step, s | 512 | 3 | 2 (1.50; 1.00 to 2.00) | 10 (0.30; 0.25 to 0.50) |"
    assert lines[-1] == "kimi_linear, 512 tokens: no kernel"
    assert "| 2 (1.50) | 10 (0.30) |" in speed_report.table(rows)


def test_models_take_turns_and_one_that_fails_is_left_out():
    calls, refused = [], []

    def turn(name, error=None):
        calls.append(name)
        if error and calls.count(name) == 2:
            raise error
        return len(calls)

    measures = {"a": lambda: turn("a"), "b": lambda: turn("b", RuntimeError("no memory"))}
    found = in_turn(measures, 2, lambda name, error: refused.append((name, str(error))))
    assert calls == ["a", "b", "a", "b", "a"] and found == {"a": [3, 5]} and refused == [("b", "no memory")]
    with pytest.raises(RuntimeError, match="no memory"):
        calls.clear()
        in_turn(measures, 2)


def test_a_decoder_reads_its_context_once(tiny_model):
    model = tiny_model()
    context = torch.randint(64, (1, 9))
    decoder, tokens = Decoder(model, context), []
    for _ in range(4):
        decoder()
        tokens.append(decoder.token)
    expected = model.generate(context, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert torch.equal(torch.cat(tokens, 1), expected[:, 9:])


def test_tensors_of_a_cache_count_once():
    shared = torch.zeros(4, 8)
    assert held_bytes([shared, shared[1:], {"again": (shared, torch.zeros(2, dtype=torch.int64))}]) == 144
    cache = DynamicCache()
    cache.update(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), 0)
    assert held_bytes(cache) == 2 * 4 * 24
    assert CountingCache().get_seq_length() == 0


def test_calls_are_counted_but_for_views():
    weight = torch.randn(4, 4, requires_grad=True)
    with Calls() as forward:
        result = torch.relu(torch.randn(2, 3, 4).view(6, 4)[:, :4] @ weight)
    with Calls() as backward:
        result.sum().backward()
    # randn, relu and the product; sum, its first gradient, and those of relu and of the product
    assert (forward.number, backward.number) == (3, 4)


def test_the_other_cases_print_their_tables(capsys):
    speed.main(["calls", "--tokens", "64"])
    speed.main(["recompute", "--tokens", "16", "--rounds", "1"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in lines if line.startswith("| ")] == [
        "| model", "| hope", "| llama", "| `--gradient_checkpointing`", "| none", "| every:4", "| every:2", "| mixer",
        "| block",
    ]  # fmt: skip
