"""The environments of a run behind one name: routing (paper, eqs 18-19), fall-back, and the alarm.

    session   one environment for each question, the same for all games of its group
    uniform   one for each game, all equally likely
    3,1,…     one for each game, with these weights

A game stays with its environment, unless that one is down: the next one then takes over. Draws follow from
question and game, so that a resumed run asks the same environments.
"""

import logging
import random
import time
from collections import deque
from collections.abc import Callable, Sequence

from prompt_r1.environments.budget import Budget
from prompt_r1.environments.metered import MeteredEnvironment, Reply
from prompt_r1.errors import EnvError, FatalEnvError, Resumable, UsageError
from prompt_r1.types import Message

logger = logging.getLogger(__name__)

DOWN_SECONDS = 60.0  # an environment that failed is asked last for so long
WATCHED = 200  # calls
WARN_ABOVE, STOP_ABOVE = 0.05, 0.20  # failed calls among the last WATCHED


class Pool:
    """One or several environments. Raises UsageError for a route that does not fit them."""

    def __init__(
        self,
        members: Sequence[MeteredEnvironment],
        *,
        budget: Budget,
        route: str = "session",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = ",".join(member.name for member in members)
        self.members = list(members)
        self.budget = budget
        self._route = route
        self._weights = _weights(route, len(members))
        self._clock = clock
        self._down_until = [0.0] * len(members)
        self._failed: deque[bool] = deque(maxlen=WATCHED)
        self._warned = False

    async def ask(self, messages: list[Message], *, sample: int = 0, session: str = "") -> str:
        """The text of `call`."""
        return (await self.call(messages, sample=sample, session=session)).text

    async def call(self, messages: list[Message], *, sample: int = 0, session: str = "") -> Reply:
        """The reply of the routed environment, or of the next that is not down. Raises EnvError;
        FatalEnvError when none can ever reply; Resumable when the budget is used up or too many calls fail.
        """
        failures: list[EnvError | FatalEnvError] = []
        for index in self._order(session, sample):
            try:
                reply = await self.members[index].call(messages, sample=sample, session=session)
            except (EnvError, FatalEnvError) as error:
                failures.append(error)
                self._take_down(index, error)
            else:
                self._watch(failed=False)
                return reply
        lasting = [failure for failure in failures if isinstance(failure, EnvError)]
        if not lasting:
            raise failures[0]
        self._watch(failed=True)
        raise lasting[0]

    async def check(self) -> None:
        """Raise UsageError or FatalEnvError for an environment that plainly cannot reply."""
        try:
            for member in self.members:
                await member.check()
        finally:
            await self.close()

    async def close(self) -> None:
        for member in self.members:
            await member.close()

    def take_metrics(self) -> dict[str, float]:
        """Counts since the last take: env/NAME of the whole, env/ENVIRONMENT/NAME of each of several."""
        taken = [(member.name, member.take_counts()) for member in self.members]
        summed = {
            f"env/{name}": sum(counts[name] for _, counts in taken)
            for name in ("paid", "reused", "tokens_in", "tokens_out")
        }
        if len(taken) > 1:
            for index, (member, counts) in enumerate(taken, start=1):
                summed |= {f"env/{index}:{member}/{name}": value for name, value in counts.items()}
        return summed

    def _order(self, session: str, sample: int) -> list[int]:
        """The routed environment first, the others after it, those that are down last."""
        rng = random.Random(session if self._route == "session" else f"{session}/{sample}")
        count = len(self.members)
        first = rng.choices(range(count), self._weights)[0]
        order = [(first + shift) % count for shift in range(count)]
        return sorted(order, key=lambda index: self._down_until[index] > self._clock())

    def _take_down(self, index: int, error: EnvError | FatalEnvError) -> None:
        if len(self.members) > 1 and self._down_until[index] <= self._clock():
            logger.warning("%s; going on with the next environment", error)
        lasting = float("inf") if isinstance(error, FatalEnvError) else self._clock() + DOWN_SECONDS
        self._down_until[index] = lasting

    def _watch(self, *, failed: bool) -> None:
        self._failed.append(failed)
        failures = sum(self._failed)
        if failures > STOP_ABOVE * WATCHED:
            raise Resumable(f"{failures} of the last {WATCHED} calls of {self.name} failed")
        if failures > WARN_ABOVE * WATCHED and not self._warned:
            logger.warning("%d of the last %d calls of %s failed", failures, WATCHED, self.name)
        self._warned = failures > WARN_ABOVE * WATCHED


def _weights(route: str, count: int) -> list[float]:
    if route in ("session", "uniform"):
        return [1.0] * count
    try:
        weights = [float(part) for part in route.split(",")]
    except ValueError:
        weights = []
    if len(weights) != count or min(weights) < 0 or not 0 < sum(weights) < float("inf"):
        raise UsageError(f"--route takes session, uniform or {count} weights (such as 3,1), not {route!r}")
    return weights
