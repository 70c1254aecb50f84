"""Prompt-R1: a small agent learns by reinforcement to question a large language model (arXiv 2511.01016)."""

__version__ = "0.1.0"
