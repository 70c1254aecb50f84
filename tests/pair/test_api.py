"""Asking a pair from Python: answers, streams, limits, one's own environment, and a running event loop."""

import asyncio
import json
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import prompt_r1
from prompt_r1.environments.budget import FREE
from prompt_r1.environments.environment import Environment
from prompt_r1.environments.journal import Journal
from prompt_r1.environments.own import OwnSource
from prompt_r1.environments.sources import Busy, Caller, Refused, Reply, Source
from prompt_r1.pair.agent import Sampling, play_question
from prompt_r1.pair.api import AsyncPair, Pair
from prompt_r1.pair.named_agent import SETTINGS_FILE
from prompt_r1.settings.fields import write_yaml
from prompt_r1.settings.train import TrainConfig
from prompt_r1.types import Message, Question
from tests.support.at_once import at_once
from tests.support.counting import CountingSource
from tests.support.counting import environment as counted_environment
from tests.support.echo_agent import EchoAgent, Shouting, paid_environment
from tests.support.pair_server import echo_pair
from tests.support.paths import ROOT
from tests.support.providers import environment_of

QUESTION = "Who is Anna?"


class Failing:
    """Fails for questions with the word fail."""

    async def ask(self, messages):
        if "fail" in messages[-1]["content"]:
            raise prompt_r1.EnvError("HTTP 500")
        return "fine"


def pair_of(
    environment: Environment | None = None, *, agent: EchoAgent | None = None, **options: float
) -> Pair:
    """An echoing agent with a shouting environment, unless others are given, in a thread of its own."""

    async def opening() -> AsyncPair:
        return echo_pair(agent, environment, **options)

    return Pair(opening())


def loop_threads() -> set[threading.Thread]:
    """The loops of pairs that are open. Threads of other tests may end at any time."""
    return {thread for thread in threading.enumerate() if thread.name == "prompt-r1"}


def check_ended(before: set[threading.Thread]) -> None:
    """All loops of pairs that were started since have ended."""
    for thread in loop_threads() - before:
        thread.join(10)
    assert not loop_threads() - before


@pytest.fixture
def pair() -> Iterator[Pair]:
    with pair_of() as opened:
        yield opened


@pytest.fixture
def folder(asking_agent, tmp_path) -> Path:
    """An agent's folder with the settings of its training."""
    folder = shutil.copytree(asking_agent, tmp_path / "agent")
    game = TrainConfig(env="mini", instruction="short", max_turns=3, max_new=64, max_tokens=400, seed=5)
    write_yaml(game, folder / SETTINGS_FILE)
    return folder


def test_a_game_has_its_answer_turns_calls_and_price():
    with pair_of(paid_environment()) as pair:
        game = pair.ask("3: Who is Anna?")
    assert (game.answer, game.stop, len(game.turns)) == ("Paid reply.", "answered", 4)
    assert (game.spent.calls, game.spent.tokens_in, game.spent.tokens_out) == (3, 30, 30)
    assert game.spent.usd == pytest.approx(0.06) and 0 < sum(game.sampled) < len(game.tokens)


def test_half_a_character_in_a_question_is_a_question_mark(pair):
    assert pair.ask("Who\ud800").answer == "WHO?"


def test_a_stream_yields_the_dialogue_in_order_and_then_the_answer(pair):
    *pieces, answer = pair.stream(QUESTION)
    assert isinstance(answer, prompt_r1.Trajectory) and answer.answer == "WHO IS ANNA?"
    kinds = list(dict.fromkeys(piece.kind for piece in pieces))
    assert kinds == ["think", "interaction_prompt", "reply", "answer"] and len(pieces) > 20
    texts = {kind: "".join(piece.text for piece in pieces if piece.kind == kind) for kind in kinds}
    assert texts["interaction_prompt"] == QUESTION and texts["reply"] == texts["answer"] == "WHO IS ANNA?"


def test_questions_of_several_threads_share_one_batch_also_while_an_event_loop_runs():
    """As in a notebook, whose loop cannot be entered again by `asyncio.run`."""
    agent = EchoAgent(seconds=0.05)
    with pair_of(agent=agent) as pair, ThreadPoolExecutor(4) as threads:

        async def cell() -> list[prompt_r1.Trajectory]:
            return [*threads.map(pair.ask, [QUESTION] * 4), pair.ask(QUESTION)]

        games = asyncio.run(cell())
    assert [game.answer for game in games] == ["WHO IS ANNA?"] * 5 and agent.peak == 4


def test_a_failed_environment_raises_for_its_question_alone():
    with pair_of(environment_of(Failing())) as pair:
        with pytest.raises(prompt_r1.EnvError, match="HTTP 500"):
            pair.ask("fail?")
        with pytest.raises(prompt_r1.EnvError, match="HTTP 500"):
            list(pair.stream("fail?"))
        assert pair.ask("good?").answer == "fine"


def test_a_call_that_may_exceed_the_limit_in_dollars_is_not_made():
    with pair_of(paid_environment()) as pair:
        with pytest.raises(prompt_r1.LimitReached, match=r"the limit of \$0.04; spent: \$0.02"):
            pair.ask("2: a", limits=prompt_r1.Limits(usd=0.04))
        assert pair._pair.environment.budget.charged.usd == pytest.approx(0.02)
        with pytest.raises(prompt_r1.LimitReached, match=r"the limit of \$0.04; spent: \$0.02"):
            list(pair.stream("2: a", limits=prompt_r1.Limits(usd=0.04)))


def test_a_limit_in_dollars_without_a_price_is_refused(pair):
    """Without a price every call costs $0, so the limit let a game on a paid endpoint go on to its end."""
    with pytest.raises(prompt_r1.UsageError, match="needs --env-price"):
        pair.ask(QUESTION, limits=prompt_r1.Limits(usd=0.01))
    with pytest.raises(prompt_r1.UsageError, match="needs --env-price"):
        list(pair.stream(QUESTION, limits=prompt_r1.Limits(usd=0.01)))


def test_a_limit_in_dollars_without_a_limit_of_each_reply_is_refused():
    """One long reply could cost more than the limit of its question."""
    unlimited = pair_of(counted_environment(CountingSource()))
    with unlimited as pair, pytest.raises(prompt_r1.UsageError, match="needs a limit of each reply"):
        pair.ask(QUESTION, limits=prompt_r1.Limits(usd=0.01))


def test_a_limit_in_dollars_needs_no_limit_of_the_replies_that_are_free():
    """A bug: with a free environment beside one that has a price, every limit was refused."""
    [paid] = paid_environment().clients
    sources = [CountingSource(), paid.source]
    with pair_of(Environment(sources, prices=[FREE, paid.price], route="0,1")) as pair:
        game = pair.ask("1: a", limits=prompt_r1.Limits(usd=0.04))
    assert game.spent.usd == pytest.approx(0.02)


def test_lost_requests_count_towards_the_limit_in_dollars():
    """A bug: only replies did, so a server that took requests and never replied was paid without end."""
    source = CountingSource(*[Busy("no response in time", wait=0.001, may_be_billed=True)] * 9, max_tokens=9)
    asked = counted_environment(source)
    limit = 3 * asked.clients[0].estimate([{"role": "user", "content": QUESTION}]).usd
    reached = pytest.raises(prompt_r1.LimitReached, match="the next request may exceed the limit")
    with pair_of(asked) as pair, reached:
        pair.ask(QUESTION, limits=prompt_r1.Limits(usd=limit))
    assert source.calls == 3 and asked.budget.charged.usd <= limit


def test_a_game_says_what_its_replies_cost_and_what_is_charged_with_its_lost_requests():
    """A bug: infer.py showed the second as the cost of the game, and only the first could be had from ask."""
    lost = Busy("no response in time", may_be_billed=True)
    asked = counted_environment(CountingSource(lost, max_tokens=9))
    with pair_of(asked) as pair:
        game = pair.ask("1: a")
    assert (game.spent.calls, game.spent.lost_usd) == (1, 0)
    assert game.charged == asked.budget.charged and game.charged.calls == 2
    assert game.charged.usd == pytest.approx(game.spent.usd + game.charged.lost_usd)


@pytest.mark.parametrize("seconds", [0.05, 0, -1])
def test_a_game_that_takes_too_long_is_cancelled(seconds):
    """A caller may compute what is left of its own time, and nothing may be left."""
    agent = EchoAgent(seconds=5)
    with pair_of(agent=agent) as pair:
        with pytest.raises(TimeoutError):
            pair.ask(QUESTION, limits=prompt_r1.Limits(seconds=seconds))
        assert agent.running == 0


def test_a_stream_that_is_not_read_to_its_end_cancels_its_game():
    agent = EchoAgent(seconds=0.3)
    with pair_of(agent=agent) as pair:
        stream = pair.stream("3: a")
        next(stream)
        stream.close()
        time.sleep(0.1)  # a game that went on would be in its second turn
        assert agent.running == 0
        assert pair.ask(QUESTION).answer


def test_a_loaded_pair_answers_as_infer_does(folder, call_here, tmp_path):
    line = ["infer.py", "--agent", folder, "--question", QUESTION, "--json", "--device", "cpu"]
    printed = json.loads(call_here(tmp_path, *line).stdout)
    with prompt_r1.load(folder, device="cpu") as pair:
        answer = pair.ask(QUESTION)
    assert [turn.text for turn in answer.turns] == [turn["text"] for turn in printed["turns"]]
    assert (answer.answer, answer.stop) == (printed["answer"], printed["stop"])
    assert answer.spent.calls == printed["calls"]


def test_load_passes_its_settings_to_the_agent_and_to_every_call(folder):
    """Seed and temperature are the run's and greedy unless given; a price and a limit reach the budget."""
    before = loop_threads()
    with prompt_r1.load(folder, device="cpu") as pair:
        assert (pair._pair.seed, pair._pair.temperature, pair.environment) == (5, 0.0, "mini")
        assert pair._pair.environment.budget.max_usd == 0.0
    given = {"env": "mini-b", "seed": 0, "temperature": 0.25}
    given |= {"env_price": "1,2", "max_env_usd": 0.5, "env_args": '{"max_tokens": 64}', "max_turns": 2}
    with prompt_r1.load(folder, device="cpu", **given) as pair:
        assert pair._pair.agent.game.max_turns == 2
        assert (pair._pair.seed, pair._pair.temperature, pair.environment) == (0, 0.25, "mini-b")
        assert pair._pair.environment.budget.max_usd == 0.5
    check_ended(before)
    pair.close()  # a second time: nothing happens


def test_a_price_a_limit_and_a_seed_hold_for_an_object_of_the_user_too(folder):
    """They were ignored without a word."""
    given = {"env_price": "1,2", "max_env_usd": 0.5, "env_args": '{"max_tokens": 64}', "seed": 3}
    with pytest.raises(prompt_r1.UsageError, match="--max-env-usd needs --env-price"):
        prompt_r1.load(folder, device="cpu", env=Shouting(), max_env_usd=0.5)
    with prompt_r1.load(folder, device="cpu", env=Shouting(), **given) as pair:
        environment = pair._pair.environment
    assert environment.clients[0].source.parameters == {"seed": 3}
    assert environment.budget.max_usd == 0.5
    estimate = environment.clients[0].estimate([{"role": "user", "content": "Who?"}])
    assert estimate.usd > 0 and estimate.tokens_out == 64


def test_a_seed_and_a_temperature_of_the_pair_are_those_of_every_turn():
    agent = EchoAgent()
    with pair_of(agent=agent, seed=7, temperature=0.5) as pair:
        pair.ask(QUESTION)
        list(pair.stream(QUESTION))
    assert {(seed.split("/")[0], temperature) for seed, temperature, _ in agent.sampled_with} == {("7", 0.5)}


def test_load_refuses_an_environment_that_cannot_be_asked(asking_agent):
    with pytest.raises(prompt_r1.UsageError, match="has no method `ask"):
        prompt_r1.load(asking_agent, env=object())


def test_an_environment_that_cannot_play_is_reported_before_the_weights_are_loaded(folder):
    """A bug: a large agent was loaded first, and then its environment was found to need a key."""
    (folder / "model.safetensors").write_bytes(b"")
    before = loop_threads()
    with pytest.raises(prompt_r1.FatalEnvError, match=r"http://127\.0\.0\.1:9/v1: no server"):
        prompt_r1.load(folder, env="m@http://127.0.0.1:9/v1")
    check_ended(before)


def test_the_package_imports_nothing_slow_until_a_name_is_used():
    lines = (
        "import sys, prompt_r1",
        "assert 'torch' not in sys.modules and 'load' in dir(prompt_r1)",
        "prompt_r1.UsageError, prompt_r1.Trajectory, prompt_r1.Piece",
        "assert 'torch' not in sys.modules",
    )
    subprocess.run([sys.executable, "-c", "\n".join(lines)], cwd=ROOT, check=True)
    with pytest.raises(AttributeError, match="has no attribute 'lod'"):
        prompt_r1.lod  # noqa: B018
    assert all(getattr(prompt_r1, name) for name in prompt_r1.__all__)


def test_a_game_that_is_played_again_pays_nothing_and_another_sample_or_epoch_asks_anew(tmp_path):
    environment = Environment([OwnSource(Shouting(), seed=0)], journal=Journal(tmp_path))

    def calls_paid(**game: int) -> float:
        asked = Question("q", "d", "2: a", ("a",))
        asyncio.run(play_question(EchoAgent(), environment, asked, Sampling("0"), **game))
        return environment.take_metrics()["env/paid"]

    assert [calls_paid(), calls_paid(), calls_paid(sample=1), calls_paid(epoch=1)] == [2, 0, 2, 2]


def test_the_calls_on_the_bill_of_a_game_are_its_replies_and_the_call_that_failed(tmp_path):
    """Replies from the journal and shared failures count. Requests that are sent again do not."""
    rng = random.Random(0)
    script = []
    for _ in range(30):
        busy = Busy("HTTP 503", may_be_billed=True)
        script.append(rng.choice([Reply("fine", tokens_in=10), busy, Refused("HTTP 400")]))
    source = CountingSource(*script, samples=False)
    environment = counted_environment(source, folder=tmp_path)
    texts = [f"{calls}: {letter}" for calls in (1, 2, 3) for letter in "abcdef"]
    games = at_once(
        play_question(EchoAgent(), environment, Question("q", "d", text, ("a",)), Sampling("0"))
        for text in [*texts, *texts]
    )
    for game in games:
        calls = sum(turn.reply is not None for turn in game.turns)
        if game.stop == "env_error":
            calls += 1
        assert game.spent.calls == calls > 0
    assert {game.stop for game in games} == {"answered", "env_error"} and not source.script
    assert environment.take_metrics()["env/reused"] > 0


def test_a_game_that_runs_when_its_pair_is_closed_is_cancelled():
    """A bug: the thread that waited for it waited forever."""
    agent = EchoAgent(seconds=600)
    pair = pair_of(agent=agent)
    with ThreadPoolExecutor() as threads:
        waiting = [threads.submit(pair.ask, QUESTION), threads.submit(list, pair.stream(QUESTION))]
        while agent.running < 2:
            time.sleep(0.01)
        pair.close()
        for asked in waiting:
            with pytest.raises(prompt_r1.UsageError, match="was closed while it played"):
                asked.result(timeout=30)
    assert agent.running == 0


class Hanging(Source):
    """Never replies, and notes how many calls ran when its connections were closed."""

    def __init__(self) -> None:
        self.name, self.parameters, self.samples = "hanging", {}, True
        self.running = 0
        self.running_at_close = -1

    async def attempt(self, messages: list[Message], caller: Caller) -> Reply:
        self.running += 1
        try:
            await asyncio.sleep(600)
        finally:
            self.running -= 1
        return Reply("too late")

    async def close(self) -> None:
        self.running_at_close = self.running


def test_games_are_cancelled_before_the_connections_of_their_calls_are_closed():
    """A bug: the connections were closed first, under calls that still ran."""
    source = Hanging()
    pair = pair_of(Environment([source]))
    with ThreadPoolExecutor() as threads:
        asked = threads.submit(pair.ask, QUESTION)
        while not source.running:
            time.sleep(0.01)
        pair.close()
        with pytest.raises(prompt_r1.UsageError, match="was closed while it played"):
            asked.result(timeout=30)
    assert source.running_at_close == 0


class Unclosable(Hanging):
    async def close(self) -> None:
        raise OSError("the connection is gone")


def test_a_pair_is_closed_even_if_its_environment_cannot_be():
    """A bug: the thread of the pair went on, and each further close failed."""
    pair = pair_of(Environment([Unclosable()]))
    with pytest.raises(OSError, match="gone"):
        pair.close()
    pair.close()
    with pytest.raises(prompt_r1.UsageError, match="is closed"):
        pair.ask(QUESTION)


def ask(pair: Pair, question: object, **options: object) -> None:
    pair.ask(question, **options)


def stream(pair: Pair, question: object, **options: object) -> None:
    list(pair.stream(question, **options))


@pytest.mark.parametrize("usd", [float("nan"), 0.0, -1.0])
def test_a_limit_of_dollars_that_no_game_can_keep_is_refused(usd):
    """A bug: no cost is above NaN."""
    with pytest.raises(prompt_r1.UsageError, match=r"usd=…. must be above 0"):
        prompt_r1.Limits(usd=usd)


@pytest.mark.parametrize(
    "arguments",
    [
        {"temperature": -1.0},
        {"max_turns": -1},
        {"max_env_usd": float("nan")},
        {"max_env_usd": -1.0},
        {"seed": -1},
    ],
)
def test_load_refuses_numbers_that_the_flags_refuse(arguments):
    """A bug: the flags' ranges were not checked, and a limit of NaN dollars never ended a run."""
    [name] = arguments
    with pytest.raises(prompt_r1.UsageError, match=name):
        prompt_r1.load("mini", env="mini", **arguments)


@pytest.mark.parametrize("asked", [ask, stream])
def test_a_closed_pair_says_so(asked):
    """It raised a CancelledError without a text."""
    with pair_of() as pair:
        pass
    with pytest.raises(prompt_r1.UsageError, match="is closed"):
        asked(pair, QUESTION)
