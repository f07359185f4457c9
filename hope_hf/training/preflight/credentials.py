"""Where Weights & Biases finds its key, without asking it: its own functions for this have changed with every year."""

import netrc
import os
from pathlib import Path
from urllib.parse import urlsplit

VARIABLES = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
SERVER = "https://api.wandb.ai"


def wandb_credentials() -> str | None:
    """The place of the key, which is not read out; None without one."""
    for name in VARIABLES:
        if os.environ.get(name):
            return name
    host = urlsplit(os.environ.get("WANDB_BASE_URL", SERVER)).hostname or ""
    named = os.environ.get("NETRC")
    for file in [Path(named)] if named else [Path.home() / ".netrc", Path.home() / "_netrc"]:
        try:
            if netrc.netrc(file).authenticators(host):
                return str(file)
        except (OSError, netrc.NetrcParseError):
            continue
    return None
