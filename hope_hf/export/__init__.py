"""A trained HOPE as a folder for the Hub, and its upload: `hope-hf export DIR --to OUT`."""

from .folder import ExportFailed, export_folder
from .network import upload
from .run import main

__all__ = ["ExportFailed", "export_folder", "main", "upload"]
