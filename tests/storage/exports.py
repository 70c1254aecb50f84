"""Exports an agent with the model card of its training."""

from collections.abc import Sequence
from pathlib import Path

from prompt_r1.agent.policy import Policy
from prompt_r1.config.train import TrainConfig
from prompt_r1.storage.export import export_agent, model_card
from tests.games import ONE_RANK

Lines = Sequence[dict[str, float]]


def card_of(config: TrainConfig, lines: Lines, base: Path) -> str:
    step = int(lines[-1]["step"])
    return model_card(
        config.agent, config.env, config.described(step), seed=config.seed, lines=lines, base=base
    )


def export(policy: Policy, base: Path, config: TrainConfig, folder: Path, lines: Lines) -> Path:
    """Export the agent; returns the folder."""

    def card(lines: Lines, home: Path) -> str:
        return card_of(config, lines, home)

    assert export_agent(policy, base, config, folder, lines=lines, ranks=ONE_RANK, card=card) == ""
    return folder
