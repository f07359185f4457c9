"""A repository of the Hub beside flash-linear-attention and Triton, without the package."""

import os
import subprocess
import sys

import pytest
import remote_code
import torch
from mixers import HYBRID
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.kernels


def test_a_repository_computes_where_the_kernels_packages_are_installed(tiny_model, tmp_path):
    model = tiny_model(**HYBRID)
    model.save_pretrained(tmp_path / "saved")
    remote_code.upload(tmp_path / "saved", tmp_path / "cache", "saved")
    ids = torch.randint(62, (2, 19), generator=torch.Generator().manual_seed(1))
    save_file({"ids": ids}, tmp_path / "ids.safetensors")
    # fla and triton alone: the package is not in this folder
    kernels = os.environ["PYTHONPATH"].split(os.pathsep)[-1]
    run = subprocess.run(
        [sys.executable, "-W", "ignore", remote_code.__file__, "installed", "owner/saved"],
        cwd=tmp_path, env=remote_code.environment(tmp_path, PYTHONPATH=os.path.abspath(kernels)),
        capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=300,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    found = load_file(tmp_path / "saved.safetensors")["logits"]
    torch.testing.assert_close(found, model(ids).logits, rtol=0, atol=1e-5)
