"""Five simulations with known answers, seeded: `python -m eval.simulate name=chi_square`."""
