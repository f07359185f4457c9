"""The tasks of MAD, checked row by row against their descriptions."""

from itertools import groupby

import pytest
import torch

from hope_hf import HopeConfig, HopeForCausalLM
from hope_hf.evaluation.synthetic.mad import LastStateDecoder, draw_in_context_recall, mad, memorised_table, sinusoids


def drawn(name: str, bin: int | None = 0, rows: int = 60, seed: int = 0):
    return mad()[name].draw(rows, torch.Generator().manual_seed(seed), bin)


def pairs_of(tokens: list[int], first_value: int) -> list[tuple[tuple, tuple]]:
    """Alternating runs of key symbols and of value symbols, as pairs."""
    runs = [tuple(run) for _, run in groupby(tokens, lambda token: token >= first_value)]
    return list(zip(runs[::2], runs[1::2], strict=True))


@pytest.mark.parametrize("name", mad())
def test_samples_follow_from_the_seed_and_fit_the_vocabulary(name):
    task = mad()[name]
    for bin in (None, 0):
        first, again, other = drawn(name, bin), drawn(name, bin), drawn(name, bin, seed=1)
        assert torch.equal(first.input_ids, again.input_ids) and torch.equal(first.mask, again.mask)
        assert not torch.equal(first.input_ids, other.input_ids)
        assert 0 <= first.input_ids.min() and first.input_ids.max() < task.vocab_size
        assert first.targets[first.mask].max() < task.vocab_size
        assert first.mask.any(1).all() and abs(first.input_ids.shape[1] - int(task.bins[0])) <= 1


def test_recall_asks_for_the_value_of_every_key_that_has_occurred_before():
    batch = drawn("mad-recall")
    for ids, targets, mask in zip(batch.input_ids.tolist(), batch.targets.tolist(), batch.mask.tolist(), strict=True):
        assert targets[:-1] == ids[1:]
        known = {}
        for place, key in enumerate(ids):
            if place % 2:
                assert not mask[place]
                continue
            value = targets[place]
            assert key < 8 <= value < 16
            assert mask[place] == (key in known)
            assert known.setdefault(key, value) == value
        assert mask[-1]
    keys = batch.input_ids[:, ::2]
    assert set(keys.unique().tolist()) == set(range(8)) and set(keys[:, -1].tolist()) == set(range(8))


def test_the_key_that_recall_asks_last_has_always_occurred():
    batch = draw_in_context_recall(300, torch.Generator().manual_seed(0), 0, pairs=3)
    keys = batch.input_ids[:, ::2]
    assert ((keys[:, -1:] == keys[:, :-1]).any(1)).all()
    assert (keys[:, -1] == keys[:, 0]).any() and (keys[:, -1] == keys[:, 1]).any()


@pytest.mark.parametrize("name", ["mad-recall", "mad-fuzzy-recall"])
def test_recall_trains_on_every_next_token(name):
    batch = drawn(name, None)
    assert batch.mask.all() and torch.equal(batch.targets[:, :-1], batch.input_ids[:, 1:])


def test_fuzzy_recall_asks_for_the_values_of_words_that_have_occurred_before():
    sizes, scored = set(), 0
    for bin in (None, 0):
        batch = drawn("mad-fuzzy-recall", bin, rows=200)
        assert batch.input_ids.shape == (200, 128)
        rows = zip(batch.input_ids.tolist(), batch.targets.tolist(), batch.mask.tolist(), strict=True)
        for ids, targets, mask in rows:
            tokens = [ids[0], *targets]
            content = [token for token in tokens if token != 15]
            start = len(tokens) - len(content)
            assert tokens[start:] == content and start < 24
            known, place, pairs = {}, start, pairs_of(content, 7)
            for key, value in pairs:
                assert len(set(key)) == len(key) <= 3 and len(set(value)) == len(value) <= 3
                sizes.add((bin, len(key), len(value)))
                if bin == 0:
                    # the mask belongs to the token before the one that is asked
                    expected = [False] * len(key) + [key in known] * len(value)
                    assert [False, *mask][place : place + len(expected)] == expected
                    scored += sum(expected)
                place += len(key) + len(value)
                assert known.setdefault(key, value) == value
            assert pairs[-1] in pairs[:-1]
    assert sizes == {(None, k, v) for k in (1, 2, 3) for v in (1, 2, 3)} | {(0, 3, v) for v in (1, 2, 3)}
    assert scored == batch.mask.sum()


def test_selective_copying_asks_for_the_symbols_without_the_blanks():
    batch = drawn("mad-selective-copying")
    assert batch.input_ids.shape == (60, 256)
    gaps = []
    for ids, targets, mask in zip(batch.input_ids.tolist(), batch.targets.tolist(), batch.mask.tolist(), strict=True):
        assert mask == [False] * 240 + [True] * 16
        before, after = ids[:239], ids[240:]
        assert ids[239] == 15 and 15 not in before and after == [14] * 16
        content = [token for token in before if token != 14]
        assert len(content) == 16 and targets[240:] == content and before[-1] != 14
        places = [-1, *(place for place, token in enumerate(before) if token != 14)]
        gaps.append([right - left - 1 for left, right in zip(places, places[1:], strict=False)])
    means = torch.tensor(gaps).double().mean(0)
    # 223 blanks before 16 symbols
    assert (means - 223 / 16).abs().max() < 2


def test_compression_asks_for_all_symbols_but_the_signal():
    batch = drawn("mad-compression")
    assert torch.equal(batch.input_ids, batch.targets) and (batch.input_ids[:, -1] == 15).all()
    assert set(batch.input_ids[:, :-1].unique().tolist()) == set(range(15))
    assert batch.mask[:, :-1].all() and not batch.mask[:, -1].any()


def test_memorisation_has_one_table_that_no_input_shows():
    table = memorised_table(256).tolist()
    assert len(table) == len(set(table)) == 127 and set(table) <= set(range(127, 255))
    assert table == memorised_table(256).tolist() and table != sorted(table)
    for seed, bin in ((0, None), (1, 0)):
        batch = drawn("mad-memorisation", bin, seed=seed)
        keys, signals = batch.input_ids[:, ::2], batch.input_ids[:, 1::2]
        assert (keys < 127).all() and (signals == 255).all()
        assert torch.equal(batch.mask, batch.input_ids == 255)
        assert batch.targets[:, 1::2].tolist() == [[table[key] for key in row] for row in keys.tolist()]


def test_the_decoder_sees_the_last_state_alone():
    torch.manual_seed(0)
    model = HopeForCausalLM(HopeConfig(vocab_size=16, hidden_size=32, head_dim=16, num_hidden_layers=1)).double()
    decoder = LastStateDecoder(model, 12, 16).double()
    input_ids = torch.randint(16, (2, 12))
    logits = decoder(input_ids)
    state = model.model(input_ids=input_ids).last_hidden_state[:, -1]
    expected = [decoder.decoder(state + decoder.positions[place]) for place in range(12)]
    assert torch.allclose(logits, torch.stack(expected, 1))
    assert len({tuple(row) for row in sinusoids(12, 32).tolist()}) == 12
