"""Prompts -> dialogues -> tokens and answer spans -> frozen verifier states -> packed batches."""
