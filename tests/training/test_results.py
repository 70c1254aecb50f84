"""The numbers of one question: of a game, of a direct reply, of a failed call."""

from dataclasses import replace

from prompt_r1.errors import EnvError
from prompt_r1.reward import RULES, score
from prompt_r1.training.results import GameResult, failed_result, result_of_game, result_of_reply
from prompt_r1.types import Question, ScoredGame
from tests.played import play_game
from tests.tiny import think

QUESTION = Question("q7", "bridge", "Who made it?", ("Anna Keller",))


def scored(texts, replies) -> ScoredGame:
    game = play_game(QUESTION, texts, replies)
    game.turns[:] = [
        replace(turn, latency=0.5 + number) if turn.reply is not None else turn
        for number, turn in enumerate(game.turns)
    ]
    broken = game.stop == "env_error"
    return ScoredGame(game, None if broken else score(game, rule=RULES["release"]), 0.5)


def test_the_result_of_a_game_counts_its_turns_calls_and_tokens():
    game = scored(
        [think("a", prompt="Who?"), think("b", prompt="Who else?"), think("c", answer="Keller")],
        ["Bob.", "Anna."],
    )
    found = result_of_game(game)
    assert (found.question, found.dataset, found.prediction) == ("q7", "bridge", "Keller")
    assert (found.em, found.f1, found.well_formed, found.stop) == (0.0, 2 / 3, 1.0, "answered")
    assert (found.turns, found.calls, found.latencies) == (3, 2, (0.5, 1.5))
    assert (found.sampled, found.tokens) == (sum(game.trajectory.sampled), len(game.trajectory.tokens))
    assert 0 < found.sampled < found.tokens and found.reward is game.reward and found.error == ""


def test_a_game_that_the_environment_broke_has_its_failed_call_but_no_score():
    game = scored([think("a", prompt="Who?"), think("b", prompt="Who?")], ["Bob.", EnvError("HTTP 500")])
    broken = result_of_game(game)
    assert (broken.stop, broken.error, broken.calls, broken.turns) == ("env_error", "HTTP 500", 2, 2)
    assert (broken.em, broken.f1, broken.well_formed, broken.prediction) == (0.0, 0.0, 0.0, "")
    assert broken.latencies == (0.5,)
    game.trajectory.error = ""
    assert result_of_game(game).error == "the environment failed"


def test_a_direct_reply_is_scored_and_a_failed_one_is_counted_apart():
    reply = result_of_reply(QUESTION, "anna keller.")
    assert reply == GameResult("q7", "bridge", "anna keller.", 1.0, 1.0)
    assert (reply.turns, reply.calls, reply.sampled, reply.tokens, reply.latencies) == (0, 0, 0, 0, ())
    assert (reply.reward, reply.stop, reply.well_formed, reply.error) == (None, "answered", 0.0, "")
    assert failed_result(QUESTION, "down") == GameResult("q7", "bridge", "", 0.0, 0.0, error="down")
