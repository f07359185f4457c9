"""The mixer on flash-linear-attention's kernels against the plain one in float64: outputs, states, all gradients.

On a GPU as it is, else in Triton's interpreter.
"""

import copy

import pytest
import torch
from interpreter import import_interpreted
from torch._subclasses.fake_tensor import FakeTensorMode

from hope_hf import PRESETS, HopeConfig
from hope_hf.model.chunks import Past, plan_chunks
from hope_hf.model.kernels_fla import mix
from hope_hf.model.memory_mixer import SelfModifyingTitans
from hope_hf.model.memory_scan import ScanState

pytestmark = [
    pytest.mark.kernels,
    # of the imports of torch's compiler
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Triton is not supported:UserWarning"),
]


DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEADS, WIDTH, TAPS = 2, 8, 4


@pytest.fixture(autouse=True)
def interpreted():
    torch.manual_seed(0)
    if DEVICE.type == "cpu":
        import_interpreted("fla.ops.gated_delta_rule", "fla.modules")


def random_mixer(**options) -> SelfModifyingTitans:
    config = HopeConfig(
        vocab_size=8, hidden_size=16, num_hidden_layers=1, head_dim=WIDTH, num_memory_heads=HEADS,
        conv_kernel_size=TAPS, memory_chunk_size=8, **options,
    )  # fmt: skip
    mixer = SelfModifyingTitans(config, 0).double()
    for parameter in mixer.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return mixer


def random_state(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    shapes = (rows, HEADS, WIDTH, WIDTH), (rows, HEADS, TAPS - 1, 3 * WIDTH)
    return tuple(torch.randn(shape, dtype=torch.float64) for shape in shapes)


def results(mixer, kernels, hidden_states, given, options, need_state, dtype=torch.float64):
    """Output at real tokens and state after the call, and the gradients of the input, the parameters and the state."""
    mixer = copy.deepcopy(mixer).to(DEVICE, dtype)
    mixer.kernels = kernels
    hidden_states = hidden_states.to(DEVICE, dtype).requires_grad_()
    wide = torch.promote_types(dtype, torch.float32)
    given = [part.to(DEVICE, wide).requires_grad_() for part in given]
    state = ScanState((given[0],), (), given[1]) if given else None
    options = {name: part.to(DEVICE) if isinstance(part, torch.Tensor) else part for name, part in options.items()}
    if "past" in options:
        options["past"] = options["past"].map(lambda part: part.to(DEVICE))
    plan = plan_chunks(mixer.config, hidden_states.shape[:2], DEVICE, **options)
    output, after = mixer(hidden_states, state, plan=plan, need_state=need_state)
    if "padding_mask" in options:
        output = output * options["padding_mask"].unsqueeze(-1)
    made = [output, *(after.current if need_state else ()), *([after.conv_tail] if need_state else ())]
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(part.shape, generator=generator, dtype=torch.float64).to(DEVICE) for part in made]
    loss = sum((part * weight).sum() for part, weight in zip(made, weights, strict=True))
    leaves = [hidden_states, *mixer.parameters(), *given]
    gradients = torch.autograd.grad(loss, leaves, allow_unused=not need_state)
    return [part.detach() for part in (*made, *gradients) if part is not None]


def assert_fla_equals_plain(mixer, *arguments):
    expected, found = results(mixer, "plain", *arguments), results(mixer, "fla", *arguments, torch.float32)
    rounded = results(mixer, "plain", *arguments, torch.float32)
    largest = max(part.norm() for part in expected)
    for ours, theirs, narrow in zip(found, expected, rounded, strict=True):
        # A gradient may be the small rest of large terms, of which float32 keeps few digits. The kernels make that of
        # the retention of differences as large as other gradients: on one processor of two the rest is 3.5e-5 off.
        rounding = (narrow - theirs).norm()
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm() + 2 * rounding + 1e-6 * largest
        assert rounding <= 2e-5 * theirs.norm()


def plain_rows(length, seen=0):
    counts = torch.full((2,), seen), torch.zeros(2, dtype=torch.long)
    return torch.randn(2, length, 16, dtype=torch.float64), {"past": Past(seen, True, *counts)} if seen else {}


def ragged_rows():
    """Rows of unequal history with padding on both sides and inside, with documents, and one of padding alone.

    The row that has read one token has a tail of inputs of the document before.
    """
    length = 20
    mask = torch.ones(4, length, dtype=torch.long)
    mask[0, :3], mask[1, -4:], mask[2, [0, 1, 8, 9]], mask[3] = 0, 0, 0, 0
    positions = torch.arange(length).repeat(4, 1) + 100
    for row, begin in ((0, 5), (0, 10), (1, 1), (2, length - TAPS + 1)):
        positions[row, begin:] = torch.arange(length - begin)
    past = Past(9, False, torch.tensor([3, 9, 1, 5]), torch.zeros(4, dtype=torch.long))
    options = {"past": past, "padding_mask": mask, "position_ids": positions}
    return torch.randn(4, length, 16, dtype=torch.float64), options


@pytest.mark.parametrize("length, seen, need_state", [(21, 0, False), (21, 0, True), (21, 3, True), (2, 3, True)])
def test_rows_of_one_document(length, seen, need_state):
    hidden_states, options = plain_rows(length, seen)
    given = random_state(2) if seen else ()
    assert_fla_equals_plain(random_mixer(), hidden_states, given, options, need_state)


def test_values_that_keep_their_norm():
    hidden_states, options = plain_rows(9)
    assert_fla_equals_plain(random_mixer(memory_value_gate=False), hidden_states, (), options, False)


def test_a_gate_of_what_is_erased():
    hidden_states, options = ragged_rows()
    mixer = random_mixer(memory_erase_bias=[-3, 3])
    assert_fla_equals_plain(mixer, hidden_states, random_state(4), options, True)


def test_packed_documents():
    hidden_states, _ = plain_rows(21)
    positions = torch.cat([torch.arange(size) for size in (5, 9, 7, 21)]).view(2, 21)
    assert_fla_equals_plain(random_mixer(), hidden_states, (), {"position_ids": positions}, True)


def test_rows_with_padding_documents_and_unequal_history():
    hidden_states, options = ragged_rows()
    assert_fla_equals_plain(random_mixer(), hidden_states, random_state(4), options, True)


@torch.no_grad()
def test_a_call_of_padding_alone_changes_nothing():
    mixer, hidden_states = random_mixer().to(DEVICE, torch.float32), ragged_rows()[0].to(DEVICE, torch.float32)
    mask = torch.zeros(4, 20, dtype=torch.long)
    plan = plan_chunks(mixer.config, (4, 20), DEVICE, padding_mask=mask.to(DEVICE))
    state, tail = (part.to(DEVICE, torch.float32) for part in random_state(4))
    before = ScanState((state,), (), tail)
    assert mix(mixer, hidden_states, before, plan, True)[1] is before


def test_launches_and_bytes_of_a_training_step(monkeypatch):
    # its peers load the library, which must have been made for the interpreter before
    from benchmarks import speed

    monkeypatch.setitem(PRESETS, "mid", PRESETS["mid"] | {"num_hidden_layers": 2})
    case = speed.Peers(speed.make_parser().parse_args(["bytes"]), "mid")
    hope, llama = (speed.traffic_of(case, name, 2048) for name in (speed.HOPE, speed.LLAMA))
    # the preset has 24 layers: 60 GB and 5.5 GiB
    assert hope.moved["elementwise"] <= 2 / 24 * 60e9
    assert hope.saved <= 2 / 24 * 5.5 * 2**30
    assert hope.number <= 2 * llama.number
    # every kernel is counted: of a layer three convolutions and norms each way, and more than ten of the scan
    assert hope.kernels > 2 * 2 * (3 + 3) + 2 * 10 and not llama.kernels


@pytest.mark.parametrize("options", [{}, {"memory_value_gate": False, "head_dim": 32}])
def test_what_a_mixer_keeps_is_what_is_planned(monkeypatch, options):
    from benchmarks.measuring import Traffic

    monkeypatch.setenv("HOPE_KERNELS", "fla")
    config = HopeConfig(vocab_size=8, hidden_size=1024, num_hidden_layers=1, num_memory_heads=32, **options)
    with FakeTensorMode():
        hidden_states, mixer = torch.zeros(2, 1024, 1024), SelfModifyingTitans(config, 0)
        with Traffic(mixer) as traffic:
            mixer(hidden_states, plan=plan_chunks(config, (2, 1024), hidden_states.device))
    expected = SelfModifyingTitans.kept_bytes(config, 2, 1024, 4)
    assert traffic.saved - hidden_states.nbytes == pytest.approx(expected, rel=0.02)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type == "cpu", reason="the interpreter has no products of bfloat16")
@pytest.mark.parametrize("is_ragged", [False, True])
def test_bfloat16(is_ragged):
    hidden_states, options = ragged_rows() if is_ragged else plain_rows(70)
    given = random_state(4) if is_ragged else ()
    mixer, hidden_states = random_mixer().bfloat16().double(), hidden_states.bfloat16().double()
    expected = results(mixer, "plain", hidden_states, given, options, bool(given))
    found = results(mixer, "fla", hidden_states, given, options, bool(given), torch.bfloat16)
    # the output and the gradient of the input, each over its norm
    for index in (0, 3 if given else 1):
        assert (found[index] - expected[index]).norm() <= 3e-2 * expected[index].norm()
