"""`parameters_rank<N>.tsv`: names, shapes, stretches, dtypes; `test_engines.py` adds up those of several processes."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffload, ShardingStrategy

from hope_hf.step.arguments import Arguments
from hope_hf.training.engines.audit import write_audit
from hope_hf.training.engines.base import Engine
from hope_hf.training.engines.fsdp1 import FSDP1


class Model(nn.Module):
    """Tied weights, a frozen one, and a buffer in the state dict and two that are not."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.last.weight = self.first.weight
        self.frozen = nn.Linear(8, 4, bias=False, dtype=torch.bfloat16).requires_grad_(False)
        self.register_buffer("kept", torch.zeros(2, 3, dtype=torch.float64))
        self.first.register_buffer("count", torch.zeros((), dtype=torch.int64), persistent=False)
        self.register_buffer("none", None)


def audit(folder, engine: Engine) -> list[list[str]]:
    model = Model()
    engine.adopt(model, torch.optim.SGD(model.first.parameters()))
    write_audit(folder, engine)
    (file,) = folder.glob("parameters_rank*.tsv")
    return [line.split("\t") for line in file.read_text().splitlines()]


@pytest.mark.usefixtures("one_cpu_process")
def test_it_lists_every_parameter_and_buffer(tmp_path):
    accelerator = SimpleNamespace(mixed_precision="no", num_processes=1, process_index=0, is_main_process=True)
    wide = ["float32", "float32"]
    assert audit(tmp_path, Engine(accelerator)) == [
        "name kind shape start end copy dtype compute reduce device trained".split(),
        ["first.weight = last.weight", "parameter", "[8, 8]", "0", "64", "False", *wide, "-", "cpu", "True"],
        ["first.bias", "parameter", "[8]", "0", "8", "False", *wide, "-", "cpu", "True"],
        ["frozen.weight", "parameter", "[4, 8]", "0", "32", "False", "bfloat16", "bfloat16", "-", "cpu", "False"],
        ["kept", "buffer", "[2, 3]", "0", "6", "False", "float64", "float64", "-", "cpu", "False"],
        ["first.count", "buffer", "[]", "0", "1", "False", "int64", "int64", "-", "cpu", "False"],
    ]


@pytest.mark.usefixtures("one_cpu_process")
def test_dtypes_are_those_of_the_launch(tmp_path):
    accelerator = SimpleNamespace(mixed_precision="bf16", num_processes=2, process_index=3, is_main_process=False)
    header, weight, _, frozen, kept, _ = audit(tmp_path, Engine(accelerator))
    found = [dict(zip(header, row, strict=True)) for row in (weight, frozen, kept)]
    assert [row["compute"] for row in found] == [*["bfloat16 (autocast)"] * 2, "float64"]
    # A frozen parameter has no gradient.
    assert [row["reduce"] for row in found] == ["float32", "-", "-"]
    assert found[2]["copy"] == "True"


@pytest.mark.parametrize(("precision", "words"), [("no", (None, None)), ("bf16", ("bfloat16", torch.float32))])
def test_fsdp_casts_weights_and_reduces_as_its_flag_says(precision, words):
    plugin = SimpleNamespace(
        sharding_strategy=ShardingStrategy.FULL_SHARD, use_orig_params=True, cpu_offload=CPUOffload(False)
    )
    accelerator = SimpleNamespace(
        device=torch.device("cuda"), num_processes=2, mixed_precision=precision,
        state=SimpleNamespace(fsdp_plugin=plugin),
    )  # fmt: skip
    engine = FSDP1(accelerator, Arguments(output_dir="a", fsdp_reduce_dtype="bfloat16"))
    assert (engine.compute_dtype(), engine.buffer_dtype()) == words
    assert engine.reduce_dtype("any") == (torch.float32 if precision == "no" else torch.bfloat16)
