"""`--offline`: nothing is asked of the Hub."""

import datasets

from hope_hf.cli.process import go_offline


def leave_the_hub():
    """Let models, tokenizers, lm-eval and data sets come from folders and the cache only."""
    go_offline()
    # It has read the variables of the environment when it was imported.
    datasets.config.HF_HUB_OFFLINE = True
