"""Levels that learn while reading: against the equations piece by piece in float64, and as a state of the cache."""

import copy
import math
from itertools import pairwise, product

import pytest
import torch
import torch.nn.functional as F
from huggingface_hub.errors import StrictDataclassError
from learning_models import ALL, TEACHES, Products, one_level
from mixers import ATTENTION, HYBRID, MIXED, WINDOW, random_ids
from peft import LoraConfig, get_peft_model
from torch.func import functional_call

from hope_hf import HopeCache, HopeConfig, LevelLearning
from hope_hf.model import cache_file
from hope_hf.model.level_learning import Learner, normalised

EXACT = dict(rtol=1e-11, atol=1e-11)
SAME = dict(rtol=0, atol=0)


def read(model, ids, cache=None, **arguments):
    """The logits of a text that the levels learn from, and the cache."""
    if cache is None:
        cache = HopeCache(model.config)
    with torch.no_grad():
        logits = model(ids, cache=cache, learn=True, **arguments).logits
    return logits, cache


def deltas(cache, rows=slice(None)):
    return {str(key): delta[rows] for key, delta in cache.levels.deltas.items()}


def factored(gradient):
    """Entry by entry: G_ij / sqrt(r_i c_j / mean(r)), then an RMS of at most 1."""
    squares = gradient.square()
    rows = squares.mean(1)
    columns = squares.mean(0)
    scale = (torch.outer(rows, columns) / rows.mean()).sqrt()
    scaled = torch.where(scale > 0, gradient / scale, 0.0)
    rms = scaled.square().mean().sqrt().item()
    return scaled / max(1.0, rms)


def step_strength(learning, mean_loss, guess):
    """What gate and brake leave of a step after a period whose tokens had this mean loss."""
    if learning.gate and mean_loss > guess:
        return 0.0
    if learning.brake:
        return min(1.0, mean_loss / (learning.brake * guess))
    return 1.0


def stepped(learning, weight, difference, gradient, strength):
    """The difference of a weight after a step, with its drift bounded."""
    size = learning.rate * weight.square().mean().sqrt() * strength
    difference = difference - size * factored(gradient)
    drift = difference.norm() / weight.norm()
    if drift > learning.drift:
        difference = difference * learning.drift / drift
    return difference


def twin(model, ids, learning: LevelLearning):
    """Logits [T, V] of one text [T], and the final differences by name, as in the equations.

    Every piece is read from the states that the pieces before it left, with weights `W + D`. The loss is computed from
    logits. Periods of slower levels sum the gradients of their pieces.
    """
    config = model.config
    learning = learning.resolved(config)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    level_of = {}
    for block, level, matrix in product(learning.blocks, range(len(learning.periods)), learning.matrices):
        level_of[f"model.layers.{block}.continuum.levels.{level}.{matrix}.weight"] = level
    differences = {name: torch.zeros_like(weights[name]) for name in level_of}
    sums = copy.deepcopy(differences)
    losses = [0.0] * len(learning.periods)
    counts = [0] * len(learning.periods)
    guess = math.log(config.vocab_size)
    cache = HopeCache(config)
    logits = []
    tokens_read = 0
    for piece in ids.split(learning.periods[0]):
        moved = {name: (weights[name] + differences[name]).requires_grad_() for name in level_of}
        out = functional_call(model, weights | moved, (piece[None],), dict(cache=cache)).logits[0]
        logits.append(out.detach())
        cache.detach_()
        tokens_read += len(piece)
        loss = F.cross_entropy(out[:-1], piece[1:], reduction="sum")
        for name, gradient in zip(moved, torch.autograd.grad(loss, list(moved.values())), strict=True):
            sums[name] += gradient
        for level, period in enumerate(learning.periods):
            losses[level] += loss.item()
            counts[level] += len(piece) - 1
            if tokens_read % period:
                continue
            strength = step_strength(learning, losses[level] / counts[level], guess)
            for name in level_of:
                if level_of[name] != level:
                    continue
                if strength:
                    differences[name] = stepped(learning, weights[name], differences[name], sums[name], strength)
                sums[name] = torch.zeros_like(sums[name])
            losses[level] = 0.0
            counts[level] = 0
    short_names = {}
    for name, difference in differences.items():
        _, _, block, _, _, level, matrix, _ = name.split(".")
        short_names[f"{block}.{level}.{matrix}"] = difference
    return torch.cat(logits), short_names


# layers, and what the levels learn by
RULES = {
    "plain": ({}, TEACHES),
    "all kinds of layers": (MIXED, TEACHES),
    "window": (WINDOW, TEACHES),
    "biases": ({"mlp_bias": True}, TEACHES | dict(matrices=ALL, rate=0.03)),
    "drift": (ATTENTION, TEACHES | dict(drift=0.2)),
    "gate": ({}, TEACHES | dict(gate=True)),
    "brake": ({}, TEACHES | dict(brake=2.0)),
    # a smaller rate, since a column whose gradient nearly vanishes is normalised to noise
    "matrices": ({}, TEACHES | dict(matrices=ALL, blocks=[0, 2], rate=0.03, brake=0.1)),
}


@pytest.mark.parametrize("name", RULES)
def test_outputs_and_differences_equal_the_equations(tiny_model, name):
    layers, rule = RULES[name]
    model = one_level(tiny_model, learning=rule, **layers)
    ids = random_ids(2, 43)
    logits, cache = read(model, ids)
    assert cache.levels.steps.sum() + cache.levels.skipped.sum() == 2 * 5
    for row in range(2):
        expected = twin(model, ids[row], model.config.level_learning)
        torch.testing.assert_close((logits[row], deltas(cache, row)), expected, **EXACT)
    if name == "plain":
        assert (logits - model(ids).logits)[:, 8:].abs().max() > 3e-3, "the levels have learned nothing"


@pytest.mark.parametrize("variant", ["sequential", "independent"])
def test_two_clocks_equal_the_equations(tiny_model, variant):
    rule = TEACHES | dict(periods=[4, 12], blocks=[1, 2])
    sizes = dict(level_periods=[1, 1], level_intermediate_sizes=[24, 16], level_variant=variant)
    model = one_level(tiny_model, learning=rule, **sizes, **HYBRID)
    ids = random_ids(1, 30)
    logits, cache = read(model, ids)
    assert cache.levels.steps.tolist() == [[7, 2]]
    expected = twin(model, ids[0], model.config.level_learning)
    torch.testing.assert_close((logits[0], deltas(cache, 0)), expected, **EXACT)


@pytest.mark.parametrize("rows", [1, 2])
def test_nothing_is_multiplied_that_no_step_needs(tiny_model, rows):
    """Each block is read once, each token is compared with the vocabulary once, and other weights get no gradient."""
    vocabulary, width, hidden, length, pieces = 71, 32, 40, 8, 3
    learning = TEACHES | dict(blocks=[1, 2])
    model = one_level(tiny_model, torch.float32, learning, vocab_size=vocabulary, level_intermediate_sizes=[hidden])
    ids = random_ids(rows, length * pieces)
    with Products(hidden) as of_levels:
        model.learn(ids, cache=HopeCache(model.config))
    # forward three maps in each of three blocks; backward both differences, and the inputs of the last block's maps
    products = 3 * 3 + 2 + 3
    assert of_levels.number == rows * pieces * length * width * hidden * products
    with Products(vocabulary) as of_head:
        model.learn(ids, cache=HopeCache(model.config))
    # forward all tokens; backward those that are learned from
    tokens = pieces * (length + length - 1)
    assert of_head.number == rows * tokens * width * vocabulary


def test_a_zero_gradient_and_a_tiny_one_are_normalised_without_nan():
    gradient = torch.randn(2, 6, 5, generator=torch.Generator().manual_seed(0))
    gradient[:, 2] = 0.0
    even = normalised(gradient)
    torch.testing.assert_close(even[0].double(), factored(gradient[0].double()), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(normalised(gradient * 1e-12), even)
    assert not normalised(torch.zeros(1, 3, 3)).any()


def test_a_text_cut_at_periods_reads_and_teaches_the_same(tiny_model):
    model = one_level(tiny_model, **MIXED)
    ids = random_ids(2, 40)
    whole, once = read(model, ids)
    cache = HopeCache(model.config)
    parts = [read(model, part, cache)[0] for part in ids.split([16, 8, 16], dim=1)]
    torch.testing.assert_close((torch.cat(parts, dim=1), deltas(cache)), (whole, deltas(once)), **SAME)


@pytest.mark.parametrize("side", ["left", "right"])
def test_rows_of_a_padded_batch_learn_as_if_alone(tiny_model, side):
    model = one_level(tiny_model, torch.float32, **MIXED)
    texts = [random_ids(1, length, seed=length) for length in (37, 21)]
    padding = (16, 0) if side == "left" else (0, 16)
    ids = torch.cat([texts[0], F.pad(texts[1], padding)])
    mask = (ids != 0).long()
    logits, cache = read(model, ids, attention_mask=mask)
    assert cache.levels.tokens.tolist() == [37, 21]
    for row, text in enumerate(texts):
        alone, cache_alone = read(model, text)
        found = logits[row, mask[row].bool()], deltas(cache, row)
        torch.testing.assert_close(found, (alone[0], deltas(cache_alone, 0)), rtol=0, atol=1e-5)


def positions_of(starts, length):
    """Positions [T] of documents that start in these columns."""
    lengths = [stop - start for start, stop in pairwise([*starts, length])]
    return torch.cat([torch.arange(document) for document in lengths])


@pytest.mark.parametrize("options", [{}, WINDOW], ids=["memory", "window"])
def test_documents_of_a_row_are_read_as_alone(tiny_model, options):
    model = one_level(tiny_model, **options)
    ids = random_ids(2, 37)
    starts_of_rows = [(0, 9, 12, 30), (0, 16)]
    positions = torch.stack([positions_of(starts, 37) for starts in starts_of_rows])
    logits, cache = read(model, ids, position_ids=positions)
    for row, starts in enumerate(starts_of_rows):
        for first, last in pairwise([*starts, 37]):
            expected, alone = read(model, ids[row : row + 1, first:last])
            torch.testing.assert_close(logits[row, first:last], expected[0])
        # what the last document has taught
        torch.testing.assert_close(deltas(cache, row), deltas(alone, 0))


def test_labels_say_what_is_scored_and_learned(tiny_model):
    model = one_level(tiny_model)
    ids = random_ids(1, 32)
    labels = ids.clone()
    labels[:, 8:16] = -100
    cache = HopeCache(model.config)
    with torch.no_grad():
        out = model(ids, labels=labels, cache=cache, learn=True, logits_to_keep=3)
        without_logits = model(ids, labels=labels, learn=True, skip_logits=True)
    # the second period holds no label: it takes no step
    assert cache.levels.steps.tolist() == [[3]]
    logits, _ = read(model, ids, labels=labels)
    torch.testing.assert_close(out.logits, logits[:, -3:])
    expected = F.cross_entropy(logits[0, :-1], labels[0, 1:])
    torch.testing.assert_close(out.loss, expected)
    torch.testing.assert_close(without_logits.loss, expected)
    assert without_logits.logits is None


def test_a_rate_of_0_equals_the_frozen_model_bit_by_bit(tiny_model):
    model = one_level(tiny_model, learning=TEACHES | dict(rate=0), **MIXED)
    ids = random_ids(2, 40)
    logits, _ = read(model, ids)
    cache = HopeCache(model.config)
    with torch.no_grad():
        frozen = [model(part, cache=cache).logits for part in ids.split(8, dim=1)]
    assert torch.equal(logits, torch.cat(frozen, dim=1))


def test_a_step_with_a_number_that_is_not_finite_is_left_out(tiny_model, monkeypatch):
    model = one_level(tiny_model)
    backward = torch.autograd.grad
    calls = []

    def broken(*args, **kwargs):
        gradients = backward(*args, **kwargs)
        calls.append(None)
        if len(calls) == 2:
            gradients[0][1, 0, 0] = math.inf
        return gradients

    monkeypatch.setattr(torch.autograd, "grad", broken)
    _, cache = read(model, random_ids(2, 24))
    assert cache.levels.steps.tolist() == [[3], [2]]
    assert cache.levels.skipped.tolist() == [[[0, 0]], [[0, 1]]]
    assert all(delta.isfinite().all() for delta in deltas(cache).values())


def answers(model, cache, ids):
    """Logits of a fork of the cache."""
    return read(model, ids, copy.deepcopy(cache))[0]


def test_what_is_learned_forks_rolls_back_reorders_and_resets(tiny_model):
    model = one_level(tiny_model, **MIXED)
    after = random_ids(3, 11, seed=2)
    _, cache = read(model, random_ids(3, 21))
    before = cache.snapshot()
    expected = answers(model, cache, after)
    read(model, random_ids(3, 30, seed=3), cache)
    assert not torch.allclose(answers(model, cache, after), expected)
    assert torch.equal(answers(model, cache.rollback(before), after), expected)
    reordered, selected, repeated = (copy.deepcopy(cache) for _ in range(3))
    reordered.reorder_cache(torch.tensor([2, 0, 0]))
    selected.batch_select_indices(torch.tensor([1]))
    repeated.batch_repeat_interleave(2)
    for changed, rows in ((reordered, [2, 0, 0]), (selected, [1]), (repeated, [0, 0, 1, 1, 2, 2])):
        torch.testing.assert_close(answers(model, changed, after[rows]), expected[rows])
    assert cache.level_bytes > 3 * 40 * 32 * 8
    cache.reset_levels()
    assert cache.level_bytes == 0 and cache.get_seq_length() == 21


def test_a_file_continues_in_every_precision(tiny_model, tmp_path):
    model = one_level(tiny_model, torch.float32, **HYBRID)
    _, cache = read(model, random_ids(2, 21))
    ids = random_ids(2, 30, seed=2)
    expected = answers(model, cache, ids)
    sizes = []
    for dtype, tolerance in (("float32", 1e-6), ("bfloat16", 1e-3), ("int8", 1e-3)):
        cache.save_pretrained(tmp_path / dtype, model, level_dtype=dtype)
        sizes.append((tmp_path / dtype / "hope_cache.safetensors").stat().st_size)
        loaded = HopeCache.from_pretrained(tmp_path / dtype, model)
        torch.testing.assert_close(read(model, ids, loaded)[0], expected, rtol=0, atol=tolerance)
    assert sizes[0] > sizes[1] > sizes[2]
    with pytest.raises(ValueError, match="level_dtype.*int4"):
        cache.save_pretrained(tmp_path, model, level_dtype="int4")
    frozen = read(model, ids, cache.reset_levels())[0]
    assert (frozen - expected).abs().max() > 5e-3, "what was learned makes no difference"


def test_int8_is_exact_to_a_part_of_each_row(tiny_model):
    """One factor for a whole matrix would lose its small rows."""
    _, cache = read(one_level(tiny_model), random_ids(1, 21))
    ((key, delta),) = cache.levels.deltas.items()
    delta = delta * torch.logspace(-4, 0, delta.shape[1])[:, None]
    stored = cache.levels._replace(deltas={key: delta}).named_tensors("int8")
    assert stored[f"deltas.{key}"].dtype == torch.int8
    error = stored[f"deltas.{key}"] * stored[f"factors.deltas.{key}"] - delta
    assert (error.abs() <= delta.abs().amax(-1, keepdim=True) / 253).all()


def test_a_cache_or_a_file_of_other_fields_is_refused(tiny_model, tmp_path):
    model = one_level(tiny_model, torch.float32)
    _, cache = read(model, random_ids(1, 21))
    cache.save_pretrained(tmp_path, model)
    others = {"level_learning": None, "`rate`.*0.3.*0.1": TEACHES | dict(rate=0.1)}
    for match, learning in others.items():
        with pytest.raises(ValueError, match=match):
            HopeCache.from_pretrained(tmp_path, one_level(tiny_model, torch.float32, learning=learning))
    wider = one_level(tiny_model, torch.float32, level_intermediate_sizes=[48])
    with pytest.raises(ValueError, match="does not fit"):
        read(wider, random_ids(1, 9), cache)
    model.config.level_learning = TEACHES | dict(blocks=[0])
    with pytest.raises(ValueError, match="level_learning"):
        read(model, random_ids(1, 9), cache)


# a tensor, its last value, and a word that the sentence has beside the tensor's name
WRONG_VALUES = [
    ("deltas.2.0.down_proj", math.nan, "NaN"),
    ("deltas.2.0.down_proj", 30.0, "`drift` 2.0"),
    ("gradients.2.0.down_proj", math.inf, "infinity"),
    ("scored", -1, "negative"),
]


def test_a_file_of_what_no_text_teaches_is_refused(tiny_model, tmp_path, monkeypatch):
    model = one_level(tiny_model, torch.float32)
    _, cache = read(model, random_ids(2, 21))
    tensors = cache.state_tensors()
    monkeypatch.setattr(cache_file, "_stays_finite", lambda _: True)
    for name, value, word in WRONG_VALUES:
        forged = tensors[f"levels.{name}"].clone(memory_format=torch.contiguous_format)
        forged.flatten()[-1] = value
        # with a seal that fits, as a program would make it
        changed = tensors | {f"levels.{name}": forged}
        monkeypatch.setattr(cache, "state_tensors", lambda dtype, changed=changed: changed)
        cache.save_pretrained(tmp_path / "forged", model)
        with pytest.raises(ValueError, match=word):
            HopeCache.from_pretrained(tmp_path / "forged", model)


def test_learn_reads_a_text_and_reports(tiny_model):
    model = one_level(tiny_model)
    ids = random_ids(1, 28)
    logits, expected = read(model, ids)
    cache = HopeCache(model.config)
    assert model.drift(cache) == 0
    report = model.learn(ids, cache=cache)
    torch.testing.assert_close(deltas(cache), deltas(expected), **SAME)
    assert report.loss == pytest.approx(F.cross_entropy(logits[0, :-1], ids[0, 1:]).item())
    assert (report.tokens, report.steps, len(report.losses)) == (28, [3], 4)
    weight = model.model.layers[2].continuum.levels[0].down_proj.weight
    drift = (deltas(cache)["2.0.down_proj"].norm() / weight.norm()).item()
    assert report.drift == model.drift(cache) == pytest.approx(drift)
    assert report.state_bytes == cache.level_bytes
    model.config.level_learning.gate = True
    assert model.learn(random_ids(1, 64, seed=7), cache=HopeCache(model.config)).skipped_gate > 0


def test_generate_learns_from_the_prompt_and_from_new_tokens_when_asked(tiny_model):
    # so much that the new tokens change
    model = one_level(tiny_model, learning=TEACHES | dict(rate=3.0, drift=20.0), **MIXED)
    ids = random_ids(2, 21)
    arguments = dict(do_sample=False, max_new_tokens=12, pad_token_id=0)
    plain = model.generate(ids, **arguments)
    cache = HopeCache(model.config)
    taught = model.generate(ids, cache=cache, learn=True, **arguments)
    _, expected = read(model, ids)
    torch.testing.assert_close(deltas(cache), deltas(expected))
    assert cache.get_seq_length() == 32 and not torch.equal(taught, plain)
    cache = HopeCache(model.config)
    assert torch.equal(model.generate(ids, cache=cache, learn=True, learn_generated=True, **arguments), taught)
    read(model, taught[:, 21:32], expected)
    assert cache.levels.tokens.tolist() == [32, 32]
    torch.testing.assert_close(deltas(cache), deltas(expected))
    assert model.generate(ids, learn=True, num_beams=3, **arguments).shape == plain.shape
    with pytest.raises(ValueError, match="num_beams"):
        model.generate(ids, learn_generated=True, num_beams=3, **arguments)


def test_ends_of_rows_are_not_learned(tiny_model):
    model = one_level(tiny_model)
    ids = random_ids(2, 21)
    arguments = dict(do_sample=False, max_new_tokens=12, pad_token_id=0, learn=True)
    end = model.generate(ids, **arguments)[0, 25].item()
    cache = HopeCache(model.config)
    tokens = model.generate(ids, cache=cache, learn_generated=True, eos_token_id=end, **arguments)
    # `generate` does not read the last token
    ended = (tokens[:, 21:-1] == end).long()
    written = (ended.cumsum(1) - ended == 0).sum(1)
    assert cache.levels.tokens.tolist() == (21 + written).tolist()
    assert written[0] < written[1]


IDS = random_ids(1, 20)
POSITIONS = positions_of((0, 9), 20)[None]
# layers, words of the sentence, and the call
REFUSED = [
    ({}, "input_ids, not inputs_embeds", dict(input_ids=None, inputs_embeds=torch.zeros(1, 3, 32).double())),
    ({}, "position_ids", dict(attention_mask=torch.arange(20)[None] // 10 + 1)),
    ({}, r"\(1, 1, 20, 20\).*learn=True", dict(attention_mask=torch.ones(1, 1, 20, 20))),
    ({}, "position_ids.*seq_idx", dict(seq_idx=torch.zeros_like(IDS))),
    ({}, "output_hidden_states", dict(output_hidden_states=True)),
    ({}, "leave attention_mask out", dict(position_ids=POSITIONS, attention_mask=torch.arange(20)[None].clamp(max=1))),
    (HYBRID, "a row of its own", dict(position_ids=POSITIONS)),
]


def test_a_call_that_cannot_learn_is_refused_and_changes_nothing(tiny_model):
    for options, words, call in REFUSED:
        model = one_level(tiny_model, **options)
        cache = HopeCache(model.config)
        with torch.no_grad(), pytest.raises(ValueError, match=words):
            model(**dict(input_ids=IDS, cache=cache, learn=True) | call)
        assert cache.levels is None and not cache.get_seq_length()
    with torch.inference_mode(), pytest.raises(ValueError, match="torch.no_grad"):
        model(IDS, learn=True)


def test_a_model_that_cannot_learn_is_refused(tiny_model):
    model = one_level(tiny_model)
    projection = model.model.layers[2].continuum.levels[0].down_proj
    # as bitsandbytes holds four bits, and where accelerate holds offloaded weights
    packed = torch.zeros(640, 1, dtype=torch.uint8)
    offloaded = torch.zeros(32, 40, dtype=torch.float64, device="meta")
    for weight, words in ((packed, r"\[640, 1\] torch.uint8"), (offloaded, "offloaded")):
        projection.weight = torch.nn.Parameter(weight, requires_grad=False)
        with pytest.raises(ValueError, match=f"down_proj of block 2.*{words}"):
            read(model, IDS)
    model.config.level_learning = None
    with pytest.raises(ValueError, match="level_learning"):
        read(model, IDS)


WRONG = [
    (dict(periods=[0]), "periods"),
    (dict(periods=[8, 8]), "periods"),
    (dict(rate=-1.0), "rate"),
    (dict(rate=math.nan), "rate"),
    (dict(drift=math.inf), "drift"),
    (dict(matrices=["q_proj"]), "matrices"),
    (dict(blocks=[3]), "blocks"),
    (dict(speed=1), "'speed'"),
    (dict(rate="fast"), "rate"),
]


@pytest.mark.parametrize("fields, match", WRONG, ids=str)
def test_wrong_fields_are_refused(fields, match):
    sizes = dict(hidden_size=64, num_hidden_layers=3, level_periods=[1], level_intermediate_sizes=[8])
    with pytest.raises((ValueError, StrictDataclassError), match=match):
        HopeConfig(**sizes, level_learning=fields)


def test_fields_survive_the_configuration_file(tmp_path):
    config = HopeConfig(hidden_size=64, num_hidden_layers=8, level_periods=[1], level_learning=dict(rate=0.01))
    config.save_pretrained(tmp_path)
    again = HopeConfig.from_pretrained(tmp_path)
    assert again.level_learning == LevelLearning(rate=0.01)
    resolved = again.level_learning.resolved(again)
    assert (resolved.blocks, resolved.periods) == ([6, 7], [512])


def test_bfloat16_weights_keep_float32_differences(tiny_model):
    model = one_level(tiny_model, torch.bfloat16)
    ids = random_ids(1, 40)
    _, cache = read(model, ids)
    assert {delta.dtype for delta in deltas(cache).values()} == {torch.float32}
    assert model(ids[:, :5], cache=cache).logits.dtype == torch.bfloat16


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")
def test_a_model_with_adapters_learns_and_stays(tiny_model, tmp_path):
    ids = random_ids(2, 40)
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    adapted = get_peft_model(one_level(tiny_model, torch.float32, **HYBRID), lora).eval()
    before = copy.deepcopy(adapted.state_dict())
    cache = HopeCache(adapted.config)
    with torch.no_grad():
        logits = adapted(input_ids=ids, cache=cache, learn=True).logits
        frozen = adapted(input_ids=ids).logits
    torch.testing.assert_close(logits[:, :8], frozen[:, :8], rtol=0, atol=1e-5)
    assert (logits - frozen)[:, 8:].abs().max() > 3e-3
    torch.testing.assert_close(adapted.state_dict(), before, **SAME)
    # rate and drift count from the maps without their adapters
    models = adapted.get_base_model(), one_level(tiny_model, torch.float32, **HYBRID)
    norms = [Learner.of(model, adapted.config.level_learning).norms for model in models]
    torch.testing.assert_close(*norms, **SAME)
    # a file of the adapted model, whether PEFT's class or the model in it is named
    cache.save_pretrained(tmp_path, adapted)
    for model in (adapted, adapted.get_base_model()):
        loaded = HopeCache.from_pretrained(tmp_path, model)
        torch.testing.assert_close(deltas(loaded), deltas(cache), **SAME)


@pytest.mark.filterwarnings("ignore:Calling register_constant:FutureWarning")
def test_a_model_of_int8_weights_learns(tiny_model):
    # `make` installs torchao for the tests alone.
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = one_level(tiny_model, torch.float32, **HYBRID)
    quantize_(model, Int8WeightOnlyConfig())
    _, cache = read(model, random_ids(2, 40))
    assert cache.levels.steps.tolist() == [[5], [5]]


def test_a_compiled_model_learns_the_same(tiny_model):
    model = one_level(tiny_model, torch.float32, **ATTENTION)
    ids = random_ids(1, 40)
    _, expected = read(model, ids)
    _, cache = read(torch.compile(model, backend="eager"), ids)
    torch.testing.assert_close(deltas(cache), deltas(expected))
