"""A deadline for training games: late games leave their groups, and a resumed run repeats the decision."""

import asyncio
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

import train
from prompt_r1.config.train import TrainConfig
from prompt_r1.endpoint.responses import Outcome
from prompt_r1.environments.journal import Journal
from prompt_r1.environments.pool import GameCalls, Pool
from prompt_r1.errors import EnvError, Resumable
from prompt_r1.spending import Spending
from prompt_r1.storage.run_log import read_metrics
from prompt_r1.training.console import summary
from prompt_r1.types import Message
from tests.support.counting import HELLO, CountingSource, pool
from tests.support.fault_harness import games_of, metrics_of, saved_tensors
from tests.support.providers import OK, chat

LATER: list[Message] = [*HELLO, {"role": "assistant", "content": "There."}, *HELLO]
DEADLINE = 600.0  # seconds; no test waits that long


class TimedSource(CountingSource):
    """Replies after set times, in seconds, the last one repeatedly. The clock of the loop moves, not time."""

    name = "timed"

    def __init__(self, *times: float) -> None:
        super().__init__()
        self.times = list(times)

    async def call(self, messages: list[Message], *, sample: int = 0, session: str = "") -> Outcome:
        advance_clock(self.times.pop(0) if len(self.times) > 1 else self.times[0])
        return await super().call(messages)  # it waits: timers that are due run


def advance_clock(seconds: float) -> None:
    """Move the clock of the running loop, and with it all timers."""
    loop = asyncio.get_running_loop()
    time = loop.time
    loop.time = lambda: time() + seconds


def play(environment: Pool, *calls: list[Message], seed: str = "0/1/0/0", sample: int = 0) -> list[str]:
    """The replies of the calls of one game, up to the first failure, whose message is the last."""

    async def game() -> list[str]:
        ask = GameCalls(environment, seed, sample, "q1", deadline=DEADLINE)
        texts = []
        try:
            for messages in calls:
                texts.append(await ask(messages))
        except EnvError as error:
            texts.append(str(error))
        return texts

    return asyncio.run(game())


LATE = "the game was late: it waited 600 s for the environment (--game-deadline)"


def test_the_deadline_holds_for_all_calls_of_a_game_together() -> None:
    assert play(pool(TimedSource(250, 250, 250)), HELLO, LATER) == ["reply 1", "reply 2"]
    assert play(pool(TimedSource(250, 250, 250)), HELLO, LATER, HELLO) == ["reply 1", "reply 2", LATE]
    two_games = pool(TimedSource(400))
    assert play(two_games, HELLO) == ["reply 1"] and play(two_games, LATER) == ["reply 2"]


def test_without_a_deadline_a_game_waits() -> None:
    async def game() -> str:
        ask = GameCalls(pool(TimedSource(1e6)), "0", 0, "q1")
        return await ask(HELLO)

    assert asyncio.run(game()) == "reply 1"


def test_the_running_call_of_a_late_game_is_a_lost_attempt_and_paid_calls_stay_counted(tmp_path) -> None:
    environment = pool(TimedSource(1, 1000), folder=tmp_path)
    assert play(environment, HELLO, LATER) == ["reply 1", LATE]
    spent = environment.budget.spent
    assert (spent.calls, spent.lost_calls) == (1, 1)
    assert spent.usd == pytest.approx(60e-6) and spent.lost_usd == environment.most_usd(LATER)
    metrics = environment.take_metrics()
    assert [metrics[f"env/{name}"] for name in ("paid", "lost", "late_games")] == [1, 1, 1]
    assert environment.take_metrics()["env/late_games"] == 0
    assert Journal(tmp_path).spent == spent


def test_a_late_game_does_not_try_the_next_environment() -> None:
    other = TimedSource(0)
    environment = pool(TimedSource(1000), other, route="1,0")
    assert play(environment, HELLO) == [LATE] and other.calls == 0


def test_a_resumed_run_repeats_the_decision_and_other_games_ask_again(tmp_path) -> None:
    """The next epoch makes the same call in another game, which may have its reply."""
    assert play(pool(TimedSource(1, 1000), folder=tmp_path), HELLO, LATER) == ["reply 1", LATE]
    quick = TimedSource(0)
    resumed = pool(quick, folder=tmp_path)
    assert play(resumed, HELLO, LATER) == ["reply 1", LATE] and quick.calls == 0
    assert resumed.take_metrics()["env/late_games"] == 1
    assert play(resumed, HELLO, LATER, seed="0/9/0/0") == ["reply 1", "reply 1"] and quick.calls == 1
    assert play(pool(quick, folder=tmp_path, mode="replay"), HELLO, LATER) == ["reply 1", LATE]


def test_late_calls_stop_a_run_as_failed_calls_do_but_repeated_decisions_do_not(tmp_path, caplog) -> None:
    environment = pool(TimedSource(1000), folder=tmp_path)
    assert [play(environment, HELLO, sample=number) for number in range(40)] == [[LATE]] * 40
    with pytest.raises(Resumable, match="41 of the last 200 calls of timed failed"):
        play(environment, HELLO, sample=40)
    assert caplog.text.count("past --game-deadline") == 1
    resumed = pool(TimedSource(0), folder=tmp_path)
    assert [play(resumed, HELLO, sample=number) for number in range(41)] == [[LATE]] * 41


@pytest.mark.parametrize(("lost_before", "lost"), [(0, 1), (2, 3)])
def test_the_lost_attempts_of_an_endpoint_are_counted_and_waiting_for_a_slot_is_none(
    lost_before: int, lost: int
) -> None:
    """One call is sent, and the other one waits for the only slot, until both are late."""
    requests = 0

    async def respond(request: httpx.Request) -> httpx.Response:
        nonlocal requests
        requests += 1
        await request.extensions["trace"]("http11.send_request_body.complete", {})
        if requests <= lost_before:
            return httpx.Response(200, content=b"cut off")
        advance_clock(1000)
        await asyncio.Event().wait()
        return OK

    environment = pool(chat(respond, concurrency=1))

    async def two_games() -> list[str | BaseException]:
        asks = [GameCalls(environment, f"{n}", n, "q1", deadline=DEADLINE) for n in range(2)]
        return await asyncio.gather(*(ask(HELLO) for ask in asks), return_exceptions=True)

    assert [str(error) for error in asyncio.run(two_games())] == [LATE, LATE]
    assert requests == lost_before + 1
    metrics, spent = environment.take_metrics(), environment.budget.spent
    assert (metrics["env/lost"], metrics["env/late_games"]) == (lost, 2)
    assert spent == Spending(0, 0, 0, 0.0, lost, spent.lost_tokens, spent.lost_usd) and spent.lost_usd > 0


# --- In training ---

LIMIT = "2"  # seconds; the replies that are not stuck take milliseconds


class StuckEnvironment:
    """Replies at once; while `stuck`, every second call gets no reply."""

    def __init__(self) -> None:
        self.stuck, self.calls = False, 0

    async def ask(self, messages: list[Message]) -> str:
        self.calls += 1
        if self.stuck and self.calls % 2:
            await asyncio.Event().wait()
        return "It was Anna."


class HourlyEnvironment:
    """Each reply takes an hour by the clock of the loop."""

    async def ask(self, messages: list[Message]) -> str:
        advance_clock(3600)
        for _ in range(5):
            await asyncio.sleep(0)  # timers that are due run
        return "It was Anna."


def no_change(environment: StuckEnvironment) -> None:
    """Let the environment reply as before."""


@pytest.fixture
def run_train(
    asking_agent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., StuckEnvironment]:
    """Runs train.py for two steps in a folder. `after_games` is called at the update of each step."""
    rows = [{"question": f"Who is number {number}?", "answer": "Anna"} for number in range(6)]
    (tmp_path / "own.jsonl").write_text("\n".join(map(json.dumps, rows)))
    learn = train.learn
    line = f"""
        --agent {asking_agent} --data {tmp_path / "own.jsonl"} --test-data none --config mini
        --env py:late_replies:ENVIRONMENT --steps 2 --questions 3 --group-size 8 --mini-batch 12 --lr 1e-3
        --max-turns 3 --max-new 60 --max-tokens 900 --save-every 1 --device cpu --kv-tokens 20000
    """

    def run(
        out: Path,
        *,
        after_games: Callable[[StuckEnvironment], None] = no_change,
        deadline: str = LIMIT,
        environment: object | None = None,
        validation: str = "none",
    ) -> None:
        environment = environment or StuckEnvironment()
        monkeypatch.setitem(sys.modules, "late_replies", SimpleNamespace(ENVIRONMENT=environment))

        def watched_learn(*arguments, **options):
            after_games(environment)
            return learn(*arguments, **options)

        monkeypatch.setattr(train, "learn", watched_learn)
        flags = ["--out", str(out), "--game-deadline", deadline, "--val-data", validation]
        train.main([*line.split(), *flags])

    return run


def test_late_games_leave_their_groups_and_a_killed_run_repeats_the_decision(run_train, tmp_path) -> None:
    """Calls get stuck in step 2. A copy of the run folder from before its update is a run that was killed."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    steps = 0

    def copy_in_step_2(environment: StuckEnvironment) -> None:
        nonlocal steps
        steps += 1
        environment.stuck = True
        if steps == 2:
            shutil.copytree(whole, killed)

    run_train(whole, after_games=copy_in_step_2)
    _, first, second = read_metrics(whole)
    rows = (whole / "trajectories/step-000002-rank0.jsonl").read_text().splitlines()
    games = [json.loads(row) for row in rows]
    late = [game for game in games if "--game-deadline" in game["error"]]
    assert len(late) == second["env/late_games"] == second["env/errors"] == second["env/lost"] > 0
    assert first["env/late_games"] == first["env/errors"] == 0
    assert all(game["advantage"] is None and game["stop"] == "env_error" for game in late)
    assert any(game["advantage"] for game in games) and second["groups/dropped"] == 0
    assert f"{len(late)} games left their groups" in summary(whole, 2, TrainConfig(env="mini"))

    run_train(killed)  # nothing is stuck now
    assert saved_tensors(killed) == saved_tensors(whole) and games_of(killed) == games_of(whole)
    assert metrics_of(killed)[2]["env/late_games"] == len(late)


def test_games_of_a_validation_have_no_deadline(run_train, tmp_path) -> None:
    """Late games would leave the means, so EM would rise while the environment is slow."""
    asked = ["cfddea", "b?a c afcadadcd"]  # of these the agent's greedy games ask
    file = tmp_path / "validation.jsonl"
    file.write_text("\n".join(json.dumps({"question": text, "answer": "Anna"}) for text in asked))
    environment = HourlyEnvironment()
    run_train(tmp_path / "run", deadline="600", environment=environment, validation=str(file))
    first, *_, last = read_metrics(tmp_path / "run")
    assert first["val/calls"] > 0 and (first["val/n"], first["val/errors"]) == (2, 0)
    assert last["env/late_games"] == last["env/errors"] > 0


@pytest.mark.slow
def test_a_deadline_that_no_game_misses_changes_nothing(run_train, tmp_path) -> None:
    for name, deadline in (("with", "3600"), ("without", "0")):
        run_train(tmp_path / name, deadline=deadline)
    assert saved_tensors(tmp_path / "with") == saved_tensors(tmp_path / "without")
    assert metrics_of(tmp_path / "with") == metrics_of(tmp_path / "without")
