"""Checked files on disk, and what all parts of semkv share. Each name is imported from its module."""
