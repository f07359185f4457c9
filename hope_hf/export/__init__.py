"""A trained HOPE as a folder for the Hub, and its upload: `python -m hope_hf.export DIR --to OUT`."""

from .errors import ExportFailed
from .folder import export_folder
from .run import main
from .upload import upload

__all__ = ["ExportFailed", "export_folder", "main", "upload"]
