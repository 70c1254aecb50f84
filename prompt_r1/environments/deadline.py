"""A deadline for training games: a game that waits too long for its replies leaves its group.

Whether a game is late depends on the clock, and a resumed run must repeat what was decided, or it would train
on other games. So the decision is written to the journal, under the seed of the game and its messages. The
key of the call would not do: a later epoch makes the same call again.
"""

import asyncio
from collections.abc import Callable

from prompt_r1.endpoint.responses import Outcome
from prompt_r1.environments.budget import Spending
from prompt_r1.environments.journal import Call, Journal
from prompt_r1.errors import EnvError
from prompt_r1.types import Ask, Message

LATE = "late"  # the label of the decision in the journal


class TimedGame:
    """The calls of one game, which may wait `seconds` for the environment altogether.

    Time in a queue counts: for a free slot, a rate limit, the budget, or an equal call of another game.
    `report_late` is called when the game is late, and told whether that was only repeated from the journal.
    """

    def __init__(
        self,
        ask: Ask,
        journal: Journal,
        *,
        seconds: float,
        seed: str,
        sample: int,
        session: str,
        report_late: Callable[[bool], None],
    ) -> None:
        self._ask = ask
        self._journal = journal
        self._seconds = self._left = seconds
        self._seed = seed
        self._sample = sample
        self._session = session
        self._report_late = report_late

    async def ask(self, messages: list[Message]) -> str:
        """Return the reply. Raises EnvError if the game is late; otherwise what the call raises."""
        decision = Call(LATE, messages, {"game": self._seed}, self._sample, self._session)
        recorded = self._journal.find(decision)
        if recorded is not None:
            self._report_late(True)
            raise EnvError(recorded.reason)
        loop = asyncio.get_running_loop()
        begin = loop.time()
        try:
            async with asyncio.timeout(self._left) as limit:
                reply = await self._ask(messages)
        except TimeoutError:
            if not limit.expired():
                raise
            reason = f"the game was late: it waited {self._seconds:g} s for the environment (--game-deadline)"
            outcome = Outcome("outcome", label=LATE, reason=reason)
            self._journal.write(decision, outcome, spent=Spending(), latency=loop.time() - begin)
            self._report_late(False)
            raise EnvError(reason) from None
        self._left -= loop.time() - begin
        return reply
