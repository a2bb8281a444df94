"""Which draft, how many tokens, and when not at all (docs/tuner.md)."""
