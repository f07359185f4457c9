"""Tables of names that flags take, which need no torch, hold the names of what they name."""

from hope_hf import PRESETS
from hope_hf.common import names
from hope_hf.optim import RULES


def test_tables_of_names_are_complete():
    assert names.OPTIMIZERS == tuple(RULES)
    assert names.PRESETS == tuple(PRESETS)
