"""What benchmarks/step.py compares has the same size, and it counts what runs."""

import pytest
import torch

from benchmarks.step import Calls, Decoder, default_size, in_turn, main, rows, tiny_and_llama
from hope_hf import HopeConfig

pytestmark = pytest.mark.benchmarks


def test_peers_are_fitted_to_hope_as_its_config_makes_it():
    size = default_size(320)
    config = HopeConfig(vocab_size=320, hidden_size=size.hidden_size, num_hidden_layers=size.num_hidden_layers)
    assert size.memory_heads == config.num_memory_heads
    assert [size.level_intermediate_size] * 3 == config.level_intermediate_sizes


def test_hope_and_llama_decode_with_equal_parameters():
    counts = {name: network.num_parameters() for name, network in tiny_and_llama().items()}
    assert counts["llama"] == pytest.approx(counts["hope"], rel=0.005)


def test_ratios_are_those_of_a_round():
    fast, slow, own = iter([9.0, 1.0, 2.0]), iter([9.0, 4.0, 16.0]), iter([9.0, 2.0, 4.0])
    measures = {"hope": lambda: next(own), "llama": lambda: next(fast), "mamba2": lambda: next(slow)}
    found = list(rows(in_turn(measures, rounds=2)))
    assert found == [
        ["hope", "3.000", ""],
        ["llama", "1.500", "2.00 (2.00 to 2.00)"],
        ["mamba2", "10.000", "0.38 (0.25 to 0.50)"],
    ]


def test_a_decoder_reads_its_context_once(tiny_model):
    model = tiny_model()
    context = torch.randint(64, (1, 9))
    decoder = Decoder(model, context)
    tokens = [decoder.token]
    for _ in range(3):
        assert decoder() > 0
        tokens.append(decoder.token)
    expected = model.generate(context, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert torch.equal(torch.cat(tokens, 1), expected[:, 9:])


def test_calls_are_counted_but_for_views():
    weight = torch.randn(4, 4, requires_grad=True)
    with Calls() as forward:
        result = torch.relu(torch.randn(2, 3, 4).view(6, 4)[:, :4] @ weight)
    with Calls() as backward:
        result.sum().backward()
    # randn, relu and the product; sum, its first gradient, and those of relu and of the product
    assert (forward.number, backward.number) == (3, 4)


def test_every_peer_has_a_row(capsys):
    main(["--lengths", "8", "16", "--rounds", "1", "--batch_size", "1", "--models", "llama", "mamba2"])
    lines = capsys.readouterr().out.splitlines()
    table = [line.split(" | ")[:2] for line in lines if line.startswith(("| 8 ", "| 16 "))]
    assert table == [[f"| {length}", name] for length in (8, 16) for name in ("hope", "llama", "mamba2")]


def test_decoding_is_measured_at_every_context(capsys):
    main(["--decode", "--contexts", "4", "--tokens", "2"])
    assert [line[:10] for line in capsys.readouterr().out.splitlines()[-2:]] == ["| 4 | hope", "| 4 | llam"]
