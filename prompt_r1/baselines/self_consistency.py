"""`self-consistency` (Wang et al. 2023): sample several chains of thought and take the most frequent answer.

A fair comparison for an agent that asks several times: it makes as many calls per question as the trained
agent does on average. It needs an environment that samples; a deterministic one gives equal answers.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from statistics import mean

from prompt_r1.baselines.cot import ChainOfThought
from prompt_r1.baselines.games import AgentMethod
from prompt_r1.baselines.method import Ledger
from prompt_r1.errors import UsageError
from prompt_r1.evaluation.predictions import Prediction
from prompt_r1.metrics.text import f1, normalise
from prompt_r1.types import Question

MEASURED_GAMES = 64  # validation questions that the agent plays, to measure how many calls it makes


class SelfConsistency:
    """`samples` chains of thought per question; 0: as many as the average number of the agent's calls."""

    def __init__(self, chain: ChainOfThought, agent: AgentMethod, *, samples: int = 0) -> None:
        self.name = "self-consistency"
        self.ledger = Ledger()
        self.samples = samples
        self._chain = chain
        self._agent = agent

    async def prepare(self, train: Sequence[Question], validation: Sequence[Question]) -> None:
        """Count the agent's calls on validation questions, unless the number of samples was given."""
        if self.samples:
            return
        if not validation:
            raise UsageError(
                "self-consistency needs validation questions to count the agent's calls: give --val-data, "
                "or --samples K"
            )
        predictions = await asyncio.gather(
            *(
                self._agent.answer(question, sample=0, seed=f"validation/{question.id}")
                for question in validation[:MEASURED_GAMES]
            )
        )
        for prediction in predictions:
            self.ledger.add_prediction(prediction)
        self.samples = max(1, round(mean(prediction.calls for prediction in predictions)))

    async def answer(self, question: Question, *, sample: int, seed: str) -> Prediction:
        assert self.samples, "prepare was not awaited"
        numbers = range(sample * self.samples, (sample + 1) * self.samples)
        predictions = await asyncio.gather(
            *(self._chain.answer(question, sample=number, seed=seed) for number in numbers)
        )
        spent = Ledger()
        for prediction in predictions:
            spent.add_prediction(prediction)
        answered = [prediction for prediction in predictions if not prediction.error]
        if not answered:
            return spent.bill(predictions[0])
        answers = [prediction.answer or "" for prediction in answered]
        winner = answered[vote(answers, free_text=question.kind == "text")]
        return spent.bill(replace(winner, raw="\n\n".join(prediction.raw for prediction in answered)))


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
