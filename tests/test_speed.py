"""benchmarks/speed.py: models of one size, what is measured, and its tables; small, every model has its row."""

import json

import pytest
import torch

from benchmarks import speed

pytestmark = pytest.mark.benchmarks
PEERS = ("llama", "mamba2", "gated_deltanet", "kimi_linear")


@pytest.fixture(autouse=True)
def _process_settings():
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
    expected = {(model, "step", 64) for model in ("hope", *PEERS)}
    for measure in ("prefill", "token", "cache"):
        for model in ("hope", *PEERS):
            expected |= {(model, measure, 64), (model, measure, 128)}
    assert values.keys() == expected and min(values.values()) > 0
    # a recurrent model carries as much after any text, Llama twice as much after twice the text
    assert values["llama", "cache", 128] == pytest.approx(2 * values["llama", "cache", 64], rel=0.01)
    for model in ("hope", *PEERS[1:]):
        assert values[model, "cache", 128] == values[model, "cache", 64]
    # what cannot run says why, and the others go on
    printed = capsys.readouterr().out
    assert "hope_fla, 64 tokens: ValueError: " in printed
    speed.main([*words, "--report"])
    assert capsys.readouterr().out == printed
    assert (tmp_path / "speed.png").stat().st_size > 10_000


@pytest.mark.long
def test_the_other_cases_print_their_tables(tmp_path, capsys):
    speed.main(["calls", "--tokens", "64"])
    speed.main(["recompute", "--tokens", "16", "--rounds", "1"])
    preset = ["--presets", "tiny-hybrid", "--models", "hope", "--measures", "step", "peak", "--rounds", "1"]
    speed.main(["peers", "--output_dir", str(tmp_path), *preset, "--tokens_per_step", "16", "--lengths", "8"])
    speed.main(["mixers", "--output_dir", str(tmp_path), "--rounds", "1", "--lengths", "640"])
    printed = capsys.readouterr().out
    for start in ("| model", "| llama", "| none", "| every:2", "| block", "CPU, preset tiny-hybrid", "| 640 |"):
        assert start in printed, start
