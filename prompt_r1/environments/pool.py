"""One or several environments behind one interface: routing (paper, eqs 18-19), fallback, and the alarm.

    session   draw an environment for each question; all games of the question use it
    uniform   draw one for each game, all with the same probability
    3,1,…     draw one for each game, with these weights
    agent     ask the one that the agent names in its prompt, or the first one (options/routes.py)

A game keeps its environment unless that one is down, and then the next one is used. The draw depends only on
the question and the number of the game, so a resumed run uses the same environments.
"""

import logging
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from prompt_r1.environments.budget import Budget
from prompt_r1.environments.deadline import TimedGame
from prompt_r1.environments.journal import Journal
from prompt_r1.environments.metered import MeteredEnvironment, Reply
from prompt_r1.errors import EnvError, FatalEnvError, Resumable, UsageError
from prompt_r1.options.routes import AGENT_ROUTE, address
from prompt_r1.types import Ask, Message

logger = logging.getLogger(__name__)

DOWN_SECONDS = 60.0  # how long an environment that failed is tried last
WATCHED = 200  # most recent calls
WARN_ABOVE, STOP_ABOVE = 0.05, 0.20  # shares of failed calls among the last WATCHED


class GameCalls:
    """The calls of one game: its `Ask`, and what its replies have cost so far."""

    def __init__(self, call: Callable[[list[Message]], Awaitable[Reply]]) -> None:
        self.usd = 0.0
        self.ask: Ask = self.pay
        self._call = call

    async def __call__(self, messages: list[Message]) -> str:
        return await self.ask(messages)

    async def pay(self, messages: list[Message]) -> str:
        """The text of a reply, whose cost is added."""
        reply = await self._call(messages)
        self.usd += reply.usd
        return reply.text


class Pool:
    """One or several environments. Raises UsageError for a route that does not match their number.

    `journal` records which games were late; `names` are those that an agent writes to choose an environment.
    """

    def __init__(
        self,
        members: Sequence[MeteredEnvironment],
        *,
        budget: Budget,
        route: str = "session",
        journal: Journal | None = None,
        names: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = ",".join(member.name for member in members)
        self.members = list(members)
        self.budget = budget
        self.stops_on_failures = True  # raise Resumable when too many calls fail
        self._route = route
        self._names = tuple(names)
        self._unaddressed = 0  # prompts without the name of an environment, since `take_metrics`
        self._weights = parse_weights(route, len(members))
        self._clock = clock
        self._down_until = [0.0] * len(members)
        self._failed: deque[bool] = deque(maxlen=WATCHED)
        self._warned = False
        self._journal = journal or Journal(None)
        self._late_games = 0  # since `take_metrics`
        self._warned_of_late = False

    def ask_in_game(self, seed: str, *, sample: int, session: str, deadline: float) -> GameCalls:
        """`ask` for one game, with the seed of that game; it counts what its replies cost.

        It raises EnvError once the game has waited `deadline` seconds in all for its replies (0: no limit).
        """
        calls = GameCalls(partial(self.call, sample=sample, session=session))
        if deadline:
            game = TimedGame(
                calls.pay,
                self._journal,
                seconds=deadline,
                seed=seed,
                sample=sample,
                session=session,
                report_late=self._record_late_game,
            )
            calls.ask = game.ask
        return calls

    async def ask(self, messages: list[Message], *, sample: int = 0, session: str = "") -> str:
        """The text of the reply of `call`."""
        return (await self.call(messages, sample=sample, session=session)).text

    async def call(self, messages: list[Message], *, sample: int = 0, session: str = "") -> Reply:
        """Return the reply of the routed environment, or of the next one if that fails.

        Raises EnvError when all fail, FatalEnvError when none can ever reply, and Resumable when the budget
        is used up or too many calls fail.
        """
        named = None
        if self._route == AGENT_ROUTE:
            addressed = address(messages, self._names)
            messages, named = addressed.messages, addressed.environment
            self._unaddressed += named is None
        failures: list[EnvError | FatalEnvError] = []
        for index in self._order(session, sample, named):
            try:
                reply = await self.members[index].call(messages, sample=sample, session=session)
            except (EnvError, FatalEnvError) as error:
                failures.append(error)
                self._mark_down(index, error)
            else:
                self._record_result(failed=False)
                return reply
        for failure in failures:
            if isinstance(failure, EnvError):
                self._record_result(failed=True)
                raise failure
        raise failures[0]  # all are fatal

    async def check(self) -> None:
        """Raise UsageError or FatalEnvError if no call of one of the environments can succeed."""
        try:
            for member in self.members:
                await member.check()
        finally:
            await self.close()

    async def close(self) -> None:
        for member in self.members:
            await member.close()

    def most_usd(self, messages: list[Message]) -> float:
        """The estimate from above of what a call with these messages costs, in dollars."""
        return max(member.most_usd(messages) for member in self.members)

    def take_metrics(self) -> dict[str, float]:
        """Counts since the last call of this method.

        The sums are env/NAME; with several environments, the counts of each are env/NUMBER:ENVIRONMENT/NAME.
        """
        counts_of_each = [member.take_counts() for member in self.members]
        metrics = {
            f"env/{name}": sum(counts[name] for counts in counts_of_each)
            for name in ("paid", "lost", "reused", "tokens_in", "tokens_out")
        }
        metrics["env/late_games"], self._late_games = float(self._late_games), 0
        if self._route == AGENT_ROUTE:
            metrics["env/unaddressed"], self._unaddressed = float(self._unaddressed), 0
        if len(self.members) == 1:
            return metrics
        for number, (member, counts) in enumerate(zip(self.members, counts_of_each, strict=True), start=1):
            for name, value in counts.items():
                metrics[f"env/{number}:{member.name}/{name}"] = value
        return metrics

    def _order(self, session: str, sample: int, named: int | None) -> list[int]:
        """Indices of the environments: the named or routed one, then the others; those that are down last."""
        rng = random.Random(session if self._route == "session" else f"{session}/{sample}")
        count = len(self.members)
        first = rng.choices(range(count), self._weights)[0] if named is None else named
        order = [(first + shift) % count for shift in range(count)]
        now = self._clock()
        return sorted(order, key=lambda index: self._down_until[index] > now)

    def _mark_down(self, index: int, error: EnvError | FatalEnvError) -> None:
        now = self._clock()
        if len(self.members) > 1 and self._down_until[index] <= now:
            logger.warning("%s; using the next environment", error)
        self._down_until[index] = float("inf") if isinstance(error, FatalEnvError) else now + DOWN_SECONDS

    def _record_late_game(self, repeated: bool) -> None:
        """Count a late game. Unless it is `repeated` from the journal, its call has failed now."""
        self._late_games += 1
        if not self._warned_of_late:
            logger.warning(
                "a game waited for %s past --game-deadline and left its group (counted in env/late_games)",
                self.name,
            )
        self._warned_of_late = True
        if not repeated:
            self._record_result(failed=True)

    def _record_result(self, *, failed: bool) -> None:
        """Record whether a call failed. Warns of, or raises Resumable for, too many failures."""
        self._failed.append(failed)
        failures = sum(self._failed)
        if failures > STOP_ABOVE * WATCHED and self.stops_on_failures:
            raise Resumable(f"{failures} of the last {WATCHED} calls of {self.name} failed")
        if failures > WARN_ABOVE * WATCHED and not self._warned:
            logger.warning("%d of the last %d calls of %s failed", failures, WATCHED, self.name)
        self._warned = failures > WARN_ABOVE * WATCHED


def parse_weights(route: str, count: int) -> list[float]:
    """The weights of the environments in a route. Raises UsageError."""
    if route == AGENT_ROUTE:
        return [1.0] + [0.0] * (count - 1)  # of a prompt that names no environment
    if route in ("session", "uniform"):
        return [1.0] * count
    try:
        weights = [float(part) for part in route.split(",")]
    except ValueError:
        weights = []
    if len(weights) != count or min(weights) < 0 or not 0 < sum(weights) < float("inf"):
        raise UsageError(
            f"--route takes session, uniform, agent or {count} weights (such as 3,1), not {route!r}"
        )
    return weights
