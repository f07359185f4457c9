"""Optimizers for models whose parameters step at different clocks; torch only."""

from .adamw import AdamWRule
from .build import build_optimizer
from .level_clock import LevelClock, require_same_groups, warn_short_levels
from .level_options import LevelOptions, parse_level_optimizers
from .muon import MuonRule, newton_schulz
from .sharding import own_part

__all__ = [
    "AdamWRule",
    "LevelClock",
    "LevelOptions",
    "MuonRule",
    "build_optimizer",
    "newton_schulz",
    "own_part",
    "parse_level_optimizers",
    "require_same_groups",
    "warn_short_levels",
]
