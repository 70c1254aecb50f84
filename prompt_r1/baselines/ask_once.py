"""`direct`, `cot` and `cot-few-shot`, without an agent; answer formats.

Zero-shot: "Let's think step by step.", and a second call that extracts the answer (Kojima et al. 2022).
Few-shot: the prompt starts with answered training questions, with rationales that the environment itself
wrote and that led to the correct answer, because published examples exist for only one of the datasets.
"""

import asyncio
import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from prompt_r1.baselines.method import Method
from prompt_r1.environments.pool import Pool
from prompt_r1.errors import EnvError, Resumable, UsageError
from prompt_r1.evaluation.predictions import Prediction
from prompt_r1.metrics.em_f1 import exact_match, f1
from prompt_r1.protocol import ANSWER_IN_TAGS
from prompt_r1.spending import Spending
from prompt_r1.types import Message, Question

logger = logging.getLogger(__name__)

STEP_BY_STEP = "Let's think step by step."
EXTRACT = "Therefore, the answer is"
TRIES_PER_SHOT = 20  # training questions that are asked at most, for each example
CORRECT = 0.5  # minimum score of an example; a free text never scores 1


@dataclass(frozen=True)
class AnswerFormat:
    """How a prompt requests an answer in a certain format; the same for all methods."""

    request: str
    separator: str  # between the question and the request
    tagged: bool  # the answer is expected between <answer> and </answer>

    def user_message(self, question: str, *, hint: str = "") -> Message:
        """Question and request; `hint` is a line of its own between them."""
        content = f"{question}\n{hint}\n{self.request}" if hint else question + self.separator + self.request
        return {"role": "user", "content": content}

    def read(self, reply: str) -> tuple[str, float | None]:
        """The answer in a reply, and whether it was in the requested format (None: any format will do).

        The answer is the content of the last tags; without tags it is the whole reply, with a format of 0.
        """
        if not self.tagged:
            return reply.strip(), None
        close = reply.rfind("</answer>")
        start = reply.rfind("<answer>", 0, max(close, 0))
        if start < 0:
            return reply.strip(), 0.0
        return reply[start + len("<answer>") : close].strip(), 1.0


FORMATS = {
    "tags": AnswerFormat(ANSWER_IN_TAGS, separator="\n", tagged=True),
    # The only format request that the rules of the mini world understand.
    "only": AnswerFormat("Answer only.", separator=" ", tagged=False),
}
FREE = AnswerFormat("", separator="", tagged=False)


async def ask_once(
    environment: Pool, messages: list[Message], answer_format: AnswerFormat, question: Question, sample: int
) -> Prediction:
    """Answer a question with one call. A failed call gives a prediction with an error."""
    try:
        reply = await environment.call(messages, sample=sample, session=question.id)
    except EnvError as error:
        return Prediction(question, None, stop="env_error", error=str(error), spent=Spending(calls=1))
    answer, formatted = answer_format.read(reply.text)
    return Prediction(question, answer, reply.text, format=formatted, spent=reply.spent)


@dataclass
class ThinkThenAnswer(Method):
    """Asks for reasoning, and in a second call for the answer that it leads to (Kojima et al. 2022)."""

    environment: Pool
    answer_format: AnswerFormat

    async def answer(self, question: Question, *, sample: int, seed: str) -> Prediction:
        messages: list[Message] = [{"role": "user", "content": f"{question.text}\n{STEP_BY_STEP}"}]
        thought = await ask_once(self.environment, messages, FREE, question, sample)
        if thought.error:
            return thought
        messages.append({"role": "assistant", "content": thought.raw})
        messages.append(self.answer_format.user_message(EXTRACT))
        said = await ask_once(self.environment, messages, self.answer_format, question, sample)
        return replace(said, raw=f"{thought.raw}\n\n{said.raw}", spent=thought.spent + said.spent)


@dataclass
class AskOnce(Method):
    """Asks the environment the question, with a hint or without, after `shots` examples."""

    environment: Pool
    answer_format: AnswerFormat
    hint: str = ""
    shots: int = 0
    seed: int = 0  # of the examples
    _examples: list[Message] = field(init=False, default_factory=list)

    async def prepare(self, train: Sequence[Question], validation: Sequence[Question]) -> None:
        """Ask training questions until enough were answered correctly, as many at a time as are missing."""
        if self.shots and not train:
            raise UsageError("cot-few-shot needs training questions: give --train-data")
        remaining = random.Random(f"shots {self.seed}").sample(list(train), len(train))
        remaining = remaining[: self.shots * TRIES_PER_SHOT]
        correct: list[Prediction] = []
        while remaining and len(correct) < self.shots:
            missing = self.shots - len(correct)
            asked, remaining = remaining[:missing], remaining[missing:]
            for prediction in await asyncio.gather(*(self._ask(question, 0) for question in asked)):
                self.ledger.task += prediction.spent
                if prediction.error:
                    raise Resumable(
                        f"the environment failed while cot-few-shot was prepared: {prediction.error}"
                    )
                if task_score(prediction) >= CORRECT:
                    correct.append(prediction)
        if len(correct) < self.shots:
            logger.warning(
                "cot-few-shot has %d of %d examples: no more training questions were answered correctly",
                len(correct),
                self.shots,
            )
        for prediction in correct:
            self._examples.append(self._user_message(prediction.question))
            self._examples.append({"role": "assistant", "content": prediction.raw})

    async def answer(self, question: Question, *, sample: int, seed: str) -> Prediction:
        return await self._ask(question, sample)

    async def _ask(self, question: Question, sample: int) -> Prediction:
        messages = [*self._examples, self._user_message(question)]
        return await ask_once(self.environment, messages, self.answer_format, question, sample)

    def _user_message(self, question: Question) -> Message:
        return self.answer_format.user_message(question.text, hint=self.hint)


def task_score(prediction: Prediction) -> float:
    """The score of an answer while a method is prepared: F1 for free texts, exact match for the others."""
    question = prediction.question
    metric = f1 if question.kind == "text" else exact_match
    return metric(prediction.answer or "", question.answers)
