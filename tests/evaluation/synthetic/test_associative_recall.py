"""Multi-query recall: what is written, what is asked, and that both match."""

from collections import Counter

import torch

from hope_hf.evaluation.synthetic.associative_recall import IGNORED, associative_recall, recall_batch


def test_blanks_stand_between_the_asked_pairs_and_change_nothing_else():
    rows, pairs, symbols, length = 60, 8, 32, 64
    plain, plain_labels = recall_batch(rows, pairs, symbols, torch.Generator().manual_seed(3))
    input_ids, labels = recall_batch(rows, pairs, symbols, torch.Generator().manual_seed(3), length)
    assert input_ids.shape == labels.shape == (rows, length)
    starts = set()
    for row in range(rows):
        kept = input_ids[row] != 2 * symbols
        assert torch.equal(input_ids[row][kept], plain[row]) and torch.equal(labels[row][kept], plain_labels[row])
        assert kept[: 2 * pairs].all() and (labels[row][~kept] == IGNORED).all()
        places = kept.nonzero().flatten()[2 * pairs :].tolist()
        # a value follows its key at once
        assert all(value == key + 1 for key, value in zip(places[::2], places[1::2], strict=True))
        starts.update(places)
    # every position of the second half is used
    assert starts == set(range(2 * pairs, length))


def test_every_asked_key_wants_the_value_it_was_written_with():
    asked = [task for name, task in associative_recall().items() if name.startswith("mqar")]
    assert len(asked) == 6
    for task in asked:
        for bin, length in enumerate(map(int, task.bins)):
            pairs = length // 8
            batch = task.draw(20, torch.Generator().manual_seed(0), bin)
            assert batch.input_ids.shape == (20, length - 1) and batch.input_ids.max() < task.vocab_size
            assert (batch.mask.sum(1) == pairs).all() and not batch.mask[:, : 2 * pairs].any()
            for ids, targets, mask in zip(batch.input_ids.tolist(), batch.targets.tolist(), batch.mask, strict=True):
                written = dict(zip(ids[: 2 * pairs : 2], ids[1 : 2 * pairs : 2], strict=True))
                asked = mask.nonzero().flatten().tolist()
                assert {ids[place] for place in asked} == set(written)
                assert all(targets[place] == written[ids[place]] for place in asked)


def test_the_largest_task_has_64_pairs_in_512_tokens():
    assert associative_recall()["mqar-64"].bins == ("512",)


def test_mixed_sizes_are_trained_equally_often_out_of_64_keys_and_values():
    task, generator = associative_recall()["mqar"], torch.Generator().manual_seed(0)
    assert task.bins == ("32", "64", "128", "256", "512")
    lengths = Counter(task.draw(1, generator, None).input_ids.shape[1] + 1 for _ in range(1000))
    assert sorted(lengths) == [32, 64, 128, 256, 512] and min(lengths.values()) > 150
    assert task.draw(1000, generator, 0).input_ids.unique().tolist() == list(range(129))


def test_keys_and_values_are_paired_at_random():
    input_ids, _ = recall_batch(400, 4, 8, torch.Generator().manual_seed(0))
    pairs = {(int(key), int(value)) for row in input_ids for key, value in row[:8].view(4, 2)}
    assert len(pairs) == 64


def test_a_renamed_key_wants_the_value_of_the_key_that_it_renames():
    task, met = associative_recall()["rekeyed"], 0
    for bin, pairs in enumerate(map(int, task.bins)):
        batch = task.draw(20, torch.Generator().manual_seed(0), bin)
        assert batch.input_ids.shape == (20, 6 * pairs + 1) and batch.input_ids.max() == task.vocab_size - 1
        assert (batch.mask.sum(1) == pairs).all() and not batch.mask[:, : 4 * pairs + 2].any()
        for ids, targets, mask in zip(batch.input_ids.tolist(), batch.targets.tolist(), batch.mask, strict=True):
            written = dict(zip(ids[: 2 * pairs : 2], ids[1 : 2 * pairs : 2], strict=True))
            renamed = ids[2 * pairs + 1 : 4 * pairs + 1]
            old = dict(zip(renamed[1::2], renamed[::2], strict=True))
            asked = mask.nonzero().flatten().tolist()
            assert {ids[place] for place in asked} == set(old) and set(old.values()) == set(written)
            assert all(targets[place] == written[old[ids[place]]] for place in asked)
            # the old meaning of a name would give another value
            met += sum(written.get(ids[place], targets[place]) != targets[place] for place in asked)
    assert met > 100


def test_keys_keep_their_names_in_half_of_the_texts_for_training():
    task, kept = associative_recall()["rekeyed"], []
    drawn = [task.draw(40, torch.Generator().manual_seed(seed), None).input_ids for seed in range(20)]
    sizes = [ids.shape[1] // 6 for ids in drawn]
    assert set(sizes) == set(map(int, task.bins))
    for ids, pairs in zip(drawn, sizes, strict=True):
        renamed = ids[:, 2 * pairs + 1 : 4 * pairs + 1]
        kept += (renamed[:, ::2] == renamed[:, 1::2]).all(1).tolist()
    # some two pairs of the other texts are drawn with their own names
    assert 0.45 < sum(kept) / len(kept) < 0.6
