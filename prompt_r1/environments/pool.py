"""Several environments behind one interface: routing (eqs 18-19), fallback, alarm.

    session   draw an environment for each question; all games of the question use it
    uniform   draw one for each game, all with the same probability
    3,1,…     draw one for each game, with these weights

A game keeps its environment unless that one is down, and then the next one is used. The draw depends only on
the question and the number of the game, so a resumed run uses the same environments.
"""

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from prompt_r1.endpoint.responses import Outcome
from prompt_r1.environments.budget import Budget
from prompt_r1.environments.journal import Call, Journal
from prompt_r1.environments.metered import MeteredEnvironment, Reply
from prompt_r1.errors import EnvError, FatalEnvError, Resumable, UsageError
from prompt_r1.spending import Spending
from prompt_r1.types import Message

logger = logging.getLogger(__name__)

DOWN_SECONDS = 60.0  # how long an environment that failed is tried last
WATCHED = 200  # most recent calls
LATE = "late"  # the label of a late game in the journal
WARN_ABOVE, STOP_ABOVE = 0.05, 0.20  # shares of failed calls among the last WATCHED


class Pool:
    """One or several environments. Raises UsageError for a route that does not match their number.

    `journal` records which games were late. With `stops_on_failures`, too many failed calls raise Resumable.
    """

    def __init__(
        self,
        members: Sequence[MeteredEnvironment],
        *,
        budget: Budget,
        route: str = "session",
        journal: Journal | None = None,
        stops_on_failures: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = ",".join(member.name for member in members)
        self.members = list(members)
        self.budget = budget
        self.journal = journal or Journal(None)
        self._stops_on_failures = stops_on_failures
        self._route = route
        self._weights = parse_weights(route, len(members))
        self._clock = clock
        self._down_until = [0.0] * len(members)
        self._failed: deque[bool] = deque(maxlen=WATCHED)
        self._warned = False
        self._late_games = 0  # since `take_metrics`
        self._warned_of_late = False

    async def ask(self, messages: list[Message], *, sample: int = 0, session: str = "") -> str:
        """The text of the reply of `call`."""
        return (await self.call(messages, sample=sample, session=session)).text

    async def call(
        self, messages: list[Message], *, sample: int = 0, session: str = "", epoch: int = 0
    ) -> Reply:
        """Return the reply of the routed environment, or of the next one if that fails.

        Raises EnvError when all fail, FatalEnvError when none can ever reply, and Resumable when the budget
        is used up or too many calls fail.
        """
        failures: list[EnvError | FatalEnvError] = []
        for index in self._order(session, sample):
            try:
                member = self.members[index]
                reply = await member.call(messages, sample=sample, session=session, epoch=epoch)
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
        """Raise UsageError or FatalEnvError if one of the environments can never reply."""
        for member in self.members:
            await member.check()

    def most_usd(self, messages: list[Message]) -> float:
        """The estimate from above of what a call with these messages costs, in dollars."""
        return max(member.estimate(messages).usd for member in self.members)

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
        if len(self.members) == 1:
            return metrics
        for number, (member, counts) in enumerate(zip(self.members, counts_of_each, strict=True), start=1):
            for name, value in counts.items():
                metrics[f"env/{number}:{member.name}/{name}"] = value
        return metrics

    def _order(self, session: str, sample: int) -> list[int]:
        """Indices of the environments: the routed one, then the others; those that are down last."""
        rng = random.Random(session if self._route == "session" else f"{session}/{sample}")
        count = len(self.members)
        first = rng.choices(range(count), self._weights)[0]
        order = [(first + shift) % count for shift in range(count)]
        now = self._clock()
        return sorted(order, key=lambda index: self._down_until[index] > now)

    def _mark_down(self, index: int, error: EnvError | FatalEnvError) -> None:
        now = self._clock()
        if len(self.members) > 1 and self._down_until[index] <= now:
            logger.warning("%s; using the next environment", error)
        self._down_until[index] = float("inf") if isinstance(error, FatalEnvError) else now + DOWN_SECONDS

    def record_late_game(self, *, repeated: bool) -> None:
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
        if failures > STOP_ABOVE * WATCHED and self._stops_on_failures:
            raise Resumable(f"{failures} of the last {WATCHED} calls of {self.name} failed")
        if failures > WARN_ABOVE * WATCHED and not self._warned:
            logger.warning("%d of the last %d calls of %s failed", failures, WATCHED, self.name)
        self._warned = failures > WARN_ABOVE * WATCHED


@dataclass
class GameCalls:
    """The calls of one game: its `Ask`.

    A game that waits longer than `deadline` seconds in all for its replies (0: no limit) is late, and leaves
    its group. Time in a queue counts: for a free slot, a rate limit, the budget, or an equal call of another
    game.

    Whether a game is late depends on the clock, and a resumed run must repeat what was decided, or it would
    train on other games. So the decision is written to the journal, under the seed of the game and its
    messages. The key of the call would not do: a later epoch makes the same call again.
    """

    pool: Pool
    seed: str
    sample: int
    session: str
    epoch: int = 0
    deadline: float = 0.0
    spent: Spending = field(default_factory=Spending)  # so far
    waited: float = 0.0  # seconds in all, for replies

    async def __call__(self, messages: list[Message]) -> str:
        """Return the reply. Raises EnvError if the game is late; otherwise what `Pool.call` raises."""
        decision = Call(LATE, messages, {"game": self.seed}, self.sample, self.session)
        recorded = self.pool.journal.find(decision) if self.deadline else None
        if recorded is not None:
            self.pool.record_late_game(repeated=True)
            raise EnvError(recorded.reason)
        loop = asyncio.get_running_loop()
        begin = loop.time()
        try:
            async with asyncio.timeout(self.deadline - self.waited if self.deadline else None) as limit:
                reply = await self.pool.call(
                    messages, sample=self.sample, session=self.session, epoch=self.epoch
                )
        except TimeoutError:
            if not limit.expired():
                raise
            reason = f"the game was late: it waited {self.deadline:g} s for the environment (--game-deadline)"
            outcome = Outcome("outcome", label=LATE, reason=reason)
            self.pool.journal.write(decision, outcome, spent=Spending(), latency=loop.time() - begin)
            self.pool.record_late_game(repeated=False)
            raise EnvError(reason) from None
        except EnvError:
            self.spent += Spending(calls=1)
            raise
        self.waited += loop.time() - begin
        self.spent += reply.spent
        return reply.text


def parse_weights(route: str, count: int) -> list[float]:
    """The weights of the environments in a route. Raises UsageError."""
    if route in ("session", "uniform"):
        return [1.0] * count
    try:
        weights = [float(part) for part in route.split(",")]
    except ValueError:
        weights = []
    if len(weights) != count or min(weights) < 0 or not 0 < sum(weights) < float("inf"):
        raise UsageError(f"--route takes session, uniform or {count} weights (such as 3,1), not {route!r}")
    return weights
