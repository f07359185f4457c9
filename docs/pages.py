"""README, contributing guide and licence as pages of the site that `make docs` builds: a hook of MkDocs."""

from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
# The pages' names in the site, whose root is docs/.
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "LICENSE": "LICENSE"}


def on_files(files, config):
    """Add the pages that lie beside docs/, with their links seen from docs/."""
    for source, name in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8").replace("](docs/", "](")
        files.append(File.generated(config, name, content=text))
    return files
