"""Names on the Hub: what may be one, and what is a folder of this machine."""

import os

from huggingface_hub.utils import HFValidationError, validate_repo_id


def check_repo_id(repo_id: str, flag: str):
    """ValueError that names `flag` where `repo_id` can be no repository, with or without its owner."""
    try:
        validate_repo_id(repo_id)
    except HFValidationError:
        raise ValueError(
            f"{flag} {repo_id!r} is not a name of a repository: write owner/name in letters, digits, '-', '_' and '.'."
        ) from None


def is_hub_name(name: str) -> bool:
    """Whether `name` names a repository, and no file or folder of this machine."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return not os.path.exists(name)
