"""Budgets: no limit is exceeded, whatever ends a call, and what may have been billed is charged."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from prompt_r1.environments.budget import Bill, Budget, OutOfBudget, Price, parse_prices
from prompt_r1.environments.check import check_servers
from prompt_r1.environments.environment import LONG_REPLY, Environment
from prompt_r1.environments.journal import Journal
from prompt_r1.environments.own import OwnSource
from prompt_r1.environments.sources import Busy, Caller, Refused, Reply
from prompt_r1.environments.specs import check_environment
from prompt_r1.errors import EnvError, LimitReached, Resumable, UsageError
from prompt_r1.settings.agent import EnvironmentConfig
from prompt_r1.spending import Spending
from prompt_r1.types import Message
from tests.support.at_once import at_once
from tests.support.clock import run_jumping
from tests.support.counting import PRICE, CountingSource, environment
from tests.support.providers import HELLO, Provider, ask, body_of, endpoint, error_of, open_environment, reply


def forty_calls(asked: Environment) -> list[str | BaseException]:
    """The reply or the exception of each of forty concurrent calls."""
    calls = (reply(asked, sample=number) for number in range(40))
    return at_once(calls, seconds=5, return_exceptions=True)  # one that is never released blocks the others


@pytest.mark.parametrize(("limits", "calls"), [({"max_calls": 7}, 7), ({"max_usd": 9 * 60e-6}, 7)])
def test_forty_concurrent_games_never_exceed_the_budget(
    limits: dict[str, float], calls: int, tmp_path: Path
) -> None:
    source, budget = CountingSource(max_tokens=5), Budget(**limits)
    results = forty_calls(environment(source, folder=tmp_path, budget=budget))
    assert all(isinstance(result, str | Resumable) for result in results)
    paid = sum(isinstance(result, str) for result in results)
    assert source.calls == paid and calls - 6 <= paid <= 9
    assert budget.charged.calls <= (limits.get("max_calls") or 99)
    assert budget.charged.usd <= limits.get("max_usd", 1.0) + 1e-12


def test_a_tiny_budget_holds_from_the_first_call_on() -> None:
    """A bug: the 9-token reply to the check was the estimate, and $0.033 were spent of $0.005."""
    script = [Reply("Hello!", tokens_in=8, tokens_out=9)]
    script += [Reply("long", tokens_in=10, tokens_out=800) for _ in range(99)]
    source, budget = CountingSource(*script, max_tokens=800), Budget(max_usd=0.02)
    source.needs_check = True
    asked = environment(source, budget=budget)
    asyncio.run(check_servers(asked))
    results = forty_calls(asked)
    assert all(isinstance(result, str | Resumable) for result in results)
    # The estimate allows one call at a time: three of $0.008 would exceed the limit.
    assert 0.01 < budget.charged.usd <= 0.02


@pytest.mark.parametrize("text", ["法国的首都", "เมืองหลวง", "😀🎉🦊", "3141592653"])
def test_a_budget_holds_if_each_byte_of_the_dialogue_is_a_token(text: str) -> None:
    """A bug: three characters were reserved as a token, which is a ninth of what Chinese text may cost."""
    messages = [Message(role="user", content=text * 20)]
    tokens = len((text * 20).encode())
    source = CountingSource(*[Reply("yes", tokens_in=tokens, tokens_out=5)] * 40, max_tokens=5)
    budget = Budget(max_usd=4.5 * PRICE.of_call(tokens, 5).usd)
    asked = environment(source, budget=budget)
    calls = (reply(asked, messages, sample=number) for number in range(40))
    results = at_once(calls, seconds=5, return_exceptions=True)
    assert any(isinstance(result, OutOfBudget) for result in results)
    assert PRICE.of_call(tokens, 5).usd <= budget.charged.usd <= 4.5 * PRICE.of_call(tokens, 5).usd


LIMITS = [{"max_tokens": 9}, {"max_completion_tokens": 9}, {"max_tokens": 3, "max_completion_tokens": 9}]


@pytest.mark.parametrize("fields", LIMITS)
def test_a_limit_of_dollars_needs_a_limit_of_each_reply(fields, tmp_path) -> None:
    """A bug: of $0.05, 64 first calls at once spent $0.615, because nobody knew how long replies are."""
    priced = {"max_env_usd": 1.0, "env_price": ("1,10",)}
    for spec in ("large@http://a.test/v1", "mini", "py:tests.environments.test_specs:Constant"):
        for args in ("", '{"max_tokens": -1}', '{"max_tokens": null, "top_p": 1}'):
            with pytest.raises(UsageError, match="--max-env-usd needs a limit of each reply"):
                open_environment(spec, env_args=args, **priced)
        [client] = open_environment(spec, env_args=json.dumps(fields), **priced).clients
        assert client.estimate(HELLO).tokens_out == 9, "the larger limit: the server may reject the other"

    longest = [Reply("long", tokens_in=10, tokens_out=9) for _ in range(40)]
    source, budget = CountingSource(*longest, **fields), Budget(max_usd=3e-3)
    asked = environment(source, folder=tmp_path, budget=budget)
    results = forty_calls(asked)
    assert any(isinstance(result, OutOfBudget) for result in results)
    assert 2e-3 < budget.charged.usd <= 3e-3
    assert source.peak == int(3e-3 / asked.clients[0].estimate(HELLO).usd), "as many at once as fit"


@pytest.mark.parametrize("prices", [(), ("",), ("0,0",), ("0,0", "0,0.0")])
def test_a_limit_of_dollars_needs_a_price_above_zero(prices) -> None:
    """A bug: with the price 0,0 the limit was accepted, and could never be reached."""
    spec = "large@http://a.test/v1,small@http://b.test/v1"
    limited = {"env_args": '{"max_tokens": 9}', "max_env_usd": 1.0}
    with pytest.raises(UsageError, match="--max-env-usd needs --env-price IN,OUT above 0"):
        open_environment(spec, env_price=prices, **limited)
    open_environment(spec, env_price=("0,0", "1,2"), **limited)


def test_a_limit_of_dollars_needs_no_limit_of_replies_that_are_free_or_that_a_local_model_writes(tmp_path):
    """A bug: --env-args had to limit them too, though Limits(usd=…) of the same pair was accepted."""
    (tmp_path / "config.json").touch()
    limited = {"max_env_usd": 1.0, "env_price": ("0,0", "1,2")}
    check_environment(f"mini,hf:{tmp_path}", EnvironmentConfig(**limited), trusted=())
    with pytest.raises(UsageError, match="--max-env-usd needs a limit of each reply"):
        check_environment(f"hf:{tmp_path},mini", EnvironmentConfig(**limited), trusted=())


@pytest.mark.parametrize("limits", [(9, -1), (9, None), (-1, 9)])
def test_both_names_of_the_limit_must_limit_the_reply(limits) -> None:
    """A bug: a server rejected max_tokens, -1 was all that was left, and of $2.12 $15.06 were spent."""
    fields = dict(zip(("max_tokens", "max_completion_tokens"), limits, strict=True))
    with pytest.raises(UsageError, match="--max-env-usd needs a limit of each reply"):
        open_environment(
            "large@http://a.test/v1", env_args=json.dumps(fields), max_env_usd=1.0, env_price=("1,10",)
        )


def test_a_limit_of_minus_one_is_no_limit() -> None:
    """A bug: llama.cpp takes -1 for no limit, and the estimate of a reply was -1 token."""
    [client] = environment(CountingSource(max_tokens=-1)).clients
    assert client.estimate(HELLO).tokens_out == LONG_REPLY


def busy(number: int) -> Busy:
    """The first of three attempts cannot be billed."""
    return Busy("HTTP 500", wait=0.001, may_be_billed=number % 3 > 0)


def losing_source(calls: int = 1) -> CountingSource:
    """Each call gets a reply in the fourth attempt."""
    script: list[Reply | Exception] = []
    for _ in range(calls):
        script += [*map(busy, range(3)), Reply("at last", tokens_in=10, tokens_out=5)]
    return CountingSource(*script, max_tokens=9)


def test_lost_requests_are_charged_at_their_estimate_also_after_a_resume(tmp_path) -> None:
    """A bug: requests that were reset after delivery, and billed, were in no budget."""
    asked = environment(losing_source(), folder=tmp_path)
    assert ask(asked) == "at last"
    estimate = asked.clients[0].estimate(HELLO)
    lost = 2 * estimate.usd
    expected = estimate * 2 + PRICE.of_call(10, 5) + Spending(lost_usd=lost)
    assert asked.budget.charged.amounts == pytest.approx(expected.amounts) and lost > 0
    assert Journal(tmp_path).charged == asked.budget.charged
    metrics = asked.take_metrics()
    assert (metrics["env/paid"], metrics["env/failed_requests"], metrics["env/lost"]) == (1, 3, 2)


def test_a_call_that_the_budget_or_its_bill_stops_is_not_counted_as_sent(tmp_path) -> None:
    asked = environment(CountingSource(max_tokens=9), folder=tmp_path, budget=Budget(max_calls=1))
    with pytest.raises(LimitReached):
        asyncio.run(asked.ask(HELLO, Caller("q"), Bill(max_usd=1e-9)))
    ask(asked)
    with pytest.raises(OutOfBudget):
        ask(asked, sample=1)
    assert asked.take_metrics()["env/paid"] == asked.clients[0].source.calls == 1


def test_requests_that_are_repeated_never_exceed_the_budget(tmp_path) -> None:
    """A bug: nothing was reserved for another attempt, so that lost ones exceeded the limit."""
    budget = Budget(max_calls=7)
    results = forty_calls(environment(losing_source(40), folder=tmp_path, budget=budget))
    assert any(isinstance(result, OutOfBudget) for result in results)
    assert budget.charged.calls <= 7 and Journal(tmp_path).charged.calls == budget.charged.calls


def test_a_process_that_is_killed_during_a_repeated_request_has_charged_the_lost_one_before(tmp_path):
    at_the_kill = []

    class KilledSource(CountingSource):
        async def attempt(self, messages: list[Message], caller: Caller) -> Reply:
            at_the_kill.append(Journal(tmp_path).charged)
            return await super().attempt(messages, caller)

    asked = environment(KilledSource(Busy("reset", may_be_billed=True), max_tokens=9), folder=tmp_path)
    ask(asked)
    estimate = asked.clients[0].estimate(HELLO)
    assert at_the_kill[-1] == estimate * 2 + Spending(lost_usd=2 * estimate.usd)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a_reply_is_reserved_at_the_limit_of_its_request(name):
    assert environment(CountingSource(**{name: 7000})).clients[0].estimate(HELLO).tokens_out == 7000


def test_a_request_that_was_rejected_is_a_call_without_tokens(tmp_path) -> None:
    """A bug: the journal kept the estimate of it, and a resumed run had spent more than its limit."""
    refused = environment(CountingSource(Reply("yes"), Refused("HTTP 400")))
    ask(refused)
    with pytest.raises(EnvError):
        ask(refused, sample=1)
    assert refused.budget.charged.calls == 2 and refused.take_metrics()["env/lost"] == 0

    script = [error for _ in range(5) for error in (Reply("yes"), Refused("HTTP 400"))]
    budget = Budget(max_calls=2)
    results = forty_calls(environment(CountingSource(*script), folder=tmp_path, budget=budget))
    assert any(isinstance(result, OutOfBudget) for result in results)
    assert Journal(tmp_path).charged.calls == budget.charged.calls <= 2


class BusySource(CountingSource):
    """Is always busy, and bills nothing."""

    async def attempt(self, messages: list[Message], caller: Caller) -> Reply:
        await super().attempt(messages, caller)
        raise Busy("HTTP 429")


def test_a_call_whose_server_is_busy_until_the_deadline_is_charged_nothing_and_spends_one_call() -> None:
    asked = environment(BusySource())
    bill = Bill()
    with pytest.raises(EnvError, match="did not reply within 600 s"):
        run_jumping(asked.ask(HELLO, Caller("q"), bill))
    assert asked.clients[0].source.calls > 1
    assert bill.charged == asked.budget.charged == Spending()
    assert bill.spent == Spending(calls=1)


class PaidAndLost:
    """A user's object that pays for each call, and loses every second reply."""

    def __init__(self) -> None:
        self.calls = 0

    async def ask(self, messages: list[Message]) -> str:
        self.calls += 1
        if self.calls % 2:
            raise EnvError("my client's time-out")
        return "yes"


def test_an_env_error_of_a_users_object_is_charged_as_a_lost_request(tmp_path) -> None:
    """A bug: it was free, so calls that the object had paid for exceeded --max-env-usd without a word."""
    own = PaidAndLost()
    source = OwnSource(own, seed=0, priced=True, reply_limit=9)
    asked = environment(source, folder=tmp_path, budget=Budget(max_usd=1e-3))
    estimate = asked.clients[0].estimate(HELLO)
    bill = Bill()
    with pytest.raises(EnvError, match="time-out"):
        asyncio.run(asked.ask(HELLO, Caller("q"), bill))
    assert Journal(tmp_path).charged == asked.budget.charged == replace(estimate, lost_usd=estimate.usd)
    assert bill.charged.usd == estimate.usd > 0
    assert asked.take_metrics()["env/lost"] == 1
    results = forty_calls(asked)
    assert any(isinstance(result, OutOfBudget) for result in results)
    assert own.calls * estimate.usd / 2 <= asked.budget.charged.usd <= 1e-3


def test_half_a_character_in_the_reply_of_a_users_object_is_a_question_mark() -> None:
    """A lone surrogate has no UTF-8, so the tokens of a priced reply could not be counted."""

    class Half:
        def ask(self, messages: list[Message]) -> str:
            return "Pa\ud800ris"

    source = OwnSource(Half(), seed=0, priced=True, reply_limit=9)
    assert ask(environment(source)) == "Pa?ris"


@pytest.mark.parametrize(
    "usage",
    [
        {},
        {"usage": None},
        {"usage": {"prompt_tokens": -9, "completion_tokens": 10**400}},
        {"usage": {"prompt_tokens": 0, "completion_tokens": 0}},
    ],
)
def test_a_reply_without_believable_usage_is_in_the_budget_at_its_estimate(usage: dict[str, object]) -> None:
    """A bug: such a reply cost nothing, so that the budget was never reached."""
    body = body_of("Paris, in", reasoning_content=" France.")  # reasoning is billed too
    response = httpx.Response(200, json={**body, **usage})
    asked = environment(endpoint(Provider(response), system="Be brief."), price=PRICE)
    ask(asked)
    assert asked.budget.charged == Spending(1, 29, 17, pytest.approx(199e-6))  # a token for each byte


def test_a_request_that_is_refused_for_its_content_costs_no_tokens() -> None:
    """It has no token counts either, but nothing was written for it."""
    filtered = httpx.Response(400, json=error_of("not allowed", code="content_filter"))
    asked = environment(endpoint(Provider(filtered)))
    assert ask(asked) == "" and asked.budget.charged == Spending(1)


def test_an_exhausted_budget_raises_resumable_and_is_still_exhausted_after_a_resume(tmp_path: Path) -> None:
    source = CountingSource()
    asked = environment(source, folder=tmp_path, budget=Budget(max_calls=2))
    assert [ask(asked, sample=n) for n in (0, 1)] == ["reply 1", "reply 2"]

    def resumed(limit: int) -> Environment:
        budget = Budget(max_calls=limit, charged=Journal(tmp_path).charged)
        return environment(source, folder=tmp_path, budget=budget)

    assert ask(resumed(2), sample=0) == "reply 1"  # recorded replies stay available
    with pytest.raises(Resumable, match=r"--max-env-calls 2 .* 2 calls, .* tokens, \$0.0001"):
        ask(resumed(2), sample=2)
    assert ask(resumed(3), sample=2) == "reply 3"


async def cancel_first(asked: Environment) -> str:
    """Cancel the first of two calls while it runs, and return the reply to the second."""
    first = asyncio.create_task(reply(asked))
    second = asyncio.create_task(reply(asked, sample=1))
    while not asked.clients[0].source.running:
        await asyncio.sleep(0)
    first.cancel()
    async with asyncio.timeout(5):
        return await second


def test_a_call_that_is_cancelled_after_it_was_sent_is_charged_in_budget_and_journal(tmp_path) -> None:
    """A signal, another game's error or a client that has gone cancels calls that may be billed."""
    with pytest.raises(OutOfBudget, match="estimated, for lost requests"):
        asyncio.run(cancel_first(environment(CountingSource(), budget=Budget(max_calls=1))))
    roomy = environment(CountingSource(), folder=tmp_path, budget=Budget(max_calls=2))
    assert asyncio.run(cancel_first(roomy)) == "reply 2"
    metrics = roomy.take_metrics()
    assert (metrics["env/paid"], metrics["env/lost"]) == (2, 1)
    assert Journal(tmp_path).charged == roomy.budget.charged and roomy.budget.charged.calls == 2


@pytest.mark.parametrize("limit", [{"max_calls": 13}, {"max_usd": 13.0}])
def test_ranks_share_the_rest_of_a_budget_equally(limit: dict[str, float]) -> None:
    call, spent = Spending(calls=1, tokens_in=100, usd=1.0), Spending(calls=3, tokens_out=300, usd=3.0)
    budget = Budget(**limit, charged=spent, ranks=2)

    async def use_up() -> int:
        for number in range(99):
            try:
                await budget.reserve(call)
            except Resumable:
                return number
            budget.settle(call, call)
        return 99

    assert asyncio.run(use_up()) == 5


def test_a_rank_that_has_used_up_its_share_names_the_share() -> None:
    """With 10 calls for 16 ranks, a rank may make none. The error only said that 0 calls were spent."""
    budget = Budget(max_calls=10, ranks=16)
    with pytest.raises(OutOfBudget, match=r"--max-env-calls 10 .*1/16"):
        asyncio.run(budget.reserve(Spending(calls=1)))


def test_each_environment_has_its_own_price_or_all_have_one():
    """With one price for two environments, a free local model was billed at the price of the paid one."""
    names = ["paid", "local", "paid"]
    assert parse_prices(["1,2", "0,0"], names) == {"paid": Price(1, 2), "local": Price()}
    assert parse_prices(["1,2"], names) == {"paid": Price(1, 2), "local": Price(1, 2)}
    assert parse_prices([], names) == {"paid": Price(), "local": Price()}
    with pytest.raises(UsageError, match=r"paid, local .*not 3"):
        parse_prices(["1,2", "0,0", "1,1"], names)


def test_the_prices_of_a_pool_are_in_the_order_of_its_names():
    opened = open_environment("large@http://a.test/v1,small@http://b.test/v1", env_price=("1,2", "0,0"))
    assert [(client.source.name, client.price) for client in opened.clients] == [
        ("large", Price(1, 2)),
        ("small", Price()),
    ]
