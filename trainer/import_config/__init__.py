"""Configurations of other trainers as a recipe of this one (floor 5, no torch)."""
