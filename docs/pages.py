"""A hook of MkDocs, for `make docs`: pages beside docs/, and links to what is in the repository alone."""

import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
# The pages' names in the site, whose root is docs/.
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "LICENSE": "LICENSE"}
# The log and the full tables stay off the site: a link to them becomes its words.
IN_THE_REPOSITORY = re.compile(r"\[([^\]]+)\]\((?:log|results)/[^)]*\)")


def on_files(files, config):
    """Add the pages that lie beside docs/, with their links seen from docs/."""
    for source, name in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8").replace("](docs/", "](")
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown, **page):
    """Links as the site can follow them."""
    return IN_THE_REPOSITORY.sub(r"\1", markdown).replace("](../README.md", "](index.md")
