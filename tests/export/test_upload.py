"""What an upload sends, in which order, and one sentence for each failure; the Hub is a fake."""


import pytest

from hope_hf.export import ExportFailed, upload
from hope_hf.export.run import main


@pytest.fixture
def folder(tmp_path):
    """Files of each kind; a card that names the repository."""
    (tmp_path / "model.safetensors").write_bytes(bytes(range(256)) * 40)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "modeling_hope.py").write_text("pass\n")
    (tmp_path / "README.md").write_text('---\nlicense: mit\n---\nload("owner/name") and load("name")\n')
    return tmp_path


def test_everything_arrives_and_the_card_last(hub, folder):
    assert upload(folder, "owner/name", private=False) == f"{hub.address}/owner/name"
    assert hub.repositories == {"owner/name": {path.name: path.read_bytes() for path in folder.iterdir()}}
    assert list(hub.objects.values()) == [(folder / "model.safetensors").read_bytes()]
    weights, card = hub.commits
    assert sorted(weights) == ["config.json", "model.safetensors", "modeling_hope.py"]
    assert card == ["README.md"]
    commit = "/api/models/owner/name/commit/main"
    batch, large = "/owner/name.git/info/lfs/objects/batch", f"/objects/{next(iter(hub.objects))}"
    steps = ["/api/repos/create", batch, large, commit]
    assert [path for _, path in hub.requests if path in steps] == [*steps, commit]


@pytest.mark.parametrize("private", [True, False])
def test_a_new_repository_is_private_where_asked(hub, folder, private):
    upload(folder, "owner/name", private)
    assert [wanted.get("visibility") for wanted in hub.created] == ["private" if private else None]


def test_a_repository_that_exists_is_written_to(hub, folder):
    hub.repositories["owner/name"] = {"README.md": b"old", "notes.txt": b"kept"}
    upload(folder, "owner/name", private=False)
    assert hub.created == []
    assert hub.repositories["owner/name"]["README.md"] == (folder / "README.md").read_bytes()
    assert hub.repositories["owner/name"]["notes.txt"] == b"kept"


def test_the_card_names_the_owner_that_the_hub_found(hub, folder):
    upload(folder, "name", private=False)
    assert b'load("owner/name") and load("owner/name")' in hub.repositories["owner/name"]["README.md"]


@pytest.mark.parametrize(
    "end, status, sentence",
    [
        ("/create", 401, "the Hub rejects the token (401), run `hf auth login` or set HF_TOKEN."),
        ("/create", 403, "the token may not write there (403)"),
        ("/batch", 403, "the token may not write there (403)"),
        ("/commit/main", 413, "HfHubHTTPError: Client error '413"),
    ],
)
def test_a_refusal_is_one_sentence_and_leaves_no_card(hub, folder, end, status, sentence):
    hub.refuse[end] = status
    with pytest.raises(ExportFailed) as caught:
        upload(folder, "owner/name", private=False)
    assert str(caught.value).startswith("The upload to owner/name failed: ") and sentence in str(caught.value)
    assert "\n" not in str(caught.value)
    assert hub.commits == []


def test_without_a_login_nothing_is_asked(hub, folder, monkeypatch):
    monkeypatch.setattr("hope_hf.export.network.get_token", lambda: None)
    with pytest.raises(ExportFailed, match="owner/name needs a login: run `hf auth login` or set HF_TOKEN."):
        upload(folder, "owner/name", private=False)
    assert hub.requests == []


def test_a_hub_that_falls_silent_is_left(hub, folder, monkeypatch):
    monkeypatch.setattr("hope_hf.export.network.SECONDS_OF_SILENCE", 0.2)
    hub.silent = True
    with pytest.raises(ExportFailed, match="ReadTimeout"):
        upload(folder, "owner/name", private=False)


def test_the_program_uploads_what_it_made(hub, exported, unchecked, tmp_path, capsys):
    """From the export itself, which has no records of a run."""
    flags = ["--to", str(tmp_path / "again"), "--push_to_hub", "owner/name", "--private"]
    assert main([str(exported), *flags]) == 0
    sent = hub.repositories["owner/name"]
    assert sent == {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()}
    assert b'from_pretrained("owner/name", trust_remote_code=True)' in sent["README.md"]
    assert f"Uploaded to {hub.address}/owner/name" in capsys.readouterr().out
    assert hub.created[0]["visibility"] == "private"
