"""`self-consistency` (Wang et al. 2023): the most frequent of several answers.

A fair comparison for an agent that asks several times: it makes as many calls per question as the trained
agent does on average. It needs an environment that samples; a deterministic one gives equal answers.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean

from prompt_r1.baselines.games import AgentMethod
from prompt_r1.baselines.method import Method
from prompt_r1.errors import UsageError
from prompt_r1.evaluation.predictions import Prediction
from prompt_r1.metrics.em_f1 import f1, normalise
from prompt_r1.spending import Spending
from prompt_r1.types import Question

MEASURED_GAMES = 64  # validation questions that the agent plays, to measure how many calls it makes


@dataclass
class SelfConsistency(Method):
    """`samples` answers of `chain` per question; 0: as many as the average number of the agent's calls."""

    chain: Method
    agent: AgentMethod
    samples: int = 0

    async def prepare(self, train: Sequence[Question], validation: Sequence[Question]) -> None:
        """Count the agent's calls on validation questions, unless the number of samples was given."""
        if self.samples:
            return
        if not validation:
            raise UsageError(
                "self-consistency needs validation questions to count the agent's calls: give --val-data, "
                "or --samples K"
            )
        measured = validation[:MEASURED_GAMES]
        games = [self.agent.answer(one, sample=0, seed=f"validation/{one.id}") for one in measured]
        predictions = await asyncio.gather(*games)
        self.ledger.task = sum((prediction.spent for prediction in predictions), Spending())
        self.samples = max(1, round(mean(prediction.spent.calls for prediction in predictions)))

    async def answer(self, question: Question, *, sample: int, seed: str) -> Prediction:
        assert self.samples, "prepare was not awaited"
        numbers = range(sample * self.samples, (sample + 1) * self.samples)
        chains = [self.chain.answer(question, sample=n, seed=f"{seed}/{n}") for n in numbers]
        predictions = await asyncio.gather(*chains)
        spent = sum((prediction.spent for prediction in predictions), Spending())
        answered = [prediction for prediction in predictions if not prediction.error]
        if not answered:
            return replace(predictions[0], spent=spent)
        answers = [prediction.answer or "" for prediction in answered]
        winner = answered[vote(answers, free_text=question.kind == "text")]
        raw = "\n\n".join(prediction.raw for prediction in answered)
        return replace(winner, raw=raw, spent=spent)


def vote(answers: Sequence[str], *, free_text: bool) -> int:
    """The index of the winning answer; the first of equals.

    The most frequent answer after normalisation wins. Free texts are never equal: of them the one that is
    most similar to the others wins (mean F1).
    """
    if free_text:
        support = [sum(f1(answer, [other]) for other in answers) for answer in answers]
    else:
        counts = Counter(map(normalise, answers))
        support = [float(counts[normalise(answer)]) for answer in answers]
    return support.index(max(support))
