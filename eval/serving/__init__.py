"""Serving engines: what becomes of a head there, run offline or looked at while they serve."""
