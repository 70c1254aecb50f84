"""Exports an agent with the model card of its training."""

from collections.abc import Mapping
from pathlib import Path

from prompt_r1.agent.policy import Policy
from prompt_r1.config.train import TrainConfig
from prompt_r1.storage.export import export_agent, model_card
from tests.support.games import ONE_RANK

Metrics = Mapping[str, float]


def card_of(config: TrainConfig, step: int, base: Path) -> str:
    return model_card(config.agent, config.env, config.described(step), seed=config.seed, base=base)


def export(policy: Policy, base: Path, config: TrainConfig, folder: Path, metrics: Metrics) -> Path:
    """Export the agent; returns the folder."""

    def card(home: Path) -> str:
        return card_of(config, int(metrics["step"]), home)

    assert export_agent(policy, base, config, folder, metrics=metrics, ranks=ONE_RANK, card=card) == ""
    return folder
