"""One model that learns segments in use: by its levels, in the context and by fine-tuning of a copy."""

import json
import random

import pytest
import torch
import yaml

from hope_hf import HopeCache
from hope_hf.data import document_start
from hope_hf.evaluation import main
from hope_hf.evaluation.continual.in_use import CONTEXT, LEVELS, TUNING, learn_in_use
from hope_hf.evaluation.continual.segments import Segment

WORDS = {"reading": "the memory of a model reads", "saying": "what was said before in text"}


@pytest.fixture
def segments(tokenizer) -> list[Segment]:
    """Two segments of few words each, the first one in two documents."""

    def document(name: str, count: int) -> torch.Tensor:
        text = " ".join(random.Random(count).choices(WORDS[name].split(), k=count))
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        return torch.tensor([document_start(tokenizer), *ids])

    reading = Segment("reading", [document("reading", 30), document("reading", 40)], 1)
    return [reading, Segment("saying", [document("saying", 80)], 1)]


def forgets(result) -> dict[tuple[str, str], dict]:
    """The rows of forgetting by way and segment."""
    table = result.tables["Loss of the second halves, forgetting and backward transfer, nats per token"]
    return {(row["way"], row["segment"]): row for row in table}


def test_levels_learn_both_segments_and_the_model_stays_as_it_was(learner, arguments, segments):
    loaded = learner(max_position_embeddings=2048)
    before = {name: value.clone() for name, value in loaded.model.state_dict().items()}
    result = learn_in_use(arguments(learning_rate=3e-3), loaded, segments)
    assert all(torch.equal(value, before[name]) for name, value in loaded.model.state_dict().items())
    rows = forgets(result)
    for way in (LEVELS, TUNING):
        for name in WORDS:
            assert rows[way, name]["last"] < rows[way, name]["first"] - 0.01
    # before anything is learned all ways read alike
    assert len({round(rows[way, "saying"]["first"], 4) for way in (LEVELS, CONTEXT, TUNING)}) == 1
    _, table, _ = result.tables.values()
    for row, segment in zip(table, segments, strict=True):
        tokens = sum(len(document) - 1 for document in segment.documents)
        assert row["segment"] == segment.name and row["n"] == tokens // 2
        assert 0 < row["loss"] < row["loss_levels_as_trained"]


def test_the_second_halves_are_read_with_what_levels_have_learned(learner, arguments, segments):
    loaded = learner(dtype=torch.float64)
    model = loaded.model
    *_, rows = learn_in_use(arguments(), loaded, segments).tables.values()
    one, two = segments[0].documents
    (text,) = segments[1].documents
    tokens = len(one) - 1 + len(two) - 1
    read_of_two = tokens // 2 - (len(one) - 1)
    assert read_of_two > 0
    first = HopeCache(model.config)
    model.learn(one[None], cache=first)
    second = HopeCache(model.config)
    second.levels = first.levels
    model.learn(two[None, : 1 + read_of_two], cache=second)
    cache = HopeCache(model.config)
    cache.levels = second.levels
    half = (len(text) - 1) // 2
    rest = torch.cat([text[:1], text[1 + half :]])[None]
    with torch.no_grad():
        logits = model(rest, cache=cache).logits[:, :-1]
    expected = torch.nn.functional.cross_entropy(logits.mT, rest[:, 1:])
    of_levels = [row for row in rows if (row["way"], row["segment"]) == (LEVELS, "saying")]
    start, row = of_levels[:2]
    assert row["loss"] == pytest.approx(float(expected), rel=1e-6)
    assert row["n"] == rest.shape[1] - 1
    assert row["change"] == pytest.approx(row["loss"] - start["loss"], abs=1e-6)


def test_a_whole_report(learner, tmp_path):
    loaded = learner()
    loaded.model.save_pretrained(tmp_path / "model")
    loaded.tokenizer.save_pretrained(tmp_path / "model")
    corpora = {}
    for name, words in WORDS.items():
        (tmp_path / f"{name}.txt").write_text(f"{words} " * 20)
        corpora[name] = {"files": str(tmp_path / f"{name}.txt")}
    (tmp_path / "segments.yaml").write_text(yaml.safe_dump({"corpora": corpora}, sort_keys=False))
    flags = ["--suite", "continual", "--device", "cpu", "--cpu_threads", "1"]
    flags += ["--model_name_or_path", str(tmp_path / "model"), "--segments", str(tmp_path / "segments.yaml")]
    assert main([*flags, "--output_dir", str(tmp_path / "eval")]) == 0
    record = json.loads((tmp_path / "eval/results.json").read_text())["results"]["continual"]
    assert record["summary"][1]["number"] == "levels learn: forgetting"
    assert (tmp_path / "eval/continual.png").read_bytes().startswith(b"\x89PNG")
