"""docs/results.md has the figures of docs/results/*.jsonl, and README has those of docs/results.md."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SPEC = importlib.util.spec_from_file_location("tables", ROOT / "docs/results/tables.py")
tables = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(tables)


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.name)
def test_the_page_is_what_the_script_writes(page):
    assert tables.rendered(page) == page.read_text(encoding="utf-8")
