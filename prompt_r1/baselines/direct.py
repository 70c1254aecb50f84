"""`direct`: the environment alone, asked once; and the answer formats of all methods that ask it directly."""

from collections.abc import Sequence
from dataclasses import dataclass

from prompt_r1.baselines.method import Ledger, Meter
from prompt_r1.environments.pool import Pool
from prompt_r1.errors import EnvError
from prompt_r1.evaluation.predictions import Prediction
from prompt_r1.protocol import ANSWER_IN_TAGS
from prompt_r1.types import Message, Question


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


async def ask_once(
    environment: Pool, messages: list[Message], answer_format: AnswerFormat, question: Question, sample: int
) -> Prediction:
    """Answer a question with one call. A failed call gives a prediction with an error."""
    meter = Meter(environment)
    try:
        reply = await meter.ask(messages, sample=sample, session=question.id)
    except EnvError as error:
        prediction = Prediction(question, None, stop="env_error", error=str(error))
    else:
        answer, formatted = answer_format.read(reply)
        prediction = Prediction(question, answer, reply, format=formatted)
    return meter.spent.bill(prediction)


class Direct:
    """Asks the environment the question itself."""

    def __init__(self, environment: Pool, answer_format: AnswerFormat) -> None:
        self.name = "direct"
        self.ledger = Ledger()
        self._environment = environment
        self._format = answer_format

    async def prepare(self, train: Sequence[Question], validation: Sequence[Question]) -> None:
        pass

    async def answer(self, question: Question, *, sample: int, seed: str) -> Prediction:
        messages = [self._format.user_message(question.text)]
        return await ask_once(self._environment, messages, self._format, question, sample)
