"""benchmarks/speed.py: models of one size, what is measured, and its tables; small, every model has its row."""

import json

import pytest
import torch
from transformers import DynamicCache

from benchmarks import speed, speed_report
from benchmarks.measuring import Calls, Decoder, held_bytes, in_turn

pytestmark = pytest.mark.benchmarks
PEERS = ("llama", "mamba2", "gated_deltanet", "kimi_linear")


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
    torch.set_flush_denormal(False)


@pytest.mark.parametrize("preset", [None, "tiny", "small"])
def test_peers_have_hopes_parameters(preset):
    case = speed.Peers(speed.make_parser().parse_args(["peers", "--vocab_size", "320"]), preset)
    hope = case.new("hope").num_parameters()
    for name in PEERS:
        assert case.new(name).num_parameters() == pytest.approx(hope, rel=0.005 if name == "llama" else 0.02), name


def test_every_model_has_every_measure(tmp_path, capsys):
    words = ["peers", "--output_dir", str(tmp_path), "--lengths", "64", "--rounds", "1", "--new_tokens", "2"]
    words += ["--vocab_size", "320", "--measures", "step", "prefill", "token", "cache"]
    speed.main([*words, "--models", "hope_fla", "hope", *PEERS])
    values = {}
    for line in (tmp_path / "speed.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["measure"] != "note":
            values[row["model"], row["measure"], row["tokens"]] = row["values"][0]
    expected = {("step", 64)}
    for measure in ("prefill", "token", "cache"):
        expected |= {(measure, 64), (measure, 128)}
    assert values.keys() == {(model, *measured) for model in ("hope", *PEERS) for measured in expected}
    assert min(values.values()) > 0
    # a recurrent model carries as much after any text, Llama twice as much after twice the text
    assert values["llama", "cache", 128] == pytest.approx(2 * values["llama", "cache", 64], rel=0.01)
    assert all(values[model, "cache", 128] == values[model, "cache", 64] for model in ("hope", *PEERS[1:]))
    # what cannot run says why, and the others go on
    printed = capsys.readouterr().out
    assert "hope_fla, 64 tokens: ValueError: " in printed
    speed.main([*words, "--report"])
    assert capsys.readouterr().out == printed and (tmp_path / "speed.png").stat().st_size > 10_000


@pytest.mark.long
def test_the_other_cases_print_their_tables(tmp_path, capsys):
    speed.main(["calls", "--tokens", "64"])
    speed.main(["recompute", "--tokens", "16", "--rounds", "1"])
    preset = ["--presets", "tiny-hybrid", "--models", "hope", "--measures", "step", "peak", "--rounds", "1"]
    speed.main(["peers", "--output_dir", str(tmp_path), *preset, "--tokens_per_step", "16", "--lengths", "8"])
    printed = capsys.readouterr().out
    for start in ("| model", "| llama", "| none", "| every:2", "| block", "CPU, preset tiny-hybrid"):
        assert start in printed, start


@pytest.mark.long
def test_sparse_attention_is_measured_beside_sdpa(tmp_path, capsys):
    speed.main(["mixers", "--output_dir", str(tmp_path), "--rounds", "1", "--lengths", "640"])
    assert capsys.readouterr().out.count("| 640 |") == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("words, named", [(["--report"], "speed.jsonl"), (["--device", "cuda"], "--device cuda")])
def test_what_cannot_be_measured_is_one_sentence(words, named, tmp_path):
    with pytest.raises(SystemExit, match=named):
        speed.main(["peers", *words, "--output_dir", str(tmp_path)])


def test_a_ratio_is_hopes_value_over_the_models_with_its_range_over_rounds():
    values = {"hope": [2.0, 4.0, 3.0], "llama": [1.0, 2.0, 3.0], "mamba2": [4.0, 16.0, 10.0]}
    rows = [{"model": model, "tokens": 512, "measure": "step", "values": own} for model, own in values.items()]
    rows.append({"model": "kimi_linear", "tokens": 512, "measure": "note", "note": "no kernel"})
    lines = speed_report.table(rows, ranges=True).splitlines()
    assert lines[2] == "| step, s | 512 | 3 | 2 (1.50; 1.00 to 2.00) | 10 (0.30; 0.25 to 0.50) |"
    assert lines[-1] == "kimi_linear, 512 tokens: no kernel"
    assert "| 2 (1.50) | 10 (0.30) |" in speed_report.table(rows)


def test_models_take_turns_and_one_that_fails_is_left_out():
    calls, refused = [], []

    def turn(name):
        calls.append(name)
        if calls == ["a", "b", "a", "b"]:
            raise RuntimeError("no memory")
        return len(calls)

    measures = {"a": lambda: turn("a"), "b": lambda: turn("b")}
    assert in_turn(measures, 2, lambda name, error: refused.append((name, str(error)))) == {"a": [3, 5]}
    assert calls == ["a", "b", "a", "b", "a"] and refused == [("b", "no memory")]


def test_a_decoder_reads_its_context_once(tiny_model):
    model = tiny_model()
    context = torch.randint(64, (1, 9))
    decoder, tokens = Decoder(model, context), []
    for _ in range(4):
        decoder()
        tokens.append(decoder.token)
    expected = model.generate(context, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert torch.equal(torch.cat(tokens, 1), expected[:, 9:])


def test_tensors_of_a_cache_count_once_and_calls_but_for_views():
    shared = torch.zeros(4, 8)
    assert held_bytes([shared, shared[1:], {"again": (shared, torch.zeros(2, dtype=torch.int64))}]) == 144
    cache = DynamicCache()
    cache.update(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), 0)
    assert held_bytes(cache) == 2 * 4 * 24
    weight = torch.randn(4, 4, requires_grad=True)
    with Calls() as forward:
        result = torch.relu(torch.randn(2, 3, 4).view(6, 4)[:, :4] @ weight)
    with Calls() as backward:
        result.sum().backward()
    # randn, relu and the product; sum, its first gradient, and those of relu and of the product
    assert (forward.number, backward.number) == (3, 4)
