"""`--offline`: nothing is asked of the Hub."""

import datasets
import transformers
from huggingface_hub import constants

from hope_hf.evaluation.offline import leave_the_hub


def test_offline_nothing_is_asked_of_the_hub(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert not transformers.utils.hub.is_offline_mode()
    leave_the_hub()
    assert transformers.utils.hub.is_offline_mode() and datasets.config.HF_HUB_OFFLINE
