"""The upload, and all network access."""

import json
from pathlib import Path

from huggingface_hub import HfApi, get_session, get_token

from hope_hf.common.process import one_line

from .folder import ExportFailed

CARD = "README.md"
# Timeout: without it a silent connection would block forever.
SECONDS_OF_SILENCE = 300.0


def upload(folder: Path, repo_id: str, private: bool) -> str:
    """Upload an exported folder, its card last; an existing repository is written to.

    Args:
        folder: from `export_folder`.
        repo_id: `owner/name`, or `name` for the owner of the token.
        private: make a new repository private. Otherwise the owner's default applies.

    Returns:
        The address of the repository.

    Raises:
        ExportFailed: no token, no network, no permission.
    """
    if get_token() is None:
        raise ExportFailed(f"{repo_id} needs a login: run `hf auth login` or set HF_TOKEN.")
    get_session().timeout = SECONDS_OF_SILENCE
    api = HfApi()
    try:
        url = api.create_repo(repo_id, private=private or None, exist_ok=True)
        api.upload_folder(
            repo_id=url.repo_id,
            folder_path=folder,
            ignore_patterns=CARD,
            commit_message="Upload the model, its code and its tokenizer",
        )
        # The card comes last: the files that it describes are there, and no later step overwrites it.
        card = (folder / CARD).read_text(encoding="utf-8")
        card = card.replace(json.dumps(repo_id), json.dumps(url.repo_id))
        api.upload_file(
            repo_id=url.repo_id,
            path_or_fileobj=card.encode(),
            path_in_repo=CARD,
            commit_message="Upload the model card",
        )
    # The network's layers have error types without a common base.
    except Exception as error:
        raise ExportFailed(f"The upload to {repo_id} failed: {_reason(error)}") from error
    return str(url)


def _reason(error: Exception) -> str:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status == 401:
        return "the Hub rejects the token (401), run `hf auth login` or set HF_TOKEN."
    if status == 403:
        return "the token may not write there (403), use one of its owner's with the right to write."
    if error.__cause__ is not None and isinstance(error, RuntimeError):
        return _reason(error.__cause__)
    return f"{type(error).__name__}: {one_line(error).rstrip('.')}."
