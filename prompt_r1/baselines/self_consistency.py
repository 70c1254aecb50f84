"""`self-consistency` (Wang et al. 2023): several chains of thought, and the answer that most of them reach.

The fair rival of an agent that asks several times: as many calls a question as the trained agent makes on
average. It needs an environment that samples; one that always says the same agrees with itself.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from statistics import mean

from prompt_r1.baselines.cot import ChainOfThought
from prompt_r1.baselines.games import Game
from prompt_r1.baselines.method import Attempt, Ledger
from prompt_r1.errors import UsageError
from prompt_r1.metrics.text import f1, normalise
from prompt_r1.types import Question

MEASURED = 64  # validation questions that the agent plays to find out how often it asks


class SelfConsistency:
    """`samples` chains of thought a question; 0: as many as `agent` makes calls, rounded."""

    def __init__(self, chain: ChainOfThought, agent: Game, *, samples: int = 0) -> None:
        self.name = "self-consistency"
        self.ledger = Ledger()
        self.samples = samples
        self._chain = chain
        self._agent = agent

    async def prepare(self, train: Sequence[Question], validation: Sequence[Question]) -> None:
        """Let the agent play, unless the number of samples was given."""
        if self.samples:
            return
        if not validation:
            raise UsageError("self-consistency asks as often as the agent does, which needs validation "
                             "questions to find out: give --val-data, or --samples K")  # fmt: skip
        played = [
            self._agent.answer(question, sample=0, seed=f"validation/{question.id}")
            for question in validation[:MEASURED]
        ]
        attempts = await asyncio.gather(*played)
        for attempt in attempts:
            self.ledger.add_attempt(attempt)
        self.samples = max(1, round(mean(attempt.calls for attempt in attempts)))

    async def answer(self, question: Question, *, sample: int, seed: str) -> Attempt:
        assert self.samples, "prepare was not awaited"
        chains = [
            self._chain.answer(question, sample=sample * self.samples + number, seed=seed)
            for number in range(self.samples)
        ]
        attempts = await asyncio.gather(*chains)
        alive = [attempt for attempt in attempts if attempt.error is None]
        spent = Ledger()
        for attempt in attempts:
            spent.add_attempt(attempt)
        chosen = attempts[0]
        if alive:
            answers = [attempt.answer or "" for attempt in alive]
            winner = alive[vote(answers, free_text=question.kind == "text")]
            chosen = replace(winner, raw="\n\n".join(attempt.raw for attempt in alive))
        return replace(chosen, calls=spent.task_calls, tokens_in=spent.tokens_in,
                       tokens_out=spent.tokens_out, usd=spent.usd)  # fmt: skip


def vote(answers: Sequence[str], *, free_text: bool) -> int:
    """Which answer wins: the most frequent after normalisation; of free texts, which are never the same, the
    one that is most like the others (mean F1). The first of equals.
    """
    if free_text:
        support = [sum(f1(answer, [other]) for other in answers) for answer in answers]
    else:
        counts = Counter(map(normalise, answers))
        support = [float(counts[normalise(answer)]) for answer in answers]
    return support.index(max(support))
