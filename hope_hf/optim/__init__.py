"""Optimizers for models whose parameters step at different clocks; torch only."""

from .build import LevelOptions, build_optimizer, parse_level_optimizers, period_steps, periods_of, rules_of
from .level_clock import STRUCTURE, LevelClock, recounted, require_same_groups, warn_short_levels
from .rules import RULES, newton_schulz, own_part

__all__ = [
    "STRUCTURE",
    "LevelClock",
    "LevelOptions",
    "RULES",
    "build_optimizer",
    "newton_schulz",
    "own_part",
    "parse_level_optimizers",
    "period_steps",
    "periods_of",
    "recounted",
    "require_same_groups",
    "rules_of",
    "warn_short_levels",
]
