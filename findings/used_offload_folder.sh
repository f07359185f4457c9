#!/usr/bin/env bash
# accelerate 1.15.0: `dispatch_model` into a folder that was used before computes with the earlier model's weights.
#
# Guess: the weights of the model that is dispatched are written to `offload_dir`, in the place of those of an earlier
# model; or the folder is refused.
# Seen: where the folder has an index.json nothing is written. The modules on disk lose the weights that the model had
# and read those of the earlier one; the modules on the CPU are right, so that the model is half of each. `disk_offload`
# does the same with all modules. No warning. The documentation says that the folder may be one "where the model weights
# are already offloaded"; whose they are is not checked.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --no-compile torch==2.13.0 accelerate==1.15.0 numpy
cd "$folder"
"$folder/env/bin/python" - <<'PROGRAM'
import torch
from accelerate import disk_offload, dispatch_model
from torch import nn

numbers = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def build(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).eval()


def dispatched(seed, folder):
    model = dispatch_model(build(seed), {"0": "cpu", "1": "disk"}, main_device="cpu", offload_dir=folder)
    return model(numbers)


def all_on_disk(seed, folder):
    model = disk_offload(build(seed), folder, execution_device=torch.device("cpu"))
    return model(numbers)


with torch.no_grad():
    first, second = build(1), build(2)
    right = second(numbers)
    fresh = dispatched(2, "fresh")
    dispatched(1, "used")
    mixed = dispatched(2, "used")
    all_on_disk(1, "used_for_all")
    earlier = all_on_disk(2, "used_for_all")
    print("in a fresh folder off by", (fresh - right).abs().max().item())
    print("in a used folder off by", (mixed - right).abs().max().item())
    assert torch.allclose(fresh, right), "the behaviour changed"
    assert torch.allclose(mixed, first[1](second[0](numbers))), "the behaviour changed"
    assert torch.allclose(earlier, first(numbers)), "the behaviour changed"
    assert (mixed - right).abs().max() > 0.05 and (earlier - right).abs().max() > 0.05, "the behaviour changed"
PROGRAM
