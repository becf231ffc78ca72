"""Compiled programs: compile options and tiers, statistics, the disk cache."""
