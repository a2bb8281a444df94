"""Draft heads, one file per kind."""
