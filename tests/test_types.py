"""The records of a game."""

from prompt_r1.config.train import TrainConfig
from prompt_r1.types import GameSettings


def test_a_game_without_settings_is_the_papers():
    """Table 6: 5 turns of 1,024 tokens, 8,192 in all; the released script cuts a reply to 1,024."""
    assert GameSettings() == TrainConfig().game == GameSettings("paper", 5, 1024, 8192, 1024)
