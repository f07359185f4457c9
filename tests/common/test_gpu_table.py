"""One table of GPUs: by the names of `--gpu`, and by torch's names of devices."""

import pytest
import torch

from hope_hf.common.gpus import GPUS, peak_flops

DEVICES = {
    "NVIDIA B200": "b200-180gb",
    "NVIDIA H200": "h200-141gb",
    "NVIDIA H200 NVL": None,
    "NVIDIA H100 80GB HBM3": "h100-80gb",
    "NVIDIA H100 NVL": "h100-nvl-94gb",
    "NVIDIA H100 PCIe": "h100-pcie-80gb",
    "NVIDIA A100-SXM4-80GB": "a100-80gb",
    "NVIDIA A100 80GB PCIe": "a100-80gb",
    "NVIDIA A100-SXM4-40GB": "a100-40gb",
    "NVIDIA L40S": "l40s-48gb",
    "NVIDIA L40": None,
    "NVIDIA RTX A6000": "a6000-48gb",
    "NVIDIA RTX 6000 Ada Generation": None,
    "NVIDIA GeForce RTX 4090": "rtx4090-24gb",
    "NVIDIA GeForce RTX 4090 Laptop GPU": None,
}


@pytest.mark.parametrize("device", DEVICES)
def test_a_device_has_the_peak_of_its_row(device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: device)
    found = [peak_flops(torch.device("cuda"), precision) for precision in ("bf16", "fp16", "no")]
    gpu = GPUS.get(DEVICES[device])
    # An unknown device gets no peak instead of a wrong one.
    assert found == ([None] * 3 if gpu is None else [gpu.flops, gpu.flops, gpu.flops / 2])


def test_a_cpu_has_no_peak_and_every_gpu_has_a_device():
    assert peak_flops(torch.device("cpu"), "no") is None
    assert set(DEVICES.values()) - {None} == set(GPUS)
