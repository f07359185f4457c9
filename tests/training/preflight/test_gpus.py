"""What a fake `nvidia-smi` on PATH answers, or does not."""

from types import SimpleNamespace

import pytest
import torch

from hope_hf.training.preflight import gpus as gpus_module
from hope_hf.training.preflight.facts import own_gpus
from hope_hf.training.preflight.gpus import FIELDS, Gpu, ask_gpus

ROWS = "0, GPU-aa, NVIDIA H100, 3, 512, 81559, 41\n1, GPU-bb, NVIDIA H100, [N/A], 20, 81559, [N/A]\n"
FIRST = Gpu("0", "GPU-aa", "NVIDIA H100", 3, 512, 81559, 41)
SECOND = Gpu("1", "GPU-bb", "NVIDIA H100", None, 20, 81559, None)


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """`nvidia_smi(script)` puts a shell script of this name alone on PATH."""

    def put(script: str):
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    return put


def test_every_gpu_is_read(nvidia_smi, tmp_path):
    nvidia_smi(f'echo "$@" > {tmp_path}/asked\ncat <<END\n{ROWS}END')
    assert ask_gpus() == [FIRST, SECOND]
    assert (tmp_path / "asked").read_text().split() == [f"--query-gpu={FIELDS}", "--format=csv,noheader,nounits"]


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo 'Failed to initialize NVML.' >&2; exit 9", "nvidia-smi failed (Failed to initialize NVML)"),
        ("exit 9", "nvidia-smi failed (Command"),
        ("echo a new, form", "nvidia-smi gave an answer of another form (a new, form)"),
        ("exec sleep 30", "nvidia-smi did not answer within 0.2 s"),
    ],
)
def test_an_answer_that_is_none_is_named(nvidia_smi, monkeypatch, script, reason):
    monkeypatch.setattr(gpus_module, "SECONDS", 0.2)
    nvidia_smi(script)
    assert ask_gpus().startswith(reason)


def test_no_program_is_no_error(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert ask_gpus() == "there is no nvidia-smi"


def test_a_process_looks_at_its_own_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="bb"))
    assert own_gpus([FIRST, SECOND], torch.device("cuda", 0)) == [SECOND]
    assert own_gpus([FIRST], torch.device("cuda", 0)).startswith("nvidia-smi does not list cuda:0")
    assert own_gpus("no answer", torch.device("cuda", 0)) == "no answer"
    assert own_gpus([FIRST, SECOND], torch.device("cpu")) == [FIRST, SECOND]
