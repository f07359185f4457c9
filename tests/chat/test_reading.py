"""Files that are read: their losses, the steps of the levels, and mistakes."""


import pytest
import torch
from torch.nn.functional import cross_entropy

from hope_hf import HopeCache
from hope_hf.chat import reading
from hope_hf.chat.conversation import Transcript
from hope_hf.chat.files import text_of

TEXT = " ".join(f"w{(7 * i * i + i) % 61}" for i in range(90))


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch):
    monkeypatch.setattr(reading, "PIECE", 12)


def table(report: str) -> dict[str, list[float]]:
    """The numbers of a report's rows by their names; a head and a line come first."""
    _, _, *rows = [line.strip("| ").split("|") for line in report.splitlines() if line.startswith("| ")]
    numbers = {}
    for name, *cells in rows:
        numbers[name.strip()] = list(map(float, cells))
    return numbers


def quarters(losses: torch.Tensor) -> list[float]:
    parts = losses, losses[: len(losses) // 4], losses[-(len(losses) // 4) :]
    return [pytest.approx(part.mean().item(), abs=6e-5) for part in parts]


@torch.no_grad()
def losses_of(model, ids, cache, **options) -> torch.Tensor:
    logits = model(torch.tensor([ids]), cache=cache, **options).logits[0]
    return cross_entropy(logits[:-1], torch.tensor(ids[1:]), reduction="none")


@pytest.mark.parametrize("begun", [False, True])
def test_the_losses_are_those_of_the_text_in_one_call(conversation, model, begun):
    talk = conversation(learn=True)
    learning = HopeCache(model.config)
    frozen = HopeCache(model.config)
    ids = talk.encode(TEXT)
    if begun:
        # a step, and three tokens in an open period
        for cache in (learning, frozen, talk.cache):
            model.learn(torch.arange(11)[None], cache=cache)
        talk.transcript = Transcript((9,), ({"role": "user", "content": "w1"},), "w1")
        with torch.no_grad():
            for cache in (learning, frozen):
                model(torch.tensor([[9]]), cache=cache)
    frozen.reset_levels()
    expected = {
        "levels learn": quarters(losses_of(model, ids, learning, learn=True)),
        "frozen": quarters(losses_of(model, ids, frozen)),
    }
    report = reading.read_text(talk, "some/book.txt", TEXT, compare=True)
    assert table(report) == expected and expected["levels learn"] != expected["frozen"]
    for key, delta in learning.levels.deltas.items():
        torch.testing.assert_close(talk.cache.levels.deltas[key], delta, atol=1e-5, rtol=0)
    assert talk.transcript == Transcript(begins=talk.cache.get_seq_length()) and talk.last.read == 90
    assert "took 11 steps" in report


def test_a_text_is_read_without_learning(conversation, model):
    talk = conversation()
    report = reading.read_text(talk, "book.txt", TEXT)
    assert talk.cache.levels is None and "steps" not in report
    assert table(report) == {"reading": quarters(losses_of(model, talk.encode(TEXT), HopeCache(model.config)))}


@pytest.mark.parametrize("text", ["w1", "w1 " * 401])
def test_texts_too_short_or_long_are_refused(conversation, text):
    talk = conversation()
    with pytest.raises(ValueError, match="fewer than two tokens|400 positions"):
        reading.read_text(talk, "book.txt", text)
    assert not talk.has_begun


@pytest.mark.parametrize("content", [None, b"", b" \n", bytes(range(256))])
def test_files_without_text_are_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "book.txt").write_bytes(content)
    with pytest.raises(ValueError, match=rf"--file {tmp_path}/book.txt (is empty|cannot be read as text)"):
        text_of(f"{tmp_path}/book.txt", "--file")
