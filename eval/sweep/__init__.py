"""Acceptance and speed of a drafter over temperature, batch, context and N, measured in the loop."""
