"""The archive of a cache: which tokens it holds after every way of reading, and what of them a question finds."""

import copy
import math
import pickle
import random
import sys
from itertools import pairwise

import pytest
import torch
from mixers import ATTENTION, HYBRID, WINDOW, random_ids
from safetensors.torch import load_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast

from hope_hf import HopeCache
from hope_hf.model import cache_file, cache_hope, recall
from hope_hf.model.archive import EMPTY, Archive, documents_of
from hope_hf.model.recall import join_passages, spans_of_passages
from hope_hf.training.state import CarriedMemory

TEXT = "The king likes soup. The queen of Arle likes fish. An old man sees a ship. His dog sleeps. A ship sinks."


@torch.no_grad()
def read(model, ids, cache=None, **options):
    cache = HopeCache(model.config) if cache is None else cache
    model(ids, cache=cache, **options)
    return cache


def ids_of(cache):
    """The documents of every row, as token ids."""
    rows = []
    for row in cache.archive.tokens:
        rows.append([ids for _, ids in documents_of(row)])
    return rows


def test_text_in_pieces_is_archived_once(tiny_model):
    model = tiny_model()
    ids = random_ids(2, 23)
    cache = None
    for piece in ids.split([1, 1, 5, 1, 7, 8], dim=1):
        cache = read(model, piece, cache)
    assert ids_of(cache) == [[ids[0].tolist()], [ids[1].tolist()]]


def test_padding_and_documents(tiny_model):
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    positions = torch.tensor([[0, 0, 0, 1, 0, 1], [0, 1, 2, 0, 1, 2]])
    ids = torch.tensor([[9, 9, 1, 2, 3, 4], [5, 6, 7, 8, 9, 10]])
    cache = read(tiny_model(), ids, attention_mask=mask, position_ids=positions)
    assert ids_of(cache) == [[[1, 2], [3, 4]], [[5, 6, 7], [8, 9, 10]]]
    assert documents_of(cache.archive.tokens[0])[1][0] == 4


def test_embeddings_leave_empty_columns(tiny_model):
    model = tiny_model()
    cache = read(model, random_ids(1, 3))
    with torch.no_grad():
        model(inputs_embeds=torch.randn(1, 2, model.config.hidden_size), cache=cache)
    assert cache.archive.tokens[0, 3:].tolist() == [EMPTY, EMPTY]


def test_learning_and_generation_archive_what_they_read(tiny_model):
    model = tiny_model(level_learning={"periods": [4, 8]})
    ids = random_ids(1, 10)
    cache = HopeCache(model.config)
    tokens = model.generate(
        ids, cache=cache, learn=True, learn_generated=True, max_new_tokens=5, min_new_tokens=5, do_sample=False
    )
    # `generate` does not read the last token
    assert ids_of(cache) == [[tokens[0, :-1].tolist()]]


def test_forks_snapshots_and_rows(tiny_model):
    model = tiny_model()
    ids = random_ids(2, 6)
    cache = read(model, ids)
    before = cache.snapshot()
    fork = copy.deepcopy(cache)
    read(model, random_ids(2, 3), cache)
    assert fork.archive.tokens.shape == (2, 6)
    cache.rollback(before)
    assert torch.equal(cache.archive.tokens, fork.archive.tokens)
    cache.reorder_cache(torch.tensor([1, 1]))
    assert ids_of(cache) == [[ids[1].tolist()]] * 2
    joined, mask = HopeCache.joined([fork, read(model, ids[:1, :4])])
    assert ids_of(joined)[2] == [ids[0, :4].tolist()]
    parts = joined.split(mask)
    assert ids_of(parts[2]) == [[ids[0, :4].tolist()]]
    cache.reset()
    assert cache.archive.tokens.numel() == 0


def test_rows_are_joined_on_the_device_of_the_first(tiny_model):
    """A cache from a file has its archive on the CPU until it reads on."""
    cache = read(tiny_model(), random_ids(1, 4))
    other = copy.deepcopy(cache)
    cache.archive.map(lambda tokens: tokens.to("meta"))
    cache.archive.append_rows([other.archive], [1, 1])
    assert cache.archive.tokens.is_meta and cache.archive.tokens.shape == (2, 4)
    other.archive.append_rows([copy.deepcopy(other.archive)], [1, 1])
    assert ids_of(other) == [[random_ids(1, 4)[0].tolist()]] * 2


def test_caller_may_reuse_its_tensor(tiny_model):
    ids = random_ids(1, 5).to(torch.int32)
    cache = read(tiny_model(), ids)
    expected = ids.tolist()
    ids.zero_()
    assert ids_of(cache) == [expected]


@torch.no_grad()
def test_growth_compiles_no_graph_a_token(tiny_model):
    model = tiny_model()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    cache = HopeCache(model.config)
    torch.compiler.reset()
    # more tokens than graphs that torch allows, which is an error with `fullgraph`
    for token in random_ids(20, 1, 1):
        compiled(token, cache=cache)
    assert cache.archive.tokens.shape == (1, 20)


def test_crop_takes_tokens_from_the_archive(tiny_model):
    model = tiny_model(**ATTENTION)
    ids = random_ids(1, 6)
    cache = read(model, ids)
    cache.crop(-2)
    assert ids_of(cache) == [[ids[0, :4].tolist()]]


@pytest.mark.parametrize("vocab_size, bytes_of_token", [(65535, 3), (65536, 4)])
def test_file_holds_the_archive(tiny_model, tmp_path, vocab_size, bytes_of_token):
    model = tiny_model(vocab_size=vocab_size)
    ids = random_ids(2, 9)
    ids[0, 5] = vocab_size - 1
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    cache = read(model, ids, position_ids=positions)
    cache.save_pretrained(tmp_path, model)
    file = load_file(tmp_path / "hope_cache.safetensors")
    stored = sum(tensor.nbytes for name, tensor in file.items() if name.startswith("archive."))
    assert stored == 2 * 9 * bytes_of_token
    loaded = HopeCache.from_pretrained(tmp_path, model)
    assert torch.equal(loaded.archive.tokens, cache.archive.tokens)


def test_file_without_an_archive_goes_on(tiny_model, tmp_path):
    model = tiny_model(**HYBRID)
    cache = HopeCache(model.config, archive=False)
    read(model, random_ids(1, 9), cache)
    cache.save_pretrained(tmp_path, model)
    loaded = HopeCache.from_pretrained(tmp_path, model)
    later = random_ids(1, 3)
    read(model, later, loaded)
    assert ids_of(loaded) == [[later[0].tolist()]]


@pytest.mark.parametrize(
    "name, change",
    [
        ("archive.tokens", lambda tensor: tensor[:, 1:]),
        ("archive.tokens", lambda tensor: tensor.to(torch.int64)),
        ("archive.tokens", lambda tensor: tensor.to(torch.int32) + 20_000),
        ("archive.begins", lambda tensor: tensor.repeat(2, 1)),
    ],
)
def test_wrong_archive_is_refused(tiny_model, tmp_path, monkeypatch, name, change):
    model = tiny_model()
    read(model, random_ids(1, 9)).save_pretrained(tmp_path, model)
    tensors, writer, learning = cache_file.read_cache(tmp_path)
    tensors[name] = change(tensors[name]).contiguous()
    monkeypatch.setattr(cache_hope, "read_cache", lambda folder: (tensors, writer, learning))
    with pytest.raises(ValueError, match="archive"):
        HopeCache.from_pretrained(tmp_path, model)


def test_ids_of_a_vocabulary_that_has_grown():
    archive = Archive(vocab_size=64)
    for token in (1, 65_534, 65_535, 70_000):
        archive.add(torch.tensor([[token]]), torch.zeros(1, 1, 8), None, torch.tensor([[0]]))
        loaded = Archive(vocab_size=80_000)
        loaded.load_checked(archive.named_tensors(), tuple(archive.tokens.shape))
        assert torch.equal(loaded.tokens, archive.tokens)


def test_tensors_without_an_archive_keep_its_columns(tiny_model):
    model = tiny_model()
    tensors = read(model, random_ids(1, 9), HopeCache(model.config, archive=False)).state_tensors()
    cache = HopeCache.from_state_tensors(model.config, tensors)
    later = random_ids(1, 3)
    read(model, later, cache)
    assert documents_of(cache.archive.tokens[0]) == [(9, later[0].tolist())]


def test_training_keeps_no_archive(tiny_model):
    model = tiny_model()
    memory = CarriedMemory(model.config)
    for _ in range(2):
        read(model, random_ids(1, 4), **memory.inputs())
        assert not [name for name in memory.state_tensors() if name.startswith("archive.")]
        memory.load(memory.state_tensors(), torch.device("cpu"))


# What a question finds.


@pytest.fixture
def english():
    """A tokenizer whose tokens are the words and marks of TEXT with the space before them, and 63 other entries."""
    pieces = pre_tokenizers.Split(Regex(r" ?\w+|[^\w\s]|\s"), "isolated")
    words = [piece for piece, _ in pieces.pre_tokenize_str(TEXT + "\n dragons")]
    vocabulary = {word: index for index, word in enumerate(dict.fromkeys(words))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="."))
    tokenizer.pre_tokenizer = pieces
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.fixture
def byte_tokenizer():
    """A tokenizer whose tokens are the 256 bytes."""
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    words.train_from_iterator([], trainers.BpeTrainer(vocab_size=256, initial_alphabet=alphabet, show_progress=False))
    return PreTrainedTokenizerFast(tokenizer_object=words)


@pytest.fixture
def reader(tiny_model, english):
    """A function that reads a text with a cache, or a new one."""
    model = tiny_model()

    def read_text(text, cache=None):
        ids = english(text, return_tensors="pt").input_ids
        return read(model, ids, cache)

    return read_text


def texts_of(passages):
    return [passage.text.strip() for passage in passages]


def test_passages_are_whole_sentences_at_their_columns(reader, english):
    cache = reader(TEXT)
    (passage,) = cache.recall("What does the old man see?", english, tokens=8, pieces=1)
    assert passage.text.strip() == "An old man sees a ship."
    columns = cache.archive.tokens[0, passage.start : passage.stop]
    assert english.decode(columns) == passage.text


def test_passages_cover_a_document_in_steps_of_half():
    draw = random.Random(0)
    for _ in range(300):
        length = draw.randint(1, 60)
        tokens = draw.randint(1, 20)
        share_of_ends = draw.choice([0, 0.05, 0.3])
        ids = [int(draw.random() < share_of_ends) for _ in range(length)]
        spans = list(spans_of_passages(ids, frozenset({1}), tokens))
        assert spans[0].start == 0 and spans[-1].stop == length
        assert all(0 < len(span) <= tokens for span in spans)
        for before, after in pairwise(spans):
            assert before.start < after.start <= before.stop


def test_names_decide_and_words_rank(reader, english):
    cache = reader(TEXT)
    assert texts_of(cache.recall("what likes soup", english, tokens=8)) == [
        "The king likes soup.",
        "The queen of Arle likes fish.",
    ]
    # "soup" is as rare as the name, which a passage must hold
    assert texts_of(cache.recall("Who likes soup in Arle", english, tokens=8)) == ["The queen of Arle likes fish."]


def test_score_is_bm25_by_hand(reader, english):
    """Robertson's formula with k1 = 1.2 and b = 0.75, and the inverse document frequency that FTS5 documents."""
    cache = reader(TEXT)
    (passage,) = cache.recall("dogs", english, tokens=8, pieces=1)
    # stems: of four passages, one holds "dog", once among six words; all have 22 words
    frequency = math.log((4 - 1 + 0.5) / (1 + 0.5))
    score = frequency * 2.2 / (1 + 1.2 * (0.25 + 0.75 * 6 / (22 / 4)))
    assert passage.score == pytest.approx(score, rel=1e-6)


def test_index_that_grows_equals_a_new_one(reader, english):
    words = TEXT.split(" ")
    cache = None
    for start in range(0, len(words), 5):
        cache = reader((" " if start else "") + " ".join(words[start : start + 5]), cache)
        grown = cache.recall("king ship dog", english, tokens=8, pieces=9)
        assert grown == copy.deepcopy(cache).recall("king ship dog", english, tokens=8, pieces=9)


def test_fork_and_rollback_forget_what_followed(reader, english):
    cache = reader(TEXT)
    before = cache.snapshot()
    reader(" dragons.", cache)
    (passage,) = cache.recall("dragons", english)
    assert "dragons" in passage.text
    cache.rollback(before)
    assert cache.recall("dragons", english) == []


def test_passages_end_before_a_column(reader, english):
    cache = reader(TEXT)
    found = cache.recall("ship", english, tokens=8, pieces=1)
    earlier = cache.recall("ship", english, tokens=8, pieces=1, stop=found[0].start)
    assert found != earlier
    assert all(passage.stop <= found[0].start for passage in earlier)


def test_documents_are_not_joined(tiny_model, english):
    ids = english(TEXT, return_tensors="pt").input_ids
    positions = torch.arange(ids.shape[1])[None].clone()
    positions[:, 3:] -= 3
    cache = read(tiny_model(), ids, position_ids=positions)
    (passage,) = cache.recall("soup", english, pieces=1)
    assert passage.start == 3


def test_marks_of_a_question_are_no_syntax(reader, english):
    cache = reader(TEXT)
    for question in ('"soup', "soup AND (", "NEAR(soup)", "soup*", "-soup", "words:soup", "soup\0", "?", "dragons"):
        cache.recall(question, english)


@pytest.mark.parametrize(
    "text, question, found",
    [
        ("国王喜欢喝汤。\n王后喜欢吃鱼。\n老人看见一艘船。", "谁吃鱼？", "吃鱼"),
        ("王様はスープが好きです。\n女王は魚が好きです。", "誰が魚が好きですか", "女王"),
        ("왕은 수프를 좋아한다.\n여왕은 생선을 좋아한다.", "생선", "여왕"),
        ("พระราชาชอบซุป\nราชินีชอบปลา", "ใครชอบปลา", "ราชินี"),
        ("Der König mag Suppe.\nDie Königin mag Fisch.", "Was mag die Königin?", "Fisch"),
        ("الملك يحب الحساء.\nالملكة تحب السمك.", "من تحب السمك؟", "الملكة"),
        ("The king\0 likes soup.\n A ship\0 sinks.", "ship\0", "sinks"),
        ("a" * 5000 + " soup", "soup", "soup"),
    ],
)
def test_scripts_and_odd_texts(tiny_model, byte_tokenizer, text, question, found):
    model = tiny_model(vocab_size=256)
    cache = read(model, byte_tokenizer(text, return_tensors="pt").input_ids)
    (passage,) = cache.recall(question, byte_tokenizer, tokens=80, pieces=1)
    assert found in passage.text


def test_conversation_behind_a_text_is_not_searched(reader, english):
    """Nor does it take the text's end along: what ends before `stop` is found, whatever follows."""
    cache = reader(TEXT)
    read = cache.get_seq_length()
    expected = cache.recall("ship sinks", english)
    reader(" A ship sinks. A ship sinks.", cache)
    assert cache.recall("ship sinks", english, stop=read) == expected


def test_vocabulary_with_holes(tiny_model):
    words = Tokenizer(models.WordLevel({"king": 5, "likes": 12, "soup": 40}, unk_token="king"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    cache = read(tiny_model(), torch.tensor([[5, 12, 40]]))
    assert texts_of(cache.recall("soup", tokenizer)) == ["king likes soup"]


def test_generated_tokens_that_the_tokenizer_lacks_are_not_searched(tiny_model, english):
    """A model may have more embeddings than its tokenizer has tokens."""
    model = tiny_model()
    ids = english(TEXT, return_tensors="pt").input_ids
    cache = read(model, torch.cat([ids, torch.tensor([[63]])], dim=1))
    expected = read(model, ids).recall("ship sinks", english, tokens=8)
    assert cache.recall("ship sinks", english, tokens=8) == expected
    read(model, english(" His queen sleeps.", return_tensors="pt").input_ids, cache)
    (passage,) = cache.recall("which queen sleeps", english, tokens=8, pieces=1)
    assert passage.text == " His queen sleeps." and passage.start == ids.shape[1] + 1


def test_interrupted_search_is_begun_again(reader, english, monkeypatch):
    cache = reader(TEXT)
    decode = english._decode

    def interrupted(token_ids, **options):
        if len(token_ids) > 1:
            raise KeyboardInterrupt
        return decode(token_ids, **options)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(english, "_decode", interrupted)
        cache.recall("king ship dog", english, tokens=8)
    expected = copy.deepcopy(cache).recall("king ship dog", english, tokens=8)
    assert cache.recall("king ship dog", english, tokens=8) == expected


def test_cache_with_an_index_is_pickled(reader, english):
    cache = reader(TEXT)
    found = cache.recall("soup", english)
    assert pickle.loads(pickle.dumps(cache)).recall("soup", english) == found
    assert copy.copy(cache).recall("soup", english) == found


@pytest.mark.parametrize(
    "word, options",
    [
        ("tokens", {"tokens": 0}),
        ("tokens", {"tokens": 2.5}),
        ("pieces", {"pieces": -1}),
        ("row", {"row": 1}),
        ("row", {"row": -1}),
        ("question", {"question": ["soup"]}),
        ("tokenizer", {"tokenizer": None}),
    ],
)
def test_arguments_of_no_search(reader, english, word, options):
    with pytest.raises(ValueError, match=word):
        reader(TEXT).recall(**{"question": "soup", "tokenizer": english} | options)


def test_what_cannot_be_recalled(tiny_model, reader, english, word_tokenizer, monkeypatch):
    model = tiny_model()
    with pytest.raises(ValueError, match="read nothing"):
        HopeCache(model.config).recall("soup", english)
    with pytest.raises(ValueError, match="archive=True"):
        read(model, random_ids(1, 9), HopeCache(model.config, archive=False)).recall("soup", english)
    with pytest.raises(ValueError, match="tokenizer"):
        read(model, torch.tensor([[1, 2, 63]])).recall("soup", english)

    monkeypatch.setattr(recall, "_TABLE", recall._TABLE.replace("fts5", "not_built_in"))
    with pytest.raises(ValueError, match="FTS5"):
        reader(TEXT).recall("soup", english)
    monkeypatch.setitem(sys.modules, "sqlite3", None)
    with pytest.raises(ValueError, match="FTS5"):
        reader(TEXT).recall("soup", english)


# `generate` with passages.


def prompts_of(english, texts):
    """Prompts padded in front, as `generate` takes them."""
    rows = [english(text).input_ids for text in texts]
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


@pytest.mark.parametrize("learn", [False, True])
def test_generate_reads_passages_first_and_keeps_none(tiny_model, english, learn):
    """The new tokens are those after passage and prompt; the cache is one that read prompt and new tokens alone."""
    model = tiny_model(level_learning={"periods": [4, 8]})
    cache = read(model, english(TEXT, return_tensors="pt").input_ids)
    prompt = english(" queen of Arle likes", return_tensors="pt").input_ids
    passages = cache.recall(" queen of Arle likes", english)
    context = english(join_passages(passages), return_tensors="pt").input_ids
    options = dict(max_new_tokens=4, min_new_tokens=4, do_sample=False)
    fork = copy.deepcopy(cache)
    by_hand = model.generate(torch.cat([context, prompt], dim=1), cache=fork, **options)
    without = copy.deepcopy(cache)
    tokens = model.generate(prompt, cache=cache, tokenizer=english, recall=True, learn=learn, **options)
    assert tokens[0].tolist() == [*prompt[0].tolist(), *by_hand[0, -4:].tolist()]
    with torch.no_grad():
        model(prompt, cache=without, learn=learn)
        model(tokens[:, prompt.shape[1] : -1], cache=without)
    expected = without.state_tensors()
    for name, tensor in cache.state_tensors().items():
        assert torch.equal(tensor, expected[name]), name


def test_rows_recall_their_own_passages(tiny_model, english):
    """A batch, several continuations of a prompt, and the whole text as input: the tokens of single calls."""
    model = tiny_model()
    cache = read(model, english(TEXT, return_tensors="pt").input_ids)
    both = copy.deepcopy(cache)
    both.batch_repeat_interleave(2)
    texts = [" dog sleeps", " old man sees a"]
    options = dict(recall=True, tokenizer=english, max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0)
    ids, mask = prompts_of(english, texts)
    together = model.generate(ids, attention_mask=mask, cache=both, **options)
    assert both.get_seq_length() == cache.get_seq_length() + ids.shape[1] + 3
    for row, text in enumerate(texts):
        prompt = english(text, return_tensors="pt").input_ids
        alone = model.generate(prompt, cache=copy.deepcopy(cache), **options)
        assert together[row, -4:].tolist() == alone[0, -4:].tolist()
        whole = english(TEXT + text, return_tensors="pt").input_ids
        again = model.generate(whole, cache=copy.deepcopy(cache), **options)
        assert again[0].tolist() == [*whole[0].tolist(), *alone[0, -4:].tolist()]
        fork = copy.deepcopy(cache)
        several = model.generate(prompt, cache=fork, **options, num_beams=2, num_return_sequences=2)
        assert len(several) == fork.num_sequences == 2


def test_generate_that_cannot_recall(tiny_model, reader, english):
    model = tiny_model(**WINDOW)
    cache = read(model, english(TEXT, return_tensors="pt").input_ids)
    prompt = english(" queen", return_tensors="pt").input_ids
    before = cache.state_tensors()
    for words, options in {
        "tokenizer=": dict(cache=cache),
        "give tokenizer=": dict(cache=cache, tokenizer="english"),
        "HopeCache": dict(tokenizer=english),
        "window": dict(cache=cache, tokenizer=english),
        "read nothing": dict(cache=HopeCache(model.config), tokenizer=english),
    }.items():
        with pytest.raises(ValueError, match=words):
            model.generate(prompt, recall=True, max_new_tokens=2, **options)
    after = cache.state_tensors()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


class Streamed(list):
    """A streamer that keeps what it gets."""

    def put(self, value):
        self.extend(value.flatten().tolist())

    def end(self):
        self.append("end")


def test_options_of_generate_do_not_see_the_passages(tiny_model, english, byte_tokenizer):
    """Lengths count the prompt alone, a streamer gets it alone, and stop strings have their tokenizer."""
    model = tiny_model()
    cache = read(model, english(TEXT, return_tensors="pt").input_ids)
    prompt = english(" queen of Arle likes", return_tensors="pt").input_ids
    lengths = dict(max_length=prompt.shape[1] + 3, min_length=prompt.shape[1] + 3, do_sample=False)
    options = dict(recall=True, tokenizer=english)
    expected = model.generate(prompt, cache=copy.deepcopy(cache), **options, **lengths)
    assert expected.shape == (1, prompt.shape[1] + 3)
    config = GenerationConfig(**lengths)
    for call in (dict(generation_config=config), dict()):
        streamer = Streamed()
        tokens = model.generate(prompt, cache=copy.deepcopy(cache), streamer=streamer, **call, **options)
        assert torch.equal(tokens, expected)
        assert streamer == [*expected[0].tolist(), "end"]
        model.generation_config = config
    assert config.max_length == lengths["max_length"]

    model = tiny_model(vocab_size=256)
    text = byte_tokenizer(TEXT, return_tensors="pt").input_ids
    question = byte_tokenizer("soup?", return_tensors="pt").input_ids
    (letter,) = byte_tokenizer("x").input_ids
    options = dict(recall=True, tokenizer=byte_tokenizer, do_sample=False, max_new_tokens=4)
    options |= dict(sequence_bias={(letter,): 1e4}, stop_strings=["xx"])
    tokens = model.generate(question, cache=read(model, text), **options)
    assert tokens[0].tolist() == [*question[0].tolist(), letter, letter]


@pytest.mark.parametrize(
    "question, tokens, pieces",
    [
        ("queen likes fish", 8, 1),
        ("queen likes fish", 14, 1),
        # the copy of the best passage overlaps one that has fewer of the words
        ("soup fish ship dog", 20, 4),
    ],
)
def test_document_read_twice_is_recalled_once(reader, english, question, tokens, pieces):
    cache = reader(TEXT)
    expected = texts_of(cache.recall(question, english, tokens, pieces))
    cache.archive.begin_document()
    reader(f" {TEXT}", cache)
    assert texts_of(cache.recall(question, english, tokens, pieces)) == expected


def test_texts_that_are_named_documents_are_not_joined(tiny_model):
    """With an earlier state of the cache, and where a row begins with padding."""
    model = tiny_model()
    ids = random_ids(2, 4)
    cache = read(model, ids)
    before = cache.snapshot()
    cache.archive.begin_document()
    mask = torch.tensor([[1, 1, 1, 1, 0, 1, 1], [1, 1, 1, 1, 1, 1, 1]])
    later = random_ids(2, 3, seed=2)
    read(model, later, cache, attention_mask=mask)
    read(model, later[:, :1], cache, attention_mask=torch.cat([mask, mask[:, :1]], dim=1))
    end = later[:, 0].tolist()
    assert ids_of(cache) == [
        [ids[0].tolist(), [*later[0, 1:].tolist(), end[0]]],
        [ids[1].tolist(), [*later[1].tolist(), end[1]]],
    ]
    cache.rollback(before)
    read(model, later, cache)
    assert ids_of(cache)[1] == [[*ids[1].tolist(), *later[1].tolist()]]


@pytest.mark.parametrize("window, count", [(140, 2), (80, 1)])
def test_the_best_passage_alone_is_read_in_a_short_window(tiny_model, english, window, count):
    model = tiny_model(**WINDOW | {"sliding_window": window})
    text = TEXT + " His dog sleeps." * 20 + " A queen sees a ship." + " An old dog sleeps." * 20
    cache = read(model, english(text, return_tensors="pt").input_ids)
    question = " queen sees ship"
    prompt = english(question, return_tensors="pt").input_ids
    passages = cache.recall(question, english)
    assert len(passages) == 2
    context = english(join_passages(passages[:count]), return_tensors="pt").input_ids
    calls = []
    model.register_forward_pre_hook(lambda _, args, options: calls.append(options), with_kwargs=True)
    model.generate(prompt, cache=cache, tokenizer=english, recall=True, max_new_tokens=1)
    assert calls[0]["input_ids"].tolist() == torch.cat([context, prompt], dim=1).tolist()


def test_special_tokens_that_a_passage_spells_are_text(tiny_model, byte_tokenizer):
    text = "A king ends a letter with <end> and likes soup."
    ids = byte_tokenizer(text, return_tensors="pt").input_ids
    byte_tokenizer.add_special_tokens({"eos_token": "<end>"})
    model = tiny_model(vocab_size=len(byte_tokenizer))
    cache = read(model, ids)
    question = byte_tokenizer("soup", return_tensors="pt").input_ids
    calls = []
    model.register_forward_pre_hook(lambda _, args, options: calls.append(options), with_kwargs=True)
    model.generate(question, cache=cache, tokenizer=byte_tokenizer, recall=True, max_new_tokens=1)
    prompt = calls[0]["input_ids"][0].tolist()
    assert prompt[: ids.shape[1]] == ids[0].tolist()
    assert byte_tokenizer.eos_token_id not in prompt


def test_generate_that_is_interrupted_keeps_no_passages(tiny_model, english):
    model = tiny_model()
    cache = read(model, english(TEXT, return_tensors="pt").input_ids)
    prompt = english(" queen", return_tensors="pt").input_ids
    before = cache.state_tensors()

    def interrupt(*_):
        raise KeyboardInterrupt

    options = dict(recall=True, tokenizer=english, max_new_tokens=4)
    with pytest.raises(KeyboardInterrupt):
        model.generate(prompt, cache=cache, stopping_criteria=[interrupt], **options)
    with pytest.raises(ValueError, match="2: choose rows"):
        model.generate(prompt.repeat(2, 1), cache=cache, **options)
    after = cache.state_tensors()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
