"""`cot` and `cot-few-shot`: the environment is asked once, and thinks before it answers.

Zero-shot: "Let's think step by step." (Kojima et al. 2022), with the answer in the same call, where the
original asks a second time for it. Few-shot: dialogues of training questions come first, whose rationale the
environment itself wrote once and which is kept only where it was right; there are published examples for one
of the datasets only.
"""

import asyncio
import logging
import random
from collections.abc import Sequence

from prompt_r1.baselines.direct import AnswerFormat, ask_once
from prompt_r1.baselines.method import Attempt, Ledger
from prompt_r1.baselines.optimise import score
from prompt_r1.environments.pool import Pool
from prompt_r1.errors import Resumable, UsageError
from prompt_r1.types import Message, Question

logger = logging.getLogger(__name__)

STEP_BY_STEP = "Let's think step by step."
TRIED_PER_SHOT = 20  # training questions at most, before there are fewer shots
RIGHT = 0.5  # score from which an answer is kept: a free text is never quite right


class ChainOfThought:
    """With `shots` examples before the question."""

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
        """Ask training questions, as many at a time as shots are missing, until enough were right."""
        if self._shots and not train:
            raise UsageError(f"{self.name} needs training questions: give --train-data")
        order = random.Random(f"shots {self._seed}").sample(list(train), len(train))
        order = order[: self._shots * TRIED_PER_SHOT]
        kept: list[Message] = []
        while order and len(kept) < 2 * self._shots:
            missing = self._shots - len(kept) // 2
            asked, order = order[:missing], order[missing:]
            attempts = await asyncio.gather(*(self._ask(question, 0) for question in asked))
            for question, attempt in zip(asked, attempts, strict=True):
                self.ledger.add_attempt(attempt)
                if attempt.error:
                    raise Resumable(f"the environment failed while {self.name} was prepared: {attempt.error}")
                if score(attempt.answer, question) >= RIGHT:
                    kept += [self._wording(question), {"role": "assistant", "content": attempt.raw}]
        if len(kept) < 2 * self._shots:
            logger.warning("%s has %d of %d examples: no more were answered right", self.name, len(kept) // 2,
                           self._shots)  # fmt: skip
        self._examples = kept

    async def answer(self, question: Question, *, sample: int, seed: str) -> Attempt:
        return await self._ask(question, sample)

    async def _ask(self, question: Question, sample: int) -> Attempt:
        messages = [*self._examples, self._wording(question)]
        return await ask_once(self._environment, messages, self._format, question, sample)

    def _wording(self, question: Question) -> Message:
        return {"role": "user", "content": self._format.ask(question.text, hint=STEP_BY_STEP)}
