"""`cot` and `cot-few-shot`: the environment is asked once, and reasons before it answers.

Zero-shot: "Let's think step by step." (Kojima et al. 2022); the answer comes in the same call, where the
original extracts it with a second one. Few-shot: the prompt starts with answered training questions, with
rationales that the environment itself wrote and that led to the correct answer, because published examples
exist for only one of the datasets.
"""

import asyncio
import logging
import random
from collections.abc import Sequence

from prompt_r1.baselines.direct import AnswerFormat, ask_once
from prompt_r1.baselines.method import Ledger
from prompt_r1.baselines.optimise import task_score
from prompt_r1.environments.pool import Pool
from prompt_r1.errors import Resumable, UsageError
from prompt_r1.evaluation.predictions import Prediction
from prompt_r1.types import Message, Question

logger = logging.getLogger(__name__)

STEP_BY_STEP = "Let's think step by step."
TRIES_PER_SHOT = 20  # training questions that are asked at most, for each example
CORRECT = 0.5  # minimum score of an example; a free text never scores 1


class ChainOfThought:
    """Asks the environment to think step by step, after `shots` examples."""

    def __init__(
        self, name: str, environment: Pool, answer_format: AnswerFormat, *, shots: int = 0, seed: int = 0
    ) -> None:
        self.name = name
        self.ledger = Ledger()
        self._environment = environment
        self._format = answer_format
        self._shots = shots
        self._seed = seed
        self._examples: list[Message] = []

    async def prepare(self, train: Sequence[Question], validation: Sequence[Question]) -> None:
        """Ask training questions until enough were answered correctly, as many at a time as are missing."""
        if self._shots and not train:
            raise UsageError(f"{self.name} needs training questions: give --train-data")
        remaining = random.Random(f"shots {self._seed}").sample(list(train), len(train))
        remaining = remaining[: self._shots * TRIES_PER_SHOT]
        correct: list[Prediction] = []
        while remaining and len(correct) < self._shots:
            missing = self._shots - len(correct)
            asked, remaining = remaining[:missing], remaining[missing:]
            for prediction in await asyncio.gather(*(self._ask(question, 0) for question in asked)):
                self.ledger.add_prediction(prediction)
                if prediction.error:
                    raise Resumable(
                        f"the environment failed while {self.name} was prepared: {prediction.error}"
                    )
                if task_score(prediction) >= CORRECT:
                    correct.append(prediction)
        if len(correct) < self._shots:
            logger.warning(
                "%s has %d of %d examples: no more training questions were answered correctly",
                self.name,
                len(correct),
                self._shots,
            )
        self._examples = []
        for prediction in correct:
            self._examples.append(self._user_message(prediction.question))
            self._examples.append({"role": "assistant", "content": prediction.raw})

    async def answer(self, question: Question, *, sample: int, seed: str) -> Prediction:
        return await self._ask(question, sample)

    async def _ask(self, question: Question, sample: int) -> Prediction:
        messages = [*self._examples, self._user_message(question)]
        return await ask_once(self._environment, messages, self._format, question, sample)

    def _user_message(self, question: Question) -> Message:
        return self._format.user_message(question.text, hint=STEP_BY_STEP)
