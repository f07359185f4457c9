import pytest


@pytest.fixture(autouse=True)
def operators_of_torch(monkeypatch):
    """On a machine with a GPU and kernels, too, plans are of what the simulated step runs."""
    monkeypatch.setenv("HOPE_KERNELS", "torch")
