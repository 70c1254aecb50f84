"""The records of a game."""

from prompt_r1.config.train import TrainConfig
from prompt_r1.types import GameSettings


def test_a_game_has_the_settings_of_its_run_and_by_default_the_papers():
    """Table 6: 5 turns of 1,024 tokens, 8,192 in all; the released script cuts a reply to 1,024."""
    assert GameSettings() == TrainConfig().game == GameSettings("paper", 5, 1024, 8192, 1024)
    other = {"instruction": "short", "max_turns": 1, "max_new": 2, "max_tokens": 3, "max_reply_tokens": 4}
    assert TrainConfig(**other).game == GameSettings(**other)
