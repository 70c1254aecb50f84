"""Several environments behind a route (eqs 18-19), fallback, the alarm, and rate limits."""

import asyncio
from collections import Counter

import pytest

from prompt_r1.endpoint.responses import Outcome
from prompt_r1.environments.pool import GameCalls, Pool
from prompt_r1.environments.specs import parse_fields
from prompt_r1.errors import EnvError, FatalEnvError, Resumable, UsageError
from prompt_r1.types import Message
from tests.support.counting import HELLO, pool
from tests.support.providers import open_environment


class Named:
    """Replies with its name, or with the outcome `down` if that is set."""

    def __init__(self, name: str, *, down: Outcome | None = None) -> None:
        self.name, self.parameters, self.down, self.asked = name, {}, down, 0

    async def call(self, messages: list[Message], *, sample: int = 0, session: str = "") -> Outcome:
        self.asked += 1
        return self.down or Outcome("ok", text=self.name, finish="stop", tokens_in=3, tokens_out=5)

    async def check(self) -> None:
        pass


def replies(environment: Pool, *, sessions: int = 400, samples: int = 5) -> list[list[str]]:
    async def all_games() -> list[list[str]]:
        return [
            [await environment.ask(HELLO, sample=n, session=f"q{s}") for n in range(samples)]
            for s in range(sessions)
        ]

    return asyncio.run(all_games())


@pytest.mark.parametrize("deadline", [0.0, 60.0])
def test_a_game_costs_what_its_replies_cost_also_from_the_journal(tmp_path, deadline) -> None:
    """A resumed run plays games from the journal again, and must reward them the same."""
    dialogues = [HELLO, [*HELLO, Message(role="assistant", content="There."), *HELLO]]
    costs = []
    for _ in range(2):
        environment = pool(Named("a"), folder=tmp_path)
        ask = GameCalls(environment, "0", 0, "q", deadline=deadline)
        for dialogue in dialogues:
            assert asyncio.run(ask(dialogue)) == "a"
        costs.append(ask.spent.usd)
    assert costs == pytest.approx([2 * (3 * 1e-6 + 5 * 10e-6)] * 2)
    assert environment.take_metrics()["env/reused"] == 2


def test_session_routing_gives_a_question_one_environment() -> None:
    groups = replies(pool(Named("a"), Named("b")))
    assert all(len(set(group)) == 1 for group in groups)
    assert 150 < sum(group[0] == "a" for group in groups) < 250


@pytest.mark.parametrize(("route", "share"), [("uniform", 0.5), ("3,1", 0.75), ("0,1", 0.0)])
def test_uniform_and_weights_draw_for_each_game(route: str, share: float) -> None:
    drawn = Counter(name for group in replies(pool(Named("a"), Named("b"), route=route)) for name in group)
    assert drawn["a"] / 2000 == pytest.approx(share, abs=0.04)


def test_a_game_keeps_its_environment_and_a_resumed_run_draws_the_same() -> None:
    first, second = (pool(Named("a"), Named("b"), route="uniform") for _ in range(2))
    assert replies(first, sessions=20) == replies(first, sessions=20) == replies(second, sessions=20)


def test_the_next_environment_replaces_one_that_is_down_for_a_minute() -> None:
    """By the time since it failed: a machine's clock does not start at 0."""
    broken, now = Named("a", down=Outcome("retry", reason="HTTP 500")), [5e6]
    environment = pool(broken, Named("b"), route="1,0", clock=lambda: now[0])
    assert replies(environment, sessions=3) == [["b"] * 5] * 3
    now[0] += 59
    assert replies(environment, sessions=1) == [["b"] * 5]
    assert broken.asked == 1  # it is not asked while it is down
    broken.down, now[0] = None, now[0] + 2
    assert replies(environment, sessions=3) == [["a"] * 5] * 3


def test_an_environment_with_a_fatal_error_is_not_called_again_and_alone_it_ends_the_run() -> None:
    refusing = Named("a", down=Outcome("fatal", reason="HTTP 401"))
    now = [0.0]
    environment = pool(refusing, Named("b"), route="1,0", clock=lambda: now[0])
    assert replies(environment, sessions=1)[0][0] == "b"
    now[0] = 1e9
    replies(environment, sessions=2)
    assert refusing.asked == 1
    with pytest.raises(FatalEnvError, match="a cannot be used: HTTP 401"):
        replies(pool(refusing), sessions=1)


def test_too_many_failed_calls_warn_once_each_time_and_then_stop_the_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = Named("a")
    environment = pool(source)

    async def calls(count: int, *, failing: bool) -> None:
        source.down = Outcome("retry", reason="HTTP 500") if failing else None
        for _ in range(count):
            try:
                await environment.ask(HELLO)
            except EnvError:
                assert failing

    asyncio.run(calls(150, failing=False))
    asyncio.run(calls(10, failing=True))
    assert not caplog.records
    asyncio.run(calls(1, failing=True))
    assert "11 of the last 200 calls of a failed" in caplog.text
    caplog.clear()
    asyncio.run(calls(200, failing=False))
    asyncio.run(calls(12, failing=True))
    assert [record.message for record in caplog.records] == ["11 of the last 200 calls of a failed"]
    asyncio.run(calls(28, failing=True))
    with pytest.raises(Resumable, match="41 of the last 200 calls of a failed"):
        asyncio.run(calls(1, failing=True))


def test_each_of_several_environments_has_metrics_of_its_own() -> None:
    environment = pool(Named("a"), Named("b", down=Outcome("retry", reason="x")), route="1,0")
    replies(environment, sessions=2)
    metrics = environment.take_metrics()
    assert metrics["env/paid"] == metrics["env/1:a/paid"] == 10 and metrics["env/2:b/paid"] == 0
    assert environment.take_metrics()["env/paid"] == 0


@pytest.mark.parametrize("route", ["often", "1", "1,2,3", "0,0", "-1,2", "nan,1"])
def test_a_route_that_does_not_match_the_environments_is_a_usage_error(route: str) -> None:
    with pytest.raises(UsageError, match="--route"):
        open_environment("mini,mini-b", route=route)


@pytest.mark.parametrize("text", ["{", "[1]", '{"model": "x"}', '{"n": 2}'])
def test_env_args_are_a_json_object_without_reserved_fields(text: str) -> None:
    with pytest.raises(UsageError, match="--env-args"):
        parse_fields(text)
    assert parse_fields('{"temperature": 0.7}') == {"temperature": 0.7} and parse_fields("") == {}
