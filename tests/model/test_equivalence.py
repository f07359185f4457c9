"""Every way to compute a text, in every situation, for every mixer: equal to the document alone by the plain code.

A way is the code that runs: plain or hand-written, all tokens at once or one by one. A situation is how documents come
in calls: padded, packed, through a cache. The plain code itself is compared with the equations of each mixer. Float64.

By default each mixer meets each way and each situation; marked `long`, all of their pairs.
"""

import sys

import pytest
import torch
from definitions import assert_as_defined
from situations import FULL, LENGTH, MIXERS, SITUATIONS, TEXTS, Way, build, check
from transformers import StaticCache

from hope_hf.model.backends import FAST


class Recomputed(Way):
    """Blocks are computed once more in the backward pass."""

    def __init__(self, kind):
        super().__init__(kind)
        enable = getattr(self.model, "activation_checkpointing_enable", self.model.gradient_checkpointing_enable)
        enable({"use_reentrant": False})
        self.model.train()


class TokenByToken(Way):
    has_gradients = False

    def read(self, ids, cache=None, **call):
        cache = self.new_cache() if cache is None else cache
        before = cache.get_seq_length()
        logits = []
        for at in range(ids.shape[1]):
            part = dict(call)
            if "attention_mask" in call:
                part["attention_mask"] = call["attention_mask"][:, : before + at + 1]
            if "position_ids" in call:
                part["position_ids"] = call["position_ids"][:, at : at + 1]
            logits.append(super().read(ids[:, at : at + 1], cache, **part))
        return torch.cat(logits, dim=1)


class Static(Way):
    """Through a cache of fixed length, which is overwritten in place."""

    has_gradients = False

    def new_cache(self):
        return StaticCache(self.model.config, max_cache_len=2 * LENGTH)

    def read(self, ids, cache=None, **call):
        return super().read(ids, self.new_cache() if cache is None else cache, **call)


class Compiled(Way):
    """As the tracer reads it, which must find one graph."""

    def __init__(self, kind):
        super().__init__(kind)
        torch._dynamo.reset()
        self.compiled = torch.compile(self.model, backend="eager", fullgraph=True)

    def read(self, ids, cache=None, **call):
        return self.compiled(ids, cache=cache, **call).logits


# so that these texts fill several tiles of each loop
TILES = {"BAND": 4, "_TIME_TILE": 8, "_QUERY_TILE": 8, "_GATHERED": 8, "_BLOCK": 96}


@pytest.fixture(autouse=True)
def short_tiles(monkeypatch):
    modules = [module for name, module in sys.modules.items() if name.startswith("hope_hf.")]
    for name, size in TILES.items():
        owners = [module for module in modules if hasattr(module, name)]
        assert owners, name
        for module in owners:
            monkeypatch.setattr(module, name, size)


# the class, and the value of `HOPE_KERNELS`
WAYS = {
    "plain": (Way, "plain"),
    "fast": (Way, "auto"),
    "operators": (Way, "torch"),
    # as a copy of the model's code from the Hub does
    "model alone": (Way, "auto"),
    "recomputed": (Recomputed, "auto"),
    "token by token": (TokenByToken, "auto"),
    "static": (Static, "auto"),
    "compiled": (Compiled, "auto"),
}


def is_possible(kind, way, situation):
    """Softmax attention goes on seeing what its cache holds; a cache of fixed length has no rows to choose."""
    if situation in ("forks", "ages") and way in ("static", "recomputed", "compiled"):
        return False
    if FULL not in MIXERS[kind].get("layer_types", []):
        return True
    if situation == "packed":
        return way not in ("token by token", "static")
    return situation != "packed_in_calls"


def pairs():
    """All combinations; one possible way of each mixer and situation is quick, in turn, and one is compiled."""
    for number, kind in enumerate(MIXERS):
        for place, situation in enumerate(SITUATIONS):
            ways = [way for way in WAYS if is_possible(kind, way, situation)]
            quick = [way for way in ways if way != "compiled"]
            chosen = quick[(number + place) % len(quick)] if quick else None
            for way in ways:
                is_compiled = (kind, way, situation) == ("static", "compiled", "resumed")
                marks = () if way == chosen or is_compiled else pytest.mark.long
                yield pytest.param(kind, way, situation, marks=marks, id=f"{kind}-{way}-{situation}")


@pytest.mark.parametrize("kind, way, situation", [*pairs()])
def test_what_is_read_is_the_document_alone(monkeypatch, kind, way, situation):
    reader, kernels = WAYS[way]
    monkeypatch.setenv("HOPE_KERNELS", kernels)
    for name in [*FAST] if way == "model alone" else ():
        monkeypatch.delitem(FAST, name)
    check(reader(kind), kind, situation)


@pytest.mark.parametrize("kind", MIXERS)
def test_the_plain_code_is_as_defined(monkeypatch, kind):
    monkeypatch.setenv("HOPE_KERNELS", "plain")
    assert_as_defined(build(kind), TEXTS[:2])
