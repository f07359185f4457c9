#!/usr/bin/env bash
# torch 2.13.0: torch.optim.Muon orthogonalises in bfloat16, whatever the parameters' dtype is.
#
# Guess: for float64 parameters the update equals the documented five steps of Newton and Schulz, computed in float64,
# up to its scale.
# Seen: the iteration runs in bfloat16; the update differs by 1 % in norm from the exact one for float32 and float64
# alike, so that a double-precision reference of a step cannot be met.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --no-compile torch==2.13.0 numpy
cd "$folder"
"$folder/env/bin/python" - <<'PROGRAM'
import torch

torch.manual_seed(0)
gradient = torch.randn(64, 64, dtype=torch.float64)
exact = gradient / gradient.norm()
for _ in range(5):
    gram = exact @ exact.T
    exact = 3.4445 * exact + (-4.775 * gram + 2.0315 * gram @ gram) @ exact
for dtype in (torch.float32, torch.float64):
    weight = torch.nn.Parameter(torch.zeros(64, 64, dtype=dtype))
    weight.grad = gradient.to(dtype)
    torch.optim.Muon([weight], lr=1.0, momentum=0.0, nesterov=False, weight_decay=0.0).step()
    update = -weight.detach().double()
    scale = (update * exact).sum() / exact.pow(2).sum()
    apart = ((update - scale * exact).norm() / update.norm()).item()
    print(dtype, f"{apart:.1e}")
    assert 2e-3 < apart < 1e-1, "the behaviour changed"
PROGRAM
