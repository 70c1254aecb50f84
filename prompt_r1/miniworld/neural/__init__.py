"""Environments that are language models: what they read, how they are made, and their weights."""
