"""`hope-hf retain`: the folder that it writes, and its errors."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hope_hf import HopeCache, HopeConfig, HopeForCausalLM
from hope_hf.data.vocabulary import train_tokenizer
from hope_hf.retain import main

PROSE = "\n\n".join(f"Paragraph {number} says that the sea was calm and the wind low." for number in range(80))
SHORT = ["--texts", "2", "--block_size", "256", "--retained_tokens", "20"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with prose, a model with windows, and one with memories."""
    folder = tmp_path_factory.mktemp("retain")
    (folder / "prose.txt").write_text(PROSE)
    (folder / "empty.txt").write_text("\n\n")
    (folder / "line.txt").write_text("The sea was calm.")
    tokenizer = train_tokenizer([PROSE], 300)
    sizes = dict(vocab_size=len(tokenizer), hidden_size=32, head_dim=16, max_position_embeddings=512)
    kinds = {"windows": ["window_attention"] * 4, "memories": ["window_attention", "hope_memory"]}
    kinds["whole"] = ["full_attention"]
    torch.manual_seed(0)
    for name, layers in kinds.items():
        window = None if name == "whole" else 40
        config = HopeConfig(**sizes, num_hidden_layers=len(layers), layer_types=layers, sliding_window=window)
        HopeForCausalLM(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


def retain(place, out, *words, model="windows", file="prose.txt"):
    names = [str(place / model), "--train_file", str(place / file), "--output_dir", str(out)]
    return main([*names, *SHORT, *words])


def test_a_model_with_windows_retains_tokens(place, tmp_path, capsys):
    assert retain(place, tmp_path / "out") == 0
    printed = capsys.readouterr().out
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    config = model.config
    # the third of four layers, rounded up
    assert sorted(config.layer_types) == ["retaining_attention"] * 2 + ["window_attention"] * 2
    assert [len(counts) for counts in config.retained_tokens] == [2, 2]
    for layer, kind in enumerate(config.layer_types):
        assert (f"layer {layer} retains" in printed) == (kind == "retaining_attention")
    before, after = (load_file(folder / "model.safetensors") for folder in (place / "windows", tmp_path / "out"))
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
    assert {name.split(".mixer.")[1] for name in after.keys() - before.keys()} == {
        "scores.up_weight", "scores.up_bias", "scores.down_weight", "scores.down_bias",
    }  # fmt: skip
    assert "retains tokens" in (tmp_path / "out" / "README.md").read_text()
    # a state of one size, which differs from the window's
    sizes = set()
    for length in (10, 300):
        cache = HopeCache(config, archive=False)
        with torch.no_grad():
            model(torch.ones(1, length, dtype=torch.long), cache=cache)
        sizes.add(sum(tensor.nbytes for tensor in cache.state_tensors().values()))
    assert len(sizes) == 1


def test_the_same_seed_gives_the_same_model_and_a_model_can_learn_again(place, tmp_path):
    assert retain(place, tmp_path / "first", "--layers", "1,3") == 0
    assert retain(place, tmp_path / "second", "--layers", "3,1") == 0
    # its layers that retain have a window, too
    assert (
        retain(
            tmp_path, tmp_path / "third", "--layers", "1,3", "--train_file", str(place / "prose.txt"), model="first"
        )
        == 0
    )
    folders = [tmp_path / name for name in ("first", "second", "third")]
    weights = [load_file(folder / "model.safetensors") for folder in folders]
    kinds = [json.loads((folder / "config.json").read_text())["mixer_types"] for folder in folders]
    assert kinds == [["window_attention", "retaining_attention"] * 2] * 3
    for other in weights[1:]:
        assert other.keys() == weights[0].keys()
        assert all(torch.equal(other[name], tensor) for name, tensor in weights[0].items())


def test_a_model_in_bfloat16_stays_so(place, tmp_path):
    whole = HopeForCausalLM.from_pretrained(place / "windows", dtype=torch.bfloat16)
    whole.save_pretrained(tmp_path / "low")
    for file in (place / "windows").glob("tokenizer*"):
        (tmp_path / "low" / file.name).write_bytes(file.read_bytes())
    again = dict(model=tmp_path / "low")
    assert retain(place, tmp_path / "out", "--layers", "1", **again) == 0
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.bfloat16 and model(torch.ones(1, 100, dtype=torch.long)).logits.isfinite().all()


ERRORS = [
    (["--layers", "7"], {}, "--layers has 7, and the layers of MODEL {place}/windows with a window are 0, 1, 2, 3"),
    (["--layers", "x"], {}, "--layers is 'x': write whole numbers of 0 or more"),
    (["--block_size", "4096"], {}, "knows 512 positions: give at most 448"),
    ([], {"model": "whole"}, "MODEL {place}/whole has no layer with a window: convert it with --sliding_window."),
    ([], {"model": "memories"}, "MODEL {place}/memories has layers of type 'hope_memory'"),
    ([], {"model": "missing"}, "MODEL {place}/missing does not exist"),
    ([], {"file": "missing.txt"}, "--train_file {place}/missing.txt does not exist"),
    ([], {"file": "empty.txt"}, "--train_file {place}/empty.txt holds no text"),
    ([], {"file": "line.txt"}, "tokens, and one text has 256 (--block_size): give more prose."),
]


@pytest.mark.parametrize(("words", "names", "message"), ERRORS)
def test_mistakes_are_one_sentence(place, tmp_path, capsys, words, names, message):
    assert retain(place, tmp_path / "out", *words, **names) == 2
    error = capsys.readouterr().err
    assert message.format(place=place) in error and error.count("error: ") == 1
    assert not (tmp_path / "out").exists()
