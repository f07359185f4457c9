"""A trained HOPE as a folder for the Hub, and its upload: `hope-hf export DIR --to OUT`."""

from hope_hf.lazy import late_names

# By module, what the other rooms take from there.
NAMES = {
    "folder": ("ExportFailed", "export_folder"),
    "network": ("upload",),
    "run": ("main",),
}
__getattr__, __dir__ = late_names(__name__, NAMES)
