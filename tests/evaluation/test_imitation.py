"""`bc` and `rft`: they learn from games that ended right."""

import asyncio
import gc
import weakref
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from prompt_r1.environments.environment import Environment
from prompt_r1.errors import EnvError, UsageError
from prompt_r1.evaluation import imitation, making
from prompt_r1.f1 import f1
from prompt_r1.miniworld.demonstrations import demonstrations
from prompt_r1.miniworld.environment import MiniEnvironment
from prompt_r1.miniworld.questions import make_questions
from prompt_r1.miniworld.world import make_world
from prompt_r1.model.packing import pack
from prompt_r1.pair.agent import load_agent, load_codec, play_question
from prompt_r1.pair.named_agent import NamedAgent, resolve_agent
from prompt_r1.protocol import Codec
from prompt_r1.settings.agent import INSTRUCTIONS
from prompt_r1.types import Question, Trajectory
from tests.support import tiny
from tests.support.exports import load_tensors
from tests.support.games import CPU
from tests.support.methods import ANNA, CONFIG, PricedSource, method, priced
from tests.support.played import GAME
from tests.support.tiny import ScriptedAgent, think


def mini_world(seed: int = 0) -> Environment:
    """The environment of the mini world, whose budget counts its calls."""
    world = MiniEnvironment(seed=seed)
    return priced(PricedSource(lambda messages: world.reply(messages[-1]["content"]).text))


QUESTIONS = [question for _, question in make_questions(make_world(0), "train", 64)]


@pytest.fixture
def learned(monkeypatch) -> list[list[Trajectory]]:
    """The games of each fine-tuning."""
    learned: list[list[Trajectory]] = []
    fine_tune_agent = imitation.fine_tune_agent

    def note_and_fine_tune(games, settings, game, folder):
        learned.append(list(games(load_codec(resolve_agent("mini").make(0), CONFIG))))
        return fine_tune_agent(games, settings, game, folder)

    monkeypatch.setattr(imitation, "fine_tune_agent", note_and_fine_tune)
    return learned


@pytest.fixture
def living_players(monkeypatch) -> list[int]:
    """How many players there were at each fine-tuning."""
    players, living = weakref.WeakSet(), []
    load_player, fine_tune_agent = imitation.load_agent, imitation.fine_tune_agent

    def note_and_load(*arguments):
        player = load_player(*arguments)
        players.add(player.engine)
        return player

    def count_and_fine_tune(*arguments):
        gc.collect()  # as `load_policy` does
        living.append(len(players))
        return fine_tune_agent(*arguments)

    monkeypatch.setattr(imitation, "load_agent", note_and_load)
    monkeypatch.setattr(imitation, "fine_tune_agent", count_and_fine_tune)
    return living


def test_rft_learns_once_from_its_right_games(tmp_path, learned, living_players, monkeypatch):
    """A bug: the player and its KV cache stayed in memory, beside the second model and its Adam states."""
    keys = []

    async def recorded(agent, environment, question, sampling, **options):
        keys.append((question.id, options["sample"], options["epoch"]))
        return await play_question(agent, environment, question, sampling, **options)

    monkeypatch.setattr(imitation, "play_question", recorded)
    monkeypatch.setattr(imitation, "QUESTIONS_AT_ONCE", 1)
    settings = {"agent": "mini", "folder": tmp_path, "train": QUESTIONS[:6], "calls": 40}
    environment = mini_world()
    answer = method("rft", environment, **settings)
    assert living_players == [0] * imitation.ROUNDS
    first, both = learned
    assert len(both) > len(first) > 0 and both[: len(first)] == first  # the second round starts anew
    # This agent plays the second round.
    second = load_agent(tmp_path / "large/rft/mini-round-1/agent", CONFIG, CPU).policy
    played = pack([[both[-1]]], CPU)
    sampled = [logprob for logprob, own in zip(both[-1].logprobs, both[-1].sampled, strict=True) if own]
    assert second(played).logprobs.tolist() == pytest.approx(sampled, abs=1e-4)
    for game in both:
        assert f1(game.answer, game.question.answers) == 1 and len(game.turns) > 1
    folder = tmp_path / "large/rft/mini/agent"
    weights, start = load_tensors(folder), load_tensors(resolve_agent("mini").make(0))
    assert any(not weights[name].equal(start[name]) for name in start)
    assert len(set(keys)) == len(keys) == 35  # where the environment samples, no two games share a reply
    most = imitation.GROUP_SIZE * (CONFIG.max_turns - 1)  # calls between two looks at the limit
    assert 0.6 * 40 < environment.budget.charged.calls < 40 + imitation.ROUNDS * most
    assert asyncio.run(answer(QUESTIONS[0], 0)).spent.calls > 0  # it plays, and asks

    again = mini_world()
    method("rft", again, **settings)
    assert len(learned) == 2 and again.budget.charged.calls == 0


def test_rft_gives_up_after_a_hundred_games_if_none_ended_right(tmp_path):
    """A model without the format played 5,000 games before it was told so."""
    start = tiny.save_agent(tmp_path / "start")
    with pytest.raises(UsageError, match=r"no game .*start .* 100: .*warm_start --agent .*--games"):
        method("rft", mini_world(), agent=start, folder=tmp_path, train=QUESTIONS)


def play_a_round(
    monkeypatch,
    texts: list[str],
    environment: Environment,
    *,
    calls: int,
    train: Sequence[Question] = (ANNA,),
) -> tuple[list[Trajectory], int]:
    """Play a round of rft with an agent that writes these texts: the right games, and the number of all.

    All questions of `train` have the same text.
    """
    engine, codec = ScriptedAgent(texts), Codec(tiny.tokenizer(), INSTRUCTIONS["short"])
    agent: Any = SimpleNamespace(engine=engine, codec=codec, game=GAME)
    right: list[Trajectory] = []

    def note(games, *_: object) -> Path:
        right.extend(games(codec))
        return Path("fine-tuned")

    for module in ("imitation", "making"):
        monkeypatch.setattr(f"prompt_r1.evaluation.{module}.load_agent", lambda *_: agent)
    monkeypatch.setattr(NamedAgent, "make", lambda *_: "start")
    monkeypatch.setattr(imitation, "fine_tune_agent", note)
    monkeypatch.setattr(imitation, "ROUNDS", 1)
    method("rft", environment, agent="start", train=train, calls=calls)
    return right, engine.read.count(engine.read[0])  # Each game reads the question once.


def test_rft_ends_a_round_of_an_agent_that_has_stopped_asking(monkeypatch):
    """A round has a number of calls. The agent asks in its first games; then it answers at once."""
    asks, answers = think("so", prompt="Who?"), think("so", answer="Anna")
    texts = [asks, answers] * 3 + [answers] * 100
    right, tried = play_a_round(monkeypatch, texts, mini_world(), calls=25)
    assert (len(right), tried) == (3, 25)
    assert all(len(game.turns) == 2 for game in right)


def test_rft_exceeds_its_calls_at_most_by_the_games_of_one_question(monkeypatch):
    """A bug: its first draw of a hundred games made up to 300 calls, whatever --optimize-calls said."""
    train = [replace(ANNA, id=str(number)) for number in range(50)]
    asks, answers = think("so", prompt="Who?"), think("so", answer="Anna")
    environment = mini_world()
    _, tried = play_a_round(monkeypatch, [asks, answers] * 100, environment, calls=30, train=train)
    most = imitation.GROUP_SIZE * (CONFIG.max_turns - 1)
    assert 30 <= environment.budget.charged.calls < 30 + most
    assert tried % imitation.GROUP_SIZE == 0


def test_rft_does_not_learn_from_a_game_whose_call_failed(monkeypatch):
    """A bug: a broken game has no reward, and the AssertionError ended the whole evaluation."""
    replies = iter(["Anna"] * 3)

    def fail_the_fourth_call(messages):
        reply = next(replies, None)
        if reply is None:
            raise EnvError("the server is down")
        return reply

    asks, answers = think("so", prompt="Who?"), think("so", answer="Anna")
    texts = [asks, answers] * 3 + [asks] + [answers] * 100
    environment = priced(PricedSource(fail_the_fourth_call))
    right, tried = play_a_round(monkeypatch, texts, environment, calls=5)
    assert (len(right), tried) == (3, 5)
    assert {game.stop for game in right} == {"answered"}


def test_bc_imitates_the_right_demonstrations_of_the_warm_start(tmp_path, learned, monkeypatch):
    """The oracle counts demonstrations that ask, have all their tags, and end with the gold answer."""
    shown = list(islice(demonstrations(0), 120))
    assert not {question.text for question, _ in shown} & {one.text for one in QUESTIONS}, "other worlds"
    seeds = []
    monkeypatch.setattr(imitation, "demonstrations", lambda seed: seeds.append(seed) or shown)
    right = 0
    for question, turns in shown:
        texts = [turn.text for turn in turns]
        tagged = all("<think>" in text and "</think>" in text for text in texts)
        ends = "</answer>" in texts[-1] and f1(turns[-1].action.answer or "", question.answers) == 1
        right += tagged and ends and len(turns) > 1 and all("</interaction_prompt>" in t for t in texts[:-1])
    method("bc", priced(PricedSource(str)), agent="mini", folder=tmp_path, seed=5)
    assert {*seeds} == {CONFIG.seed} == {0}, "a bug: they were the demonstrations of the evaluation's seed"
    [games] = learned
    assert len(games) == right and 0.2 < right / 120 < 0.5


@pytest.mark.parametrize("name", ["sft", "bc"])
def test_an_agent_that_has_been_fine_tuned_is_not_fine_tuned_again(name, tmp_path, monkeypatch):
    """The same command of an evaluation that was stopped would repeat minutes or hours of training."""
    monkeypatch.setattr(imitation, "fine_tune_agent", fine_tune := Mock())
    monkeypatch.setattr(making, "load_agent", load := Mock())
    for is_done in (False, True):
        if is_done:
            fine_tune.call_args.args[3].joinpath("agent").mkdir(parents=True)
        method(name, mini_world(), agent="mini", folder=tmp_path)
        assert load.call_args.args[0] == tmp_path / f"large/{name}/mini/agent"
        assert fine_tune.call_count == 1


def test_the_agent_of_sft_plays_by_the_limits_of_the_users_agent(tmp_path, monkeypatch):
    """A bug: it had those of a preset, so a question that was not too long for the others got no answer."""
    monkeypatch.setattr(imitation, "fine_tune_agent", fine_tune := Mock())
    monkeypatch.setattr(making, "load_agent", load := Mock())
    agent = NamedAgent("mini", replace(CONFIG, max_new=9, max_tokens=5000), start="mini")
    method("sft", mini_world(), agent=agent, folder=tmp_path)
    [_, _, agent_config, folder] = fine_tune.call_args.args
    path, played_by, _ = load.call_args.args
    assert path == folder / "agent"
    for config in (agent_config, played_by):
        assert (config.game.max_turns, config.game.max_new, config.game.max_tokens) == (1, 9, 5000)
