"""Settings of the whole suite."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # no test asks a hub; transformers reads it when it is imported

import hypothesis  # noqa: F401  (else its plugin imports it at the very end, where CPython 3.11 trips)
import torch

# Tiny models are faster on one thread, and tests that run side by side do not fight for cores.
torch.set_num_threads(1)
