"""Propositions 1-3 of the paper as studies in the mini world: `python -m prompt_r1.studies`."""
