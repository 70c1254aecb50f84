"""Several environments behind a route (eqs 18-19), failed calls, and the alarms."""

import asyncio
from collections import Counter

import pytest

from prompt_r1.environments.budget import Bill, Price
from prompt_r1.environments.check import check_servers
from prompt_r1.environments.environment import Environment
from prompt_r1.environments.sources import Caller, Refused, Reply
from prompt_r1.errors import EnvError, FatalEnvError, Resumable, UsageError
from prompt_r1.types import Message
from tests.support.counting import CountingSource, environment
from tests.support.providers import HELLO, open_environment

DOWN = EnvError("large did not reply: HTTP 500")
REFUSED = Refused("HTTP 400: Content Exists Risk")


class Named(CountingSource):
    """Replies with its name, or with `down` if that is set: another reply, or an exception."""

    def __init__(self, name: str, *, down: Reply | Exception | None = None) -> None:
        super().__init__(name=name)
        self.down = down

    async def attempt(self, messages: list[Message], caller: Caller) -> Reply:
        self.calls += 1
        if isinstance(self.down, Exception):
            raise self.down
        return self.down or Reply(self.name, tokens_in=3, tokens_out=5)


def replies(asked: Environment, *, sessions: int = 400, samples: int = 5, epoch: int = 0) -> list[list[str]]:
    """The replies to the games of each question; that of a failed call is its error."""

    async def reply(session: int, sample: int) -> str:
        try:
            return (await asked.ask(HELLO, Caller(f"q{session}", sample, epoch))).text
        except EnvError as error:
            return str(error)

    async def all_games() -> list[list[str]]:
        return [[await reply(session, sample) for sample in range(samples)] for session in range(sessions)]

    return asyncio.run(all_games())


@pytest.mark.parametrize(
    ("route", "share"), [("session", 0.5), ("uniform", 0.5), ("3,1", 0.75), ("0,1", 0.0)]
)
def test_all_games_of_a_question_ask_one_environment_drawn_by_the_route(route: str, share: float) -> None:
    groups = replies(environment(Named("a"), Named("b"), route=route))
    assert all(len(set(group)) == 1 for group in groups)
    drawn = Counter(group[0] for group in groups)
    assert drawn["a"] / 400 == pytest.approx(share, abs=0.06)


def test_a_later_epoch_draws_again_unless_the_question_keeps_its_environment() -> None:
    for route, changes in (("session", False), ("uniform", True), ("1,1", True)):
        asked = environment(Named("a"), Named("b"), route=route)
        first, second = (replies(asked, sessions=50, samples=1, epoch=epoch) for epoch in (0, 1))
        assert (first != second) == changes
        assert first == replies(environment(Named("a"), Named("b"), route=route), sessions=50, samples=1)


def test_a_game_is_never_moved_to_another_environment() -> None:
    """A bug: some games of a group were, when theirs was down, though training compares the games."""
    other = Named("b")
    asked = environment(Named("a", down=DOWN), other, route="1,0")
    assert replies(asked, sessions=3) == [[str(DOWN)] * 5] * 3 and other.calls == 0


def test_a_reply_costs_a_game_and_the_run_the_price_of_its_own_environment() -> None:
    prices = [Price(1.0, 1.0), Price(100.0, 1000.0)]
    for route, price in zip(("1,0", "0,1"), prices, strict=True):
        asked, bill = Environment([Named("a"), Named("b")], prices=prices, route=route), Bill()
        asyncio.run(asked.ask(HELLO, Caller("q"), bill))
        assert bill.spent == asked.budget.charged == price.of_call(3, 5)


def test_each_of_several_environments_has_metrics_of_its_own() -> None:
    asked = environment(Named("a"), Named("b", down=DOWN), route="1,0")
    replies(asked, sessions=2)
    metrics = asked.take_metrics()
    assert metrics["env/paid"] == metrics["env/1:a/paid"] == 10 and metrics["env/2:b/paid"] == 0
    assert set(metrics) >= {f"env/1:a/{name}" for name in ("lost", "reused", "errors", "tokens_in")}
    shown = "paid failed_requests lost reused tokens_in tokens_out".split()
    assert list(metrics)[: len(shown)] == [f"env/{name}" for name in shown], "in the same order in every run"
    later = asked.take_metrics()
    assert later["env/paid"] == later["env/1:a/paid"] == 0


@pytest.mark.parametrize("route", ["often", "1", "1,2,3", "0,0", "-1,2", "nan,1"])
def test_a_route_that_does_not_match_the_environments_is_a_usage_error(route: str) -> None:
    with pytest.raises(UsageError, match="--route"):
        open_environment("mini,mini-b", route=route)


def ask_often(asked: Environment, source: Named, count: int, down: Reply | Exception | None) -> None:
    source.down = down
    for _ in range(count):
        try:
            asyncio.run(asked.ask(HELLO))
        except EnvError:
            assert down is not None


def test_too_many_failed_calls_stop_the_run() -> None:
    source = Named("a")
    asked = environment(source)
    ask_often(asked, source, 350, None)
    ask_often(asked, source, 40, DOWN)
    with pytest.raises(Resumable, match="41 of the last 200 calls of a failed, this one: large did not"):
        ask_often(asked, source, 1, DOWN)


def test_of_few_calls_twenty_one_must_fail_before_the_run_stops() -> None:
    source = Named("a")
    asked = environment(source)
    ask_often(asked, source, 3, None)
    ask_often(asked, source, 20, DOWN)
    with pytest.raises(Resumable, match="21 of the last 24 calls of a failed"):
        ask_often(asked, source, 1, DOWN)
    ask_often(asked, source, 1, None)  # an environment that replies again can be used


def test_a_dialogue_that_is_refused_breaks_its_game_and_a_share_of_them_the_run() -> None:
    """A bug: a content filter's 400 for one dialogue ended the run, and every resume of it."""
    source = Named("a", down=REFUSED)
    asked = environment(source)
    ask_often(asked, source, 80, None)
    source.down = REFUSED
    with pytest.raises(EnvError, match="a refused the dialogue: HTTP 400"):
        asyncio.run(asked.ask(HELLO))
    ask_often(asked, source, 19, REFUSED)
    with pytest.raises(Resumable, match="21 of the last 101 calls of a failed"):
        ask_often(asked, source, 1, REFUSED)


def test_replies_without_text_are_counted_by_label() -> None:
    """A bug: with max_tokens above the server's window every reply was empty, and nothing said so."""
    source = Named("a")
    asked = environment(source)
    ask_often(asked, source, 25, Reply("", label="length"))
    metrics = asked.take_metrics()
    assert metrics["env/outcomes/length"] == 25


def test_labelled_replies_are_counted_for_each_environment() -> None:
    """A bug: the alarm said that replies were filtered, and nothing said of which environment."""
    filtered = Named("b")
    asked = environment(Named("a"), filtered, route="0,1")
    ask_often(asked, filtered, 3, Reply("", label="content_filter"))
    metrics = asked.take_metrics()
    assert metrics["env/2:b/outcomes/content_filter"] == metrics["env/outcomes/content_filter"] == 3
    assert metrics["env/1:a/outcomes/content_filter"] == 0


class Checked(Named):
    """Needs a check, and records whether it is closed."""

    needs_check = True

    def __init__(self, name: str, *, down: Reply | Exception | None = None) -> None:
        super().__init__(name, down=down)
        self.closed = 0

    def __str__(self) -> str:
        return self.name

    async def close(self) -> None:
        self.closed += 1


def test_each_environment_of_a_pool_is_checked_and_the_metrics_count_no_check() -> None:
    first, second = Checked("a"), Checked("b")
    asked = environment(first, second)
    asyncio.run(check_servers(asked))
    assert first.calls == second.calls == 1
    assert not any(asked.take_metrics().values())
    second.down = Refused("HTTP 401: wrong key")
    with pytest.raises(FatalEnvError, match="b cannot be used: HTTP 401"):
        asyncio.run(check_servers(asked))


def test_closing_a_pool_closes_each_of_its_environments() -> None:
    sources = [Checked("a"), Checked("b"), Checked("c")]
    asyncio.run(environment(*sources).close())
    assert [source.closed for source in sources] == [1, 1, 1]
