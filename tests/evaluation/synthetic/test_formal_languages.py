"""The languages against their definitions: lists of words give the symbols that may follow a prefix."""

import re
from collections import Counter
from itertools import product

import pytest
import torch

from hope_hf.evaluation.synthetic.formal_languages import LANGUAGES, draw, dyck_word, formal_languages


def balanced(word: str, pair: str) -> bool:
    rest = "".join(symbol for symbol in word if symbol in pair)
    while pair in rest:
        rest = rest.replace(pair, "")
    return not rest


IS_WORD = {
    "parity": lambda word: word.count("1") % 2 == 0,
    "aa": lambda word: re.fullmatch("(aa)*", word),
    "abab": lambda word: re.fullmatch("(abab)*", word),
    "anbn": lambda word: word == "a" * (len(word) // 2) + "b" * (len(word) // 2),
    "anbncn": lambda word: word == "".join(symbol * (len(word) // 3) for symbol in "abc"),
    "shuffle-2": lambda word: balanced(word, "()") and balanced(word, "[]"),
}
# All words up to a length, and how long a prefix may be so that one of them continues it in every possible way.
LONGEST = {
    "parity": (10, 8),
    "aa": (12, 10),
    "abab": (16, 12),
    "anbn": (16, 7),
    "anbncn": (12, 3),
    "shuffle-2": (8, 3),
}


def words(name: str) -> set[str]:
    strings = ("".join(s) for n in range(1, LONGEST[name][0] + 1) for s in product(LANGUAGES[name].alphabet, repeat=n))
    return {string for string in strings if IS_WORD[name](string)}


def spelled(name: str, ids: torch.Tensor) -> str:
    return "".join(LANGUAGES[name].alphabet[i] for i in ids)


@pytest.mark.parametrize("name", LANGUAGES)
def test_next_symbols_are_those_of_the_words_that_continue_the_prefix(name):
    language, known = LANGUAGES[name], words(name)
    prefixes = {word[:n] for word in known for n in range(1, LONGEST[name][1] + 1)}
    if name in ("anbn", "anbncn"):
        # after the first block nothing is open, so longer prefixes of short words are complete, too
        prefixes |= {word[:n] for word in known if len(word) <= LONGEST[name][0] // 2 for n in range(1, len(word) + 1)}
    assert len(prefixes) > 8
    for prefix in prefixes:
        continued = {word[len(prefix)] for word in known if word.startswith(prefix) and len(word) > len(prefix)}
        expected = [symbol in continued for symbol in language.alphabet] + [prefix in known]
        ids = torch.tensor([language.alphabet.index(symbol) for symbol in prefix])
        assert language.next_symbols(ids)[-1].tolist() == expected, prefix


@pytest.mark.parametrize("name", LANGUAGES)
def test_samples_are_words_with_their_sets_and_nothing_behind_them_is_scored(name):
    task, language = formal_languages()[name], LANGUAGES[name]
    generator = torch.Generator().manual_seed(0)
    for index, (shortest, longest) in {None: (2, 50), 0: (2, 50), 1: (51, 100)}.items():
        batch = task.draw(150, generator, index)
        lengths = batch.mask.sum(1)
        assert set(lengths.tolist()) <= {n for n in range(shortest, longest + 1) if n % language.step == 0}
        assert lengths.min() <= shortest + 3 * language.step and lengths.max() >= longest - 3 * language.step
        assert batch.input_ids.shape == batch.mask.shape == batch.targets.shape[:2] == (150, lengths.max())
        for ids, sets, mask, length in zip(batch.input_ids, batch.targets, batch.mask, lengths, strict=True):
            assert mask.tolist() == [True] * length + [False] * (len(mask) - length)
            assert IS_WORD[name](spelled(name, ids[:length]))
            assert torch.equal(sets[:length], language.next_symbols(ids[:length]))
            # the word is complete: its end may follow
            assert sets[length - 1, -1] and not sets[length:].any()
            for position in range(length - 1):
                assert sets[position, ids[position + 1]]


def test_the_second_bin_is_longer_than_all_that_is_trained_on():
    task = formal_languages()["parity"]
    generator = torch.Generator().manual_seed(1)
    trained = max(task.draw(200, generator, None).mask.sum(1).tolist())
    assert trained < min(task.draw(200, generator, 1).mask.sum(1).tolist())


def test_the_label_of_parity_is_whether_the_prefix_has_an_even_number_of_ones():
    sets = LANGUAGES["parity"].next_symbols(torch.tensor([1, 0, 1, 1, 1]))
    assert sets.tolist() == [[True, True, end] for end in (False, False, True, False, True)]


def test_parity_and_shuffle_are_random_in_all_their_symbols():
    generator = torch.Generator().manual_seed(0)
    bits = LANGUAGES["parity"].word(5000, generator).float().mean()
    assert 0.45 < bits < 0.55
    drawn = [spelled("shuffle-2", LANGUAGES["shuffle-2"].word(4, generator)) for _ in range(2000)]
    assert set(drawn) == {word for word in words("shuffle-2") if len(word) == 4}


def test_balanced_words_are_equally_likely():
    generator = torch.Generator().manual_seed(0)
    counts = Counter(tuple(dyck_word(3, generator).tolist()) for _ in range(2000))
    assert set(counts) == {
        tuple(word) for word in product([0, 1], repeat=6) if balanced("".join("()"[bit] for bit in word), "()")
    }
    assert all(330 < count < 470 for count in counts.values())
    assert dyck_word(0, generator).tolist() == []


def test_samples_follow_from_the_seed():
    task = formal_languages()["shuffle-2"]
    first, again, other = (task.draw(8, torch.Generator().manual_seed(seed), 0) for seed in (5, 5, 6))
    assert torch.equal(first.input_ids, again.input_ids) and torch.equal(first.targets, again.targets)
    assert first.input_ids.shape != other.input_ids.shape or not torch.equal(first.input_ids, other.input_ids)


def test_lengths_of_the_user_are_further_bins():
    task = formal_languages([100, 200])["anbn"]
    assert task.bins == ("2-50", "51-100", "101-200")
    lengths = task.draw(100, torch.Generator().manual_seed(0), 2).mask.sum(1)
    assert 101 < lengths.min() and 190 < lengths.max() <= 200


@pytest.mark.parametrize("lengths", [[50], [20, 100], [100, 102]])
def test_lengths_that_hold_no_words_are_refused(lengths):
    with pytest.raises(ValueError, match="--lengths .* formal languages"):
        formal_languages(lengths)


def test_bins_of_a_language_of_few_words_name_no_word_twice():
    language = LANGUAGES["aa"]
    batch = draw(200, torch.Generator().manual_seed(0), 0, language=language, ends=[50]).distinct()
    assert sorted(batch.mask.sum(1).tolist()) == list(range(2, 51, 2))
