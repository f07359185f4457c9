"""benchmarks/passages.py: both tables of a tiny model, whose passages hold the facts."""

import pytest

from benchmarks import passages
from hope_hf.data import train_tokenizer
from hope_hf.evaluation.recall import facts as facts_module
from hope_hf.evaluation.recall.facts import make_facts
from hope_hf.evaluation.recall.kinds import KINDS

pytestmark = pytest.mark.benchmarks
NOVEL = "\n\n".join(f"It rained for {days} days, and nobody left the house." for days in range(400))


def test_both_tables_are_printed(tiny_model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(facts_module, "KINDS", KINDS[:1])
    monkeypatch.setattr(passages, "LENGTH", 1500)
    statements = [statement for fact in make_facts(0) for statement in fact.statements]
    tokenizer = train_tokenizer([NOVEL[:5000], *statements], 600)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "model")
    tiny_model(vocab_size=len(tokenizer)).save_pretrained(tmp_path / "model")
    novel = tmp_path / "novel.txt"
    novel.write_text(NOVEL)
    argv = [str(tmp_path / "model"), "--text", str(novel), "--sizes", "none", "64x1", "--chat", "none", "64x1"]
    assert passages.main(argv) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    scores = [line.split("|") for line in lines if "64x1" in line]
    # all of the first table, then a row for each form of the second
    assert len(scores) == 1 + len(passages.CHAT_FORMS)
    assert scores[0][2].strip() == "100"
    assert sum("none" in line for line in lines) == 2
