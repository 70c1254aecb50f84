"""Journal and budgets: no call is paid for twice, no limit is exceeded, and a kill loses no reply."""

import asyncio
import json
import time
import tracemalloc
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
import torch

from prompt_r1.config.train import TrainConfig
from prompt_r1.distributed import Ranks
from prompt_r1.endpoint.responses import Outcome
from prompt_r1.environments.budget import Budget, OutOfBudget, Price, parse_price
from prompt_r1.environments.journal import Call, Journal
from prompt_r1.environments.metered import LONG_REPLY, MeteredEnvironment
from prompt_r1.environments.pool import GameCalls, Pool
from prompt_r1.environments.sources import FreeSource
from prompt_r1.environments.specs import Environments
from prompt_r1.errors import EnvError, FatalEnvError, Resumable, UsageError
from prompt_r1.spending import Spending
from prompt_r1.types import Message
from tests.support.counting import HELLO, PRICE, CountingSource, ask, metered, text_of
from tests.support.providers import Provider, body_of, chat, error_of


def without_checksum(line: str) -> dict[str, object]:
    """The fields of a line of the journal, as older versions wrote it."""
    return {name: value for name, value in json.loads(line).items() if name != "crc32"}


def test_a_recorded_call_is_not_sent_again_and_games_of_a_group_differ(tmp_path: Path) -> None:
    first = CountingSource()
    environment = metered(first, tmp_path)
    assert [ask(environment, sample=n) for n in (0, 1, 0)] == ["reply 1", "reply 2", "reply 1"]
    again = CountingSource()
    assert [ask(metered(again, tmp_path), sample=n) for n in (0, 1)] == ["reply 1", "reply 2"]
    assert (first.calls, again.calls) == (2, 0)


def test_mode_live_sends_and_records_every_call(tmp_path: Path) -> None:
    source = CountingSource()
    environment = metered(source, tmp_path, mode="live")
    assert [ask(environment), ask(environment)] == ["reply 1", "reply 2"]
    assert len((tmp_path / "rank0.jsonl").read_text().splitlines()) == 2


def test_mode_replay_sends_nothing_and_a_missing_reply_is_an_error_that_names_the_call(
    tmp_path: Path,
) -> None:
    ask(metered(CountingSource(), tmp_path))
    source = CountingSource()
    environment = metered(source, tmp_path, mode="replay")
    assert ask(environment) == "reply 1"
    with pytest.raises(UsageError, match="no recorded reply to call 1 of game 7 about question 'q1'"):
        ask(environment, sample=7)
    asyncio.run(environment.check())  # does not check the source
    assert source.calls == 0


def test_replay_without_a_journal_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no journal to replay"):
        Journal(tmp_path, mode="replay")
    with pytest.raises(UsageError, match="nowhere: there is no journal"):
        Journal(tmp_path, others=[tmp_path / "nowhere"])


def test_a_link_in_the_journal_of_another_run_is_not_followed(tmp_path):
    (tmp_path / "secret").write_text("a key")
    (tmp_path / "old").mkdir()
    (tmp_path / "old/rank0.jsonl").symlink_to(tmp_path / "secret")
    with pytest.raises(UsageError, match=r"old/rank0.jsonl is a symbolic link"):
        Journal(None, others=[tmp_path / "old"])


def test_a_line_of_the_journal_has_tokens_dollars_and_the_game(tmp_path: Path) -> None:
    ask(metered(CountingSource(), tmp_path))
    line = json.loads((tmp_path / "rank0.jsonl").read_text())
    assert line["usd"] == pytest.approx(10e-6 + 50e-6) and line["latency"] > 0
    assert (line["text"], line["finish"]) == ("reply 1", "stop")
    assert (line["tokens_in"], line["tokens_out"]) == (10, 5)
    assert (line["sample"], line["session"], line["prompt"]) == (0, "q1", "Where?")
    assert "lost" not in line


def test_the_key_depends_on_model_messages_parameters_and_sample() -> None:
    calls = [
        Call("a", HELLO, {}, 0),
        Call("b", HELLO, {}, 0),
        Call("a", HELLO * 2, {}, 0),
        Call("a", HELLO, {"temperature": 1}, 0),
        Call("a", HELLO, {}, 1),
    ]
    assert len({call.key for call in calls}) == len(calls)
    assert Call("a", HELLO, {}, 0, session="q2").key == calls[0].key


@pytest.mark.parametrize(("samples", "last"), [(False, "reply 1"), (True, "reply 2")])
def test_a_later_epoch_gets_its_own_reply_where_the_environment_samples(samples, last, tmp_path):
    """A bug: a lucky reply of the first epoch was learnt in all."""
    settings = {"journal": Journal(tmp_path), "budget": Budget(), "price": PRICE, "samples": samples}
    pool = Pool([MeteredEnvironment(CountingSource(), **settings)], budget=Budget())

    async def in_epoch(epoch: int) -> str:
        return await GameCalls(pool, "0", 0, "q1", epoch)(HELLO)

    replies = [asyncio.run(in_epoch(epoch)) for epoch in (0, 1, 0, 1)]
    assert replies == ["reply 1", last] * 2  # and a resumed epoch repeats its own


def test_the_key_is_the_one_of_existing_journals() -> None:
    """Another key would make every recorded reply useless."""
    call = Call("gpt-4o-mini", HELLO, {"system": "Be brief.", "temperature": 0.5}, 3)
    assert call.key == "a9d80dc92ac73f40c1d1251420d6341b"


@pytest.mark.parametrize("has_journal", [False, True])
def test_equal_concurrent_calls_are_paid_for_once_if_there_is_a_journal(has_journal, tmp_path) -> None:
    """A bug: without one, the second call replaced the first in the table of running calls: KeyError."""
    environment = metered(CountingSource(), tmp_path if has_journal else None)

    async def both() -> list[str]:
        return await asyncio.gather(text_of(environment), text_of(environment))

    assert asyncio.run(both()) == ["reply 1", "reply 1" if has_journal else "reply 2"]


def test_when_a_call_is_cancelled_an_equal_call_that_waits_for_it_is_sent(tmp_path: Path) -> None:
    source = CountingSource()
    environment = metered(source, tmp_path)

    async def cancel_first() -> str:
        first = asyncio.create_task(text_of(environment))
        second = asyncio.create_task(text_of(environment))
        await asyncio.sleep(0)
        first.cancel()
        return await second

    assert asyncio.run(cancel_first()) == "reply 2"


def test_of_many_that_wait_for_a_call_that_fails_one_is_sent_and_the_others_wait_for_it(
    tmp_path: Path,
) -> None:
    source = CountingSource()
    environment = metered(source, tmp_path)

    async def cancel_first() -> list[str]:
        games = [asyncio.create_task(text_of(environment)) for _ in range(4)]
        await asyncio.sleep(0)
        games[0].cancel()
        return await asyncio.gather(*games[1:])

    assert asyncio.run(cancel_first()) == ["reply 2"] * 3
    assert source.calls == 2


def test_a_failed_call_is_recorded_and_sent_again(tmp_path: Path) -> None:
    failing = CountingSource(Outcome("retry", reason="HTTP 500"))
    environment = metered(failing, tmp_path)
    with pytest.raises(EnvError, match="HTTP 500"):
        ask(environment)
    with pytest.raises(UsageError):
        Journal(tmp_path, mode="replay")  # it holds no reply
    assert ask(environment) == "reply 2"
    with pytest.raises(FatalEnvError):
        ask(metered(CountingSource(Outcome("fatal", reason="HTTP 401"))))


def test_mode_replay_repeats_recorded_failures(tmp_path: Path) -> None:
    environment = metered(CountingSource(Outcome("retry", reason="HTTP 500")), tmp_path)
    with pytest.raises(EnvError):
        ask(environment)
    ask(environment, sample=1)
    with pytest.raises(EnvError, match="HTTP 500"):
        ask(metered(CountingSource(), tmp_path, mode="replay"))


def test_a_torn_last_line_is_skipped_and_ended(tmp_path: Path) -> None:
    ask(metered(CountingSource(), tmp_path))
    path = tmp_path / "rank0.jsonl"
    path.write_bytes(path.read_bytes() + b'{"key": "abc", "verd')
    source = CountingSource()
    environment = metered(source, tmp_path)
    assert [ask(environment), ask(environment, sample=1)] == ["reply 1", "reply 1"]
    assert source.calls == 1
    journal = Journal(tmp_path)
    assert journal.spent.calls == 2 and len(path.read_bytes().splitlines()) == 3


def test_lines_that_are_no_calls_are_skipped(tmp_path: Path) -> None:
    """A key that is a list ended the run with a traceback."""
    ask(metered(CountingSource(), tmp_path))
    path = tmp_path / "rank0.jsonl"
    line = json.loads(path.read_text())
    strange = [json.dumps({**line, name: []}).encode() for name in ("key", "verdict")]
    strange += [b"[]", b"7", b"\xff", b'{"key": []}', b"[" * 100_000]
    path.write_bytes(b"\n".join([*strange, path.read_bytes()]))
    again = CountingSource()
    assert ask(metered(again, tmp_path)) == "reply 1" and again.calls == 0


def test_replies_of_other_runs_cost_nothing(tmp_path: Path) -> None:
    ask(metered(CountingSource(), tmp_path / "old"))
    source = CountingSource()
    journal = Journal(tmp_path / "new", others=[tmp_path / "old"])
    environment = MeteredEnvironment(source, journal=journal, budget=Budget(), price=PRICE)
    assert ask(environment) == "reply 1" and source.calls == 0 and journal.spent == Spending()


def test_each_of_two_files_is_in_the_totals_once_however_often_the_journal_is_opened(tmp_path: Path) -> None:
    source = CountingSource()
    for sample in range(6):
        journal = Journal(tmp_path, rank=sample % 2)
        environment = MeteredEnvironment(source, journal=journal, budget=Budget(), price=PRICE)
        ask(environment, sample=sample)
        journal.close()
    assert Journal(tmp_path).spent == Spending(6, 60, 30, pytest.approx(6 * PRICE.of_call(10, 5).usd))


def test_what_a_journal_cost_is_in_its_last_complete_line(tmp_path: Path) -> None:
    """Also if an older version wrote the line before, and if a kill cut the last line short."""
    path = tmp_path / "rank0.jsonl"
    ask(metered(CountingSource(), tmp_path))
    old = without_checksum(path.read_text()) | {"totals": [1, 15, 60e-6, 0, 0, 0.0]}  # 10 tokens in, 5 out
    path.write_text(json.dumps(old) + "\n")
    environment = metered(
        CountingSource(Outcome("ok", text="x", tokens_in=1, tokens_out=1, lost=1)), tmp_path
    )
    assert [ask(environment), ask(environment, sample=1)] == ["reply 1", "x"]
    path.write_bytes(path.read_bytes() + path.read_bytes().splitlines()[1][:-9])
    journal, lost = Journal(tmp_path), environment._budget.spent
    reply = PRICE.of_call(1, 1)
    assert journal.spent == Spending(2, 16, 1, 60e-6 + reply.usd, 1, lost.lost_tokens, lost.lost_usd)
    assert journal.find(Call("counting", HELLO, {}, 1)).text == "x"


def test_a_resumed_rank_gets_its_own_reply_and_not_that_of_another_rank(tmp_path: Path) -> None:
    """A bug: both ranks paid for a call, in two epochs; resumed, rank 1 got the reply of rank 0."""
    call, journals = Call("m", HELLO, {}, 0), [Journal(tmp_path, rank=rank) for rank in range(2)]
    for rank, journal in enumerate(journals):
        journal.write(call, Outcome("ok", text=f"to rank {rank}"), spent=Spending(1), latency=0.0)
        assert journal.find(call).text == f"to rank {rank}"
    replies = [Journal(tmp_path, rank=rank).find(call).text for rank in range(3)]
    assert replies == ["to rank 0", "to rank 1", "to rank 0"]


@pytest.mark.parametrize(
    "totals", [[1, 1, 1, -3.0, 0, 0, 0], [1e999] * 7, ["1"] * 7, [1, 2], {}, None, [True] * 7]
)
def test_totals_that_cannot_be_are_not_believed(totals: object, tmp_path: Path) -> None:
    source = CountingSource()
    environment = metered(source, tmp_path)
    assert [ask(environment, sample=n) for n in (0, 1)] == ["reply 1", "reply 2"]
    path = tmp_path / "rank0.jsonl"
    first, last = path.read_text().splitlines()
    path.write_text(first + "\n" + json.dumps(without_checksum(last) | {"totals": totals}) + "\n")
    assert Journal(tmp_path).spent.calls == 1  # the totals of the line before


def test_a_reply_of_a_wrong_type_is_sent_again(tmp_path: Path) -> None:
    ask(metered(CountingSource(), tmp_path))
    path = tmp_path / "rank0.jsonl"
    path.write_text(json.dumps(without_checksum(path.read_text()) | {"text": 5}) + "\n")
    source = CountingSource()
    assert ask(metered(source, tmp_path)) == "reply 1" and source.calls == 1


def test_a_reply_with_a_changed_bit_is_sent_again(tmp_path: Path) -> None:
    """A bug: a bit that flipped on the disk was replayed, and a resumed run ended with other weights."""
    ask(metered(CountingSource(), tmp_path))
    path = tmp_path / "rank0.jsonl"
    path.write_bytes(path.read_bytes().replace(b"reply 1", b"reply 3"))
    again = CountingSource()
    assert ask(metered(again, tmp_path)) == "reply 1" and again.calls == 1
    assert Journal(tmp_path).find(Call("counting", HELLO, {}, 0)).text == "reply 1"


def write_long_journal(folder: Path, lines: int) -> None:
    """A journal with this many replies of 200 characters, and the totals of all calls in each line."""
    line = {"model": "m", "session": "q", "sample": 0, "prompt": "Who?" * 20, "text": "Anna " * 40}
    rest = json.dumps({**line, "label": "", "tokens_in": 1, "tokens_out": 1, "usd": 1.0})[1:-1]
    with (folder / "rank0.jsonl").open("w") as file:
        for n in range(1, lines + 1):
            start = f'{{"key": "{n * 2654435761 % 2**64:016x}{n:016x}", "verdict": "ok", '
            file.write(f'{start}{rest}, "totals": [{n}, {n}, {n}, {n}.0, 0, 0, 0.0]}}\n')


def test_a_long_journal_is_opened_quickly_and_in_little_memory(tmp_path: Path) -> None:
    """A bug: each line was parsed, and 850 bytes were kept of it: 14.7 s and 851 MB for a million lines."""
    write_long_journal(tmp_path, 50_000)
    begin = time.process_time()
    assert Journal(tmp_path).spent == Spending(50_000, 50_000, 50_000, 50_000.0)
    assert time.process_time() - begin < 0.3
    tracemalloc.start()
    Journal(tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 50_000 * 250


# --- Budgets ---


def forty_calls(environment: MeteredEnvironment) -> list[str | BaseException]:
    """The reply or the exception of each of forty concurrent calls."""

    async def calls() -> list[str | BaseException]:
        started = [text_of(environment, sample=number) for number in range(40)]
        async with asyncio.timeout(5):  # a reservation that is never released blocks the others
            return await asyncio.gather(*started, return_exceptions=True)

    return asyncio.run(calls())


@pytest.mark.parametrize(("limits", "calls"), [({"max_calls": 7}, 7), ({"max_usd": 9 * 60e-6}, 7)])
def test_forty_concurrent_games_never_exceed_the_budget(
    limits: dict[str, float], calls: int, tmp_path: Path
) -> None:
    source = CountingSource(parameters={"max_tokens": 5})
    budget = Budget(**limits)
    environment = metered(source, tmp_path, budget=budget)

    results = forty_calls(environment)
    assert all(isinstance(result, str | Resumable) for result in results)
    paid = sum(isinstance(result, str) for result in results)
    assert source.calls == paid and calls - 6 <= paid <= 9
    assert budget.spent.calls <= (limits.get("max_calls") or 99)
    assert budget.spent.usd <= limits.get("max_usd", 1.0) + 1e-12


@pytest.mark.parametrize("limit", [{"max_tokens": 5}, {"max_completion_tokens": 5}])
def test_calls_with_a_limit_on_the_reply_run_concurrently(limit: dict[str, object]) -> None:
    """Without max_tokens the first call would reserve a long reply, more than this budget has."""
    source = CountingSource(parameters=limit)
    environment = metered(source, budget=Budget(max_usd=200 * 10e-6))

    async def games() -> list[str]:
        return await asyncio.gather(*(text_of(environment, sample=number) for number in range(3)))

    assert asyncio.run(games()) == ["reply 1", "reply 2", "reply 3"] and source.peak == 3


def test_forty_concurrent_games_without_a_limit_on_replies_never_exceed_the_budget() -> None:
    """Each call reserves the longest reply so far, not the last or an average one."""
    replies = [5 * LONG_REPLY, 5, *[5 * LONG_REPLY] * 40]
    outcomes = [Outcome("ok", text="long", tokens_in=10, tokens_out=tokens) for tokens in replies]
    source = CountingSource(*outcomes)
    budget = Budget(max_usd=60 * LONG_REPLY * 10e-6)
    environment = metered(source, budget=budget)
    for number in range(2):  # sequentially, so that a reply's length is known
        ask(environment, sample=number)

    results = forty_calls(environment)
    assert all(isinstance(result, str | Resumable) for result in results)
    assert 50 * LONG_REPLY < budget.spent.tokens <= 60 * LONG_REPLY


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
    response = httpx.Response(200, json={**body_of("Paris, in France."), **usage})
    budget = Budget(max_usd=1.0)
    source = chat(Provider(response), system="Be brief.")
    environment = MeteredEnvironment(source, journal=Journal(None), budget=budget, price=PRICE)
    reply = asyncio.run(environment.call(HELLO))
    assert (reply.spent.tokens_in, reply.spent.tokens_out) == (5, 6)  # a token has three characters
    assert budget.spent == Spending(1, 5, 6, pytest.approx(65e-6))


def test_token_counts_that_are_too_low_for_the_texts_are_replaced_by_estimates_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A provider that counts 1 token for every text would never reach the budget."""
    counts = {"usage": {"prompt_tokens": 1, "completion_tokens": 1}}
    environment = chat(Provider(httpx.Response(200, json={**body_of("word " * 60), **counts})))
    long: list[Message] = [{"role": "user", "content": "word " * 30}]
    for _ in range(2):
        outcome = asyncio.run(environment.call(long))
        assert (outcome.tokens_in, outcome.tokens_out) == (50, 100)  # a token has three characters
    outcome = asyncio.run(environment.call(HELLO))
    assert (outcome.tokens_in, outcome.tokens_out) == (1, 100)  # one token for six characters is possible
    assert caplog.text.count("large counts 1 and 1 tokens for a prompt of 150 and a reply of 300 char") == 1


def test_counts_that_are_higher_than_the_texts_explain_are_kept() -> None:
    """Providers bill reasoning that they do not return."""
    counts = {"usage": {"prompt_tokens": 900, "completion_tokens": 5000}}
    environment = chat(Provider(httpx.Response(200, json={**body_of("Paris"), **counts})))
    outcome = asyncio.run(environment.call(HELLO))
    assert (outcome.tokens_in, outcome.tokens_out) == (900, 5000)


@pytest.mark.parametrize(("verdict", "tokens"), [("ok", (10, 5)), ("retry", (0, 0))])
def test_lost_attempts_are_in_the_budget_also_after_a_resume(verdict, tokens, tmp_path) -> None:
    """A bug: attempts that were reset after delivery, and billed, were in no budget."""
    outcome = Outcome(verdict, tokens_in=tokens[0], tokens_out=tokens[1], lost=2)
    budget = Budget(max_usd=1.0)
    environment = metered(CountingSource(outcome, parameters={"max_tokens": 9}), tmp_path, budget=budget)
    lost = environment.estimate(HELLO)
    with suppress(EnvError):
        ask(environment)
    lost_twice = Spending(lost_calls=2, lost_tokens=2 * lost.tokens, lost_usd=2 * lost.usd)
    assert lost.tokens > 9 and budget.spent == PRICE.of_call(*tokens) + lost_twice
    assert budget.spent.at_most("calls") == 3
    assert budget.spent.at_most("tokens") == sum(tokens) + 2 * lost.tokens
    assert Journal(tmp_path).spent == budget.spent


def test_a_rejected_request_costs_nothing() -> None:
    budget = Budget(max_usd=1.0)
    source = chat(Provider(httpx.Response(400, json=error_of("prompt is too long"))))
    environment = MeteredEnvironment(source, journal=Journal(None), budget=budget, price=PRICE)
    assert ask(environment) == ""
    assert budget.spent == Spending(1)


def test_an_exhausted_budget_raises_resumable_and_is_still_exhausted_after_a_resume(tmp_path: Path) -> None:
    source = CountingSource()
    environment = metered(source, tmp_path, budget=Budget(max_calls=2))
    assert [ask(environment, sample=n) for n in (0, 1)] == ["reply 1", "reply 2"]
    resumed = metered(source, tmp_path, budget=Budget(max_calls=2, spent=Journal(tmp_path).spent))
    assert ask(resumed, sample=0) == "reply 1"  # recorded replies stay available
    with pytest.raises(Resumable, match=r"--max-env-calls 2 has no room .* 2 calls, 30 tokens, \$0.0001"):
        ask(resumed, sample=2)
    raised = metered(source, tmp_path, budget=Budget(max_calls=3, spent=Journal(tmp_path).spent))
    assert ask(raised, sample=2) == "reply 3"


class UnsentSource(CountingSource):
    """Knows, as an endpoint's client does, that nothing had been sent when its call was cancelled."""

    async def call(self, messages: list[Message], *, sample: int = 0, session: str = "") -> Outcome:
        try:
            return await super().call(messages, sample=sample)
        except asyncio.CancelledError as cancelled:
            cancelled.args = (0,)
            raise


async def cancel_first(environment: MeteredEnvironment, source: CountingSource) -> str:
    """Cancel the first of two calls while it runs, and return the reply to the second."""
    first = asyncio.create_task(text_of(environment))
    second = asyncio.create_task(text_of(environment, sample=1))
    while not source.calls:
        await asyncio.sleep(0)
    first.cancel()
    async with asyncio.timeout(5):
        return await second


def test_a_call_that_is_cancelled_before_it_was_sent_releases_its_reservation() -> None:
    source = UnsentSource()
    environment = metered(source, budget=Budget(max_calls=1))
    assert asyncio.run(cancel_first(environment, source)) == "reply 2"
    assert environment.take_counts()["lost"] == 0


def test_a_call_that_is_cancelled_after_it_was_sent_counts_as_lost_in_budget_and_journal(tmp_path) -> None:
    """A signal, another game's error or a client that has gone cancels calls that may be billed."""
    source = CountingSource()
    with pytest.raises(OutOfBudget, match="for lost attempts at most 1"):
        asyncio.run(cancel_first(metered(source, tmp_path / "tight", budget=Budget(max_calls=1)), source))
    roomy = metered(source := CountingSource(), tmp_path / "roomy", budget=Budget(max_calls=2))
    assert asyncio.run(cancel_first(roomy, source)) == "reply 2"
    counts = roomy.take_counts()
    assert (counts["paid"], counts["lost"]) == (1, 1)
    spent = Journal(tmp_path / "roomy").spent
    assert (spent.calls, spent.lost_calls) == (1, 1) and spent.lost_usd > 0


def test_counts_are_by_outcome_and_reset_when_taken(tmp_path: Path) -> None:
    failed, filtered = Outcome("retry", reason="HTTP 500"), Outcome("outcome", label="content_filter")
    environment = metered(CountingSource(failed, filtered), tmp_path)
    with pytest.raises(EnvError):
        ask(environment)
    assert [ask(environment, sample=n) for n in (0, 1, 1)] == ["", "reply 3", "reply 3"]
    counts = environment.take_counts()
    assert counts.pop("latency") > 0
    assert counts == {"paid": 3, "lost": 0, "reused": 1, "errors": 1, "tokens_in": 10, "tokens_out": 5}
    assert not any(environment.take_counts().values())


@pytest.mark.parametrize("limit", [{"max_calls": 13}, {"max_usd": 13.0}])
def test_ranks_share_the_rest_of_a_budget_equally(limit: dict[str, float]) -> None:
    call, spent = Spending(calls=1, tokens_in=100, usd=1.0), Spending(calls=3, tokens_out=300, usd=3.0)
    budget = Budget(**limit, spent=spent, ranks=2)

    async def use_up() -> int:
        for number in range(99):
            try:
                await budget.reserve(call)
            except Resumable:
                return number
            budget.settle(call, call)
        return 99

    assert asyncio.run(use_up()) == 5


def test_each_of_two_ranks_gets_half_of_the_rest_of_the_budget(tmp_path: Path) -> None:
    config = TrainConfig(env="mini", max_env_calls=6, journal="live")
    ranks = Ranks(rank=1, count=2, device=torch.device("cpu"))

    async def use_up(environment: Pool) -> int:
        for number in range(99):
            try:
                await environment.ask(HELLO, sample=number)
            except Resumable:
                return number
        return 99

    def open_environment() -> Pool:
        return Environments(config, seed=0, folder=tmp_path, ranks=ranks).open("mini")

    assert asyncio.run(use_up(open_environment())) == 3
    assert asyncio.run(use_up(open_environment())) == 1  # resumed: half of the other three
    assert [path.name for path in (tmp_path / "journal").iterdir()] == ["rank1.jsonl"]


@pytest.mark.parametrize("text", ["1", "1,2,3", "a,b", "-1,2", "inf,1", "nan,1"])
def test_a_price_that_is_not_two_numbers_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match="--env-price takes IN,OUT"):
        parse_price(text)


def test_a_price_is_in_dollars_per_million_tokens() -> None:
    assert parse_price("0.15,0.6").of_call(1_000_000, 1_000_000).usd == pytest.approx(0.75)
    assert parse_price("") == Price(0.0, 0.0)


@pytest.mark.parametrize("keeps", [False, True])
def test_the_journal_keeps_the_thinking_of_a_reply_which_the_agent_reads_only_if_asked_to(tmp_path, keeps):
    written = "<think>Who?</think>Anna."

    class Thinker:
        async def ask(self, messages):
            return written

    def reply(journal):
        source = FreeSource(Thinker(), seed=0)
        settings = {"journal": journal, "budget": Budget(), "price": PRICE, "keeps_thinking": keeps}
        return asyncio.run(MeteredEnvironment(source, **settings).call(HELLO)).text

    expected = written if keeps else "Anna."
    assert reply(Journal(tmp_path)) == reply(Journal(tmp_path, mode="replay")) == expected


class TakesSession:
    def ask(self, messages, session, seed):
        return f"{session} of run {seed}"


class TakesMessages:
    def ask(self, messages):
        return "the same"


@pytest.mark.parametrize(("own", "paid"), [(TakesSession(), 2), (TakesMessages(), 1)])
def test_questions_share_a_reply_only_where_the_environment_does_not_take_the_session(tmp_path, own, paid):
    def replies(mode: str) -> list[str]:
        async def ask() -> list[str]:
            environment = metered(FreeSource(own, seed=3), tmp_path, mode=mode)
            return [(await environment.call(HELLO, session=session)).text for session in ("q1", "q2", "q1")]

        return asyncio.run(ask())

    expected = ["q1 of run 3", "q2 of run 3", "q1 of run 3"] if paid == 2 else ["the same"] * 3
    assert replies("reuse") == expected
    [journal] = tmp_path.glob("**/*.jsonl")
    assert len(journal.read_text().splitlines()) == paid
    assert replies("replay") == expected  # a run that resumes asks nothing again
