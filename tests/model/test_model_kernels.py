"""Models under each kernel of `HOPE_KERNELS` against torch's operators: training, pieces, generation.

On a GPU as they are, else in Triton's interpreter.
"""

import copy

import pytest
import torch
from interpreter import import_interpreted

from hope_hf.model.cache_hope import CACHE_NAME

pytestmark = [
    pytest.mark.kernels,
    # of the imports of torch's compiler
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Triton is not supported:UserWarning"),
]


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

@pytest.fixture
def models(monkeypatch, tiny_model):
    """The same model twice: with the kernels, and with torch's operators."""
    if DEVICE == "cpu":
        import_interpreted("fla.ops.gated_delta_rule", "fla.modules")
    built = []
    for asked in ("fla", "torch"):
        monkeypatch.setenv("HOPE_KERNELS", asked)
        built.append(tiny_model().to(DEVICE))
    return built


def assert_close(ours, theirs):
    assert (ours - theirs).norm() <= 1e-5 * theirs.norm()


DOCUMENTS = torch.cat([torch.arange(5), torch.arange(9), torch.arange(7)])[None].to(DEVICE)
PADDING = torch.tensor([[0] * 4 + [1] * 17, [1] * 21], device=DEVICE)


TEXTS = {"plain": {}, "documents": {"position_ids": DOCUMENTS}, "padding": {"attention_mask": PADDING}}


@pytest.mark.parametrize("options", TEXTS.values(), ids=TEXTS)
def test_a_model_trains_alike(models, options):
    rows = 2 if "attention_mask" in options else 1
    input_ids = torch.randint(64, (rows, 21), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    labels = input_ids.clone()
    if rows == 2:
        # what a model says after padding means nothing
        labels[:, 1:][PADDING[:, :-1] == 0] = -100
    exact = copy.deepcopy(models[1]).double()
    losses = []
    for model in (*models, exact):
        loss = model(input_ids, labels=labels, **options).loss
        loss.backward()
        losses.append(loss)
    assert_close(*losses[:2])
    for ours, theirs, true in zip(*(model.parameters() for model in (*models, exact)), strict=True):
        # A gradient may be the small rest of large terms, of which float32 keeps fewer digits on some processors.
        rounding = (theirs.grad - true.grad).norm()
        assert (ours.grad - theirs.grad).norm() <= 1e-5 * theirs.grad.norm() + 2 * rounding
        assert rounding <= 1e-4 * true.grad.norm()


def test_a_model_reads_in_pieces_and_generates_alike(models):
    input_ids = torch.randint(64, (2, 13), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    with torch.no_grad():
        whole = models[1](input_ids).logits
        cache, parts = None, []
        for part in input_ids.split([6, 1, 6], dim=1):
            out = models[0](part, cache=cache, use_cache=True)
            cache = out[CACHE_NAME]
            parts.append(out.logits)
    assert_close(torch.cat(parts, dim=1), whole)
    mask = torch.ones(2, 13, dtype=torch.long, device=DEVICE)
    mask[0, :3] = 0
    made = [m.generate(input_ids, attention_mask=mask, max_new_tokens=8, do_sample=False) for m in models]
    assert torch.equal(*made)
