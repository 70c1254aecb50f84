"""The journal: no call is paid for twice, and a kill at any moment loses no reply and hides no cost."""

import asyncio
import errno
import gc
import json
import os
import tracemalloc
from contextlib import nullcontext
from pathlib import Path

import pytest

from prompt_r1.environments.budget import FREE, Bill, Budget
from prompt_r1.environments.environment import Environment
from prompt_r1.environments.journal import Journal
from prompt_r1.environments.sources import Caller, Refused, Reply
from prompt_r1.errors import EnvError, Resumable, UsageError
from prompt_r1.programs import files
from prompt_r1.spending import Spending
from prompt_r1.types import Message
from tests.support.at_once import at_once
from tests.support.counting import PRICE, CountingSource, environment
from tests.support.exports import file_size_limit
from tests.support.providers import HELLO, ask, reply


def test_calls_share_a_reply_only_where_nothing_that_shapes_it_differs(tmp_path: Path) -> None:
    """A bug: two servers with a model of one name shared replies, so the second one was never asked."""
    games = [Caller("q1"), Caller("q1", sample=1), Caller("q1", epoch=1), Caller("q2")]

    def paid(*sources: CountingSource, games: list[Caller]) -> int:
        async def calls() -> int:
            for source in sources:
                asked = environment(source, folder=tmp_path)
                for game in games:
                    await asked.ask(HELLO, game)
            return sum(source.calls for source in sources)

        return asyncio.run(calls())

    servers = [CountingSource(url=url) for url in ("http://x/v1", "http://y/v1")]
    assert paid(*servers, CountingSource(url="http://x/v1"), games=games[:1]) == 2
    assert paid(CountingSource(name="other"), CountingSource(temperature=1), games=games[:1]) == 2
    # A bug: a source that samples gave one reply to the equal prompts of two questions.
    assert paid(CountingSource(), games=games) == 4
    # A bug: number of the game and epoch were in the key also here: 1,065 calls for 478 prompts.
    assert paid(CountingSource(name="greedy", samples=False), games=games) == 1


@pytest.mark.parametrize("has_journal", [False, True])
def test_equal_concurrent_calls_are_paid_for_once_if_there_is_a_journal(has_journal, tmp_path) -> None:
    """A bug: without one, the second call replaced the first in the table of running calls: KeyError."""
    asked = environment(CountingSource(), folder=tmp_path if has_journal else None)
    both = at_once(reply(asked) for _ in range(2))
    assert both == ["reply 1", "reply 1" if has_journal else "reply 2"]


def test_of_many_that_wait_for_a_call_that_is_cancelled_one_is_sent_and_the_others_wait_for_it(
    tmp_path: Path,
) -> None:
    source = CountingSource()
    asked = environment(source, folder=tmp_path)

    async def cancel_first() -> list[str]:
        games = [asyncio.create_task(reply(asked)) for _ in range(4)]
        await asyncio.sleep(0)
        games[0].cancel()
        return await asyncio.gather(*games[1:])

    assert asyncio.run(cancel_first()) == ["reply 2"] * 3
    assert source.calls == 2


def test_calls_that_wait_for_an_equal_call_share_its_failure_and_a_later_call_is_sent(tmp_path: Path) -> None:
    """A bug: in an outage each of eight equal calls waited its own ten minutes, one after another."""
    source = CountingSource(EnvError("no reply within 600 s"), Refused("no reply within 600 s"))
    asked = environment(source, folder=tmp_path)
    for sends in (1, 2):
        ended = at_once((reply(asked) for _ in range(8)), return_exceptions=True)
        assert [type(error) for error in ended] == [EnvError] * 8
        assert source.calls == sends
        # The failed calls are still in memory, with what their exceptions hold.
    assert at_once(reply(asked) for _ in range(8)) == ["reply 3"] * 8
    assert asked.take_metrics()["env/failed_requests"] == 2


def test_a_failure_that_shared_calls_share_counts_once(tmp_path: Path) -> None:
    """A bug: one refused question with 32 games at temperature 0 was 32 failed calls, and ended the run."""
    asked = environment(CountingSource(EnvError("refused")), folder=tmp_path)
    ended = at_once((reply(asked) for _ in range(32)), return_exceptions=True)
    assert [type(error) for error in ended] == [EnvError] * 32


def test_calls_that_wait_for_an_equal_call_share_that_the_server_accepts_no_calls(tmp_path: Path) -> None:
    """Each of eight equal calls was sent to a server that had rejected the key, and none was on a bill."""
    source = CountingSource(Refused("HTTP 401", status=401, concerns_all=True))
    asked = environment(source, folder=tmp_path)
    ended = at_once((reply(asked) for _ in range(8)), return_exceptions=True)
    assert [type(error) for error in ended] == [Resumable] * 8
    assert source.calls == 1


def test_a_call_that_has_ended_leaves_no_lock_in_memory(tmp_path: Path) -> None:
    """A run makes hundreds of thousands of different calls, and each has a lock while it is made."""
    asked = environment(CountingSource(), folder=tmp_path)
    at_once(reply(asked, sample=sample) for sample in range(3))
    gc.collect()
    assert len(asked.journal.places) == 3
    assert len(asked._shared_calls) == 0


def test_a_journal_leaves_the_texts_of_its_replies_on_the_disk(tmp_path: Path) -> None:
    """Each of eight ranks held the replies of all ranks: 300 MB for 200,000 calls, now 55."""
    megabyte = 2**20
    source = CountingSource(*(Reply(str(number) * megabyte) for number in range(8)))
    tracemalloc.start()
    try:
        asked = environment(source, folder=tmp_path)
        for sample in range(8):
            ask(asked, sample=sample)
        resumed = environment(CountingSource(), folder=tmp_path)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < megabyte
    for sample in range(8):
        assert ask(asked, sample=sample) == ask(resumed, sample=sample) == str(sample) * megabyte


def test_a_call_that_failed_is_sent_again_when_it_is_made_again(tmp_path: Path) -> None:
    asked = environment(CountingSource(EnvError("HTTP 500")), folder=tmp_path)
    with pytest.raises(EnvError):
        ask(asked)
    assert ask(asked) == "reply 2"


def recorded(folder: Path) -> bytes:
    """The journal of four calls, of which the second one failed."""
    first = Reply("first", tokens_in=10, tokens_out=5)
    source = CountingSource(first, Refused("HTTP 400"), max_tokens=20)
    asked = environment(source, folder=folder)
    for sample in range(4):
        with pytest.raises(EnvError) if sample == 1 else nullcontext():
            ask(asked, sample=sample)
    return (folder / "rank0.jsonl").read_bytes()


def test_a_kill_at_any_byte_of_the_journal_loses_no_reply_and_hides_no_cost(tmp_path: Path) -> None:
    """What was recorded is not sent again; a call that the kill cut off is charged at its estimate."""
    whole = recorded(tmp_path / "whole")
    estimate = environment(CountingSource(max_tokens=20)).clients[0].estimate(HELLO)
    paid, failed = PRICE.of_call(10, 5), Spending(1)
    charges = [paid, failed, paid, paid]
    ends = [number for number, byte in enumerate(whole) if byte == ord("\n")]
    assert len(ends) == 8
    places = {0, *(end + step for end in ends for step in (-3, 0, 1))}
    for place in sorted(places):
        folder = tmp_path / f"at {place}"
        folder.mkdir()
        (folder / "rank0.jsonl").write_bytes(whole[:place])
        complete = sum(place >= end for end in ends)  # also without its line break
        ended, cut = divmod(complete, 2)
        expected = sum(charges[:ended], Spending())
        if cut:
            expected += estimate + Spending(lost_usd=estimate.usd)
        assert Journal(folder).charged.amounts == pytest.approx(expected.amounts), place
        source = CountingSource(max_tokens=20)
        resumed = environment(source, folder=folder)
        for sample in range(4):
            ask(resumed, sample=sample)
        replies_before = ended - (ended > 1)
        assert source.calls == 4 - replies_before, place
        again = environment(CountingSource(), folder=folder).journal
        assert again.charged.calls == ended + cut + source.calls


def test_two_ranks_share_a_journal_folder_and_the_rest_of_its_budget(tmp_path: Path) -> None:
    """Each writes a file of its own and reads all when it starts, so both know what was paid."""
    limit = 8

    def start(rank: int) -> tuple[CountingSource, Environment]:
        source, journal = CountingSource(), Journal(tmp_path, rank=rank)
        budget = Budget(max_calls=limit, charged=journal.charged, ranks=2)
        return source, Environment([source], journal=journal, budget=budget, prices=[PRICE])

    for _ in range(3):  # each time both are killed when they have paid for one more call
        ranks = [start(rank) for rank in range(2)]
        for rank, (source, asked) in enumerate(ranks):
            for sample in range(99):
                ask(asked, sample=100 * rank + sample)
                if source.calls:
                    break
    assert Journal(tmp_path).charged == Spending(6, 60, 30, pytest.approx(6 * PRICE.of_call(10, 5).usd))
    source, asked = start(0)
    assert [ask(asked, sample=n) for n in (0, 1, 2, 100, 101, 102)]  # also those that the other rank paid for
    assert source.calls == 0 and asked.take_metrics()["env/reused"] == 6


def test_a_resumed_rank_gets_its_own_reply_and_not_that_of_another_rank(tmp_path: Path) -> None:
    """A bug: both ranks paid for a call, in two epochs; resumed, rank 1 got the reply of rank 0."""
    journals = [Journal(tmp_path, rank=rank) for rank in range(2)]
    for rank, journal in enumerate(journals):
        said = CountingSource(Reply(f"to rank {rank}"))
        assert ask(Environment([said], journal=journal)) == f"to rank {rank}"
    replies = [
        ask(Environment([CountingSource()], journal=Journal(tmp_path, rank=rank))) for rank in range(3)
    ]
    assert replies[:2] == ["to rank 0", "to rank 1"] and replies[2].startswith("to rank")


def test_lines_that_are_no_json_are_skipped(tmp_path: Path) -> None:
    ask(environment(CountingSource(), folder=tmp_path))
    path = tmp_path / "rank0.jsonl"
    path.write_text("\n".join(["[]", "7", "\xff", "[" * 100_000, '{"key": "torn', path.read_text()]))
    again = CountingSource()
    asked = environment(again, folder=tmp_path)
    assert ask(asked) == "reply 1" and again.calls == 0
    assert asked.journal.charged == PRICE.of_call(10, 5)


@pytest.mark.parametrize(
    "line",
    [
        '{"key": "k", "call": 1}',
        '{"key": "k", "call": 1, "charged": [1, 2, 3, 4, 5, 6]}',
        '{"key": "k", "call": 1, "charged": [1, 2, 3, 4, 5], "reply": {"content": "Paris"}}',
        '{"verdict": "ok"}',
    ],
)
def test_a_line_of_another_version_is_refused_with_its_number(line: str, tmp_path: Path) -> None:
    ask(environment(CountingSource(), folder=tmp_path))
    with (tmp_path / "rank0.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(UsageError, match=r"rank0.jsonl, line 3: no call of this version .*--out"):
        Journal(tmp_path)


STRANGE = [
    *({"call": call} for call in ("x", True, 1e999)),
    *({"key": key} for key in ([], {})),
    *({"charged": amounts} for amounts in ([1, 1, 1, -3.0, 0], [1e999] * 5, ["1"] * 5, None)),
    {"charged": [1, 10**400, 1, 1, 1]},
    *({"reply": reply} for reply in ([], "Paris", {"text": ["Paris"]})),
    *({"reply": {"text": "Paris", "tokens_in": tokens}} for tokens in (10**400, -1, 7.5, "7")),
]


@pytest.mark.parametrize("change", STRANGE, ids=lambda change: str(change)[:40])
def test_a_line_with_values_that_cannot_be_is_refused_with_its_number(change, tmp_path: Path) -> None:
    """Bugs: 10**400 tokens raised OverflowError, and -10**9 of them gave dollars to the budget."""
    ask(environment(CountingSource(), folder=tmp_path))
    path = tmp_path / "rank0.jsonl"
    line = json.loads(path.read_text().splitlines()[-1])
    with path.open("a") as file:
        file.write(json.dumps({**line, **change}) + "\n")
    with pytest.raises(UsageError, match=r"rank0.jsonl, line 3: .*--out"):
        Journal(tmp_path)


@pytest.mark.parametrize("room", [0, 1, 60, 200])
def test_a_disk_that_is_full_for_a_moment_loses_no_reply_before_or_after_it(room: int, tmp_path) -> None:
    """A bug: os.write cut a line and raised nothing, and the next paid reply was glued to the torn one."""
    asked = environment(CountingSource(), folder=tmp_path)
    path = tmp_path / "rank0.jsonl"
    ask(asked)
    # A write that needs more than `room` bytes is cut, and the next one raises.
    with file_size_limit(path.stat().st_size + room), pytest.raises(OSError):
        ask(asked, sample=1)
    for _ in range(2):  # The second time, it reads its reply from the file.
        assert ask(asked, sample=2) == f"reply {asked.clients[0].source.calls}"
    again = CountingSource()
    resumed = environment(again, folder=tmp_path)
    assert ask(resumed) == "reply 1" and ask(resumed, sample=2)
    assert again.calls == 0
    assert resumed.journal.charged.calls >= asked.clients[0].source.calls


@pytest.mark.parametrize("room", [0, 100, 1000, 2000, 3000])
def test_a_full_disk_hides_no_cost_and_loses_only_the_replies_of_running_requests(
    room: int, tmp_path: Path
) -> None:
    source, again = CountingSource(), CountingSource()
    asked = environment(source, folder=tmp_path, concurrency=8)
    with file_size_limit(room), pytest.raises(OSError):
        at_once(reply(asked, sample=sample) for sample in range(30))
    resumed = environment(again, folder=tmp_path)
    assert resumed.journal.charged.calls >= source.calls
    for sample in range(30):
        ask(resumed, sample=sample)
    assert source.calls + again.calls <= 30 + 8


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_request_that_cannot_be_written_to_the_journal_is_not_sent_and_costs_nothing(
    code: int, tmp_path, monkeypatch
) -> None:
    """A bug: it was counted as a lost request, and charged at its estimate."""

    def fail(file: int, content: bytes) -> int:
        raise OSError(code, os.strerror(code))

    source, budget = CountingSource(), Budget(max_calls=1)
    asked = environment(source, folder=tmp_path, budget=budget)
    with monkeypatch.context() as broken:
        broken.setattr(files.os, "write", fail)
        with pytest.raises(OSError, match=os.strerror(code)):
            ask(asked)
    metrics = asked.take_metrics()
    assert source.calls == 0 and budget.charged == Spending()
    assert (metrics["env/lost"], metrics["env/failed_requests"]) == (0, 0)
    assert ask(asked) == "reply 1", "nothing of the budget stays reserved"


def test_a_new_call_hides_no_cost_of_an_old_one_where_lines_are_lost(tmp_path: Path) -> None:
    asked = environment(CountingSource(), folder=tmp_path)
    for sample in range(3):
        ask(asked, sample=sample)
    path = tmp_path / "rank0.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[2:]))
    ask(environment(CountingSource(), folder=tmp_path), sample=3)
    assert Journal(tmp_path).charged.calls == 3


def test_a_game_costs_what_its_replies_cost_also_from_the_journal(tmp_path) -> None:
    """A resumed run plays games from the journal again, and must reward them the same.

    A bug: such replies cost what the --env-price of the new command says, not what was paid for them.
    """
    dialogues = [HELLO, [*HELLO, Message(role="assistant", content="There."), *HELLO]]
    costs = []
    for price in (PRICE, FREE):
        asked, bill = environment(CountingSource(), folder=tmp_path, price=price), Bill()
        for dialogue in dialogues:
            asyncio.run(asked.ask(dialogue, Caller("q"), bill))
        costs.append(bill.spent)
    assert costs == [PRICE.of_call(10, 5) * 2] * 2
    assert asked.take_metrics()["env/reused"] == 2
