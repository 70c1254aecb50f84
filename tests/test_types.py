"""The records of a game: three columns of equal length, and the defaults of the paper's game."""

from prompt_r1.config.train import TrainConfig
from prompt_r1.types import Action, Completion, GameSettings, Question, Trajectory, Turn

QUESTION = Question("q", "d", "Who?", ("Anna",))


def test_the_columns_of_a_game_stay_equally_long_and_tell_the_agents_tokens_from_context():
    game = Trajectory(QUESTION)
    game.add_context([5, 6, 7])
    game.add_sampled(Completion([8, 9], [-0.5, -1.5], finished=True))
    game.add_context([10])
    game.add_sampled(Completion([11], [-2.5], finished=False))
    assert game.tokens == [5, 6, 7, 8, 9, 10, 11] and game.opening == 3
    assert game.sampled == [False, False, False, True, True, False, True]
    assert game.logprobs == [0.0, 0.0, 0.0, -0.5, -1.5, 0.0, -2.5]


def test_the_answer_of_a_game_is_that_of_its_last_turn():
    game = Trajectory(QUESTION)
    assert game.answer is None and (game.stop, game.error) == ("max_turns", "")
    game.turns += [
        Turn("<answer>Bob</answer>", Action(None, None, "Bob", clean=False), reply=None),
        Turn("<answer>Anna</answer>", Action(None, None, "Anna", clean=False), reply=None),
    ]
    assert game.answer == "Anna" and game.turns[0].latency == 0.0
    assert QUESTION.kind == "qa"


def test_a_game_without_settings_is_the_papers():
    """Table 6: 5 turns of 1,024 tokens, 8,192 in all; the released script cuts a reply to 1,024."""
    assert GameSettings() == TrainConfig().game == GameSettings("paper", 5, 1024, 8192, 1024)
