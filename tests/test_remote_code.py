"""Repositories of the Hub on a machine without the package: `remote_code.py` loads, computes, trains."""

import json
import shutil
import subprocess
import sys

import pytest
import remote_code
import torch
from safetensors.torch import load_file, save_file

from hope_hf import HopeForCausalLM


@pytest.mark.long
@pytest.mark.processes
def test_what_is_on_the_hub_works_without_the_package(exported, trained_run, converted, tmp_path):
    """The quick suite checks that an export loads so (`exported`), and that all of these hold the same code."""
    folders = {"exported": exported, "run": trained_run, "converted": converted}
    folders["checkpoint"] = trained_run / "checkpoint-1"
    place = tmp_path / "elsewhere"
    for name, folder in folders.items():
        remote_code.upload(folder, place / "cache", name)
    shutil.copytree(exported, place / "local")
    ids = torch.randint(62, (2, 19), generator=torch.Generator().manual_seed(1))
    save_file({"ids": ids}, place / "ids.safetensors")
    environment = remote_code.environment(place)
    repositories = [f"owner/{name}" for name in folders]
    run = subprocess.run(
        [sys.executable, "-W", "ignore", remote_code.__file__, "alone", *repositories],
        cwd=place, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=300,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    for name, folder in folders.items():
        model = HopeForCausalLM.from_pretrained(folder).eval()
        found = load_file(place / f"{name}.safetensors")
        torch.testing.assert_close(found["logits"], model(ids).logits, rtol=0, atol=1e-5)
        assert torch.equal(found["generated"], model.generate(ids, **remote_code.GENERATE))
    report = json.loads((place / "told.json").read_text())
    assert report["backend"] == "causal" and report["warned"] == []
    expected = smoothed(HopeForCausalLM.from_pretrained(exported), ids)
    assert report["losses"] == pytest.approx({"plain": expected, "lora": expected}, abs=1e-5)


def smoothed(model, ids: torch.Tensor) -> float:
    """The mean over next tokens of nine tenths of their loss and a tenth of that of a token drawn at random."""
    with torch.no_grad():
        log = model(ids).logits[:, :-1].log_softmax(-1)
    of_next = log.gather(-1, ids[:, 1:, None])
    return float(-0.9 * of_next.mean() - 0.1 * log.mean())
