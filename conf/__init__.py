"""Hydra groups and what every command shares: typed schema, error type, paths, command-line shell."""
