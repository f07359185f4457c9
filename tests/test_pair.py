"""The recipes of the pair in docs/results_pair.md are the medium size of the benchmark."""

import json
from pathlib import Path

import pytest

from benchmarks.quality.models import SIZES, build
from hope_hf.data import read_mixture
from hope_hf.training.parsing import parse

pytestmark = pytest.mark.benchmarks
PAIR = Path(__file__).parents[1] / "benchmarks" / "pair"


@pytest.mark.parametrize("name", ["hope", "llama"])
def test_a_recipe_is_the_benchmarks_model(name, tmp_path):
    args = parse([str(PAIR / f"{name}.yaml"), "--train_shards", "shards", "--output_dir", str(tmp_path / "run")])
    model = build(name, SIZES["medium"])
    assert args.model_type == model.model_type and json.loads(args.config_overrides) == json.loads(model.overrides)


def test_both_train_alike():
    """But for the model and its rates."""
    flags = [
        {line.split(":")[0]: line for line in (PAIR / f"{name}.yaml").read_text().splitlines() if line[:1].isalpha()}
        for name in ("hope", "llama")
    ]
    shared = flags[0].keys() & flags[1].keys() - {"model_type", "learning_rate"}
    assert all(flags[0][name] == flags[1][name] for name in shared) and "block_size" in shared
    assert flags[0].keys() ^ flags[1].keys() == {"vector_learning_rate"}


def test_the_mixture_reads_every_corpus_once():
    corpora = read_mixture(str(PAIR / "mixture.yaml"))
    assert len(corpora) == 5 and {corpus.weight for corpus in corpora} == {None}
