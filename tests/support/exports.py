"""Exports an agent on one rank."""

from collections.abc import Mapping
from pathlib import Path

from prompt_r1.agent.policy import Policy
from prompt_r1.config.train import TrainConfig
from prompt_r1.storage.export import export_agent
from tests.support.games import ONE_RANK

Metrics = Mapping[str, float]


def export(policy: Policy, base: Path, config: TrainConfig, folder: Path, metrics: Metrics) -> Path:
    """Export the agent; returns the folder."""
    export_agent(policy, base, config, folder, metrics=metrics, ranks=ONE_RANK)
    return folder
