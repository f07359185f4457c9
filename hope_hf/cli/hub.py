"""Names of repositories on the Hub: checks that a name is valid and is not a local folder."""

import os

from huggingface_hub import constants
from huggingface_hub.utils import HFValidationError, validate_repo_id


def check_repo_id(repo_id: str, flag: str):
    """Raise ValueError that names `flag` if `repo_id` is no valid repository name, with or without owner."""
    try:
        validate_repo_id(repo_id)
    except HFValidationError:
        raise ValueError(
            f"{flag} {repo_id!r} is not a name of a repository: write owner/name in letters, digits, '-', '_' and '.'."
        ) from None


def is_hub_name(name: str) -> bool:
    """Whether `name` is a valid repository name and not a local file or folder."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return not os.path.exists(name)


def go_offline():
    """Let huggingface_hub, and processes that are started from now on, ask the Hub for nothing."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    constants.HF_HUB_OFFLINE = True
