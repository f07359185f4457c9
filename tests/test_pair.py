"""The recipes of the pair in docs/results/pair.md are the medium size of the benchmark."""

import json
from pathlib import Path

import pytest

from benchmarks.quality.models import SIZES, build
from hope_hf.training.parsing import parse

pytestmark = pytest.mark.benchmarks
PAIR = Path(__file__).parents[1] / "benchmarks" / "pair"


def test_both_recipes_are_the_benchmarks_models_and_train_alike(tmp_path):
    flags = {}
    for name in ("hope", "llama"):
        args = parse([str(PAIR / f"{name}.yaml"), "--train_shards", "shards", "--output_dir", str(tmp_path / "run")])
        model = build(name, SIZES["medium"])
        assert args.model_type == model.model_type and json.loads(args.config_overrides) == json.loads(model.overrides)
        flags[name] = vars(args)
    differing = {name for name, value in flags["hope"].items() if value != flags["llama"][name]}
    assert differing - {"recipe"} <= {"model_type", "config_overrides", "learning_rate", "vector_learning_rate"}
