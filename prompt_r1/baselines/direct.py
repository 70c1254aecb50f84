"""`direct`: the environment alone, asked once. And how an answer is asked for and read, for all methods that
ask this way."""

from collections.abc import Sequence
from dataclasses import dataclass

from prompt_r1.baselines.method import Attempt, Ledger, Meter
from prompt_r1.environments.pool import Pool
from prompt_r1.errors import EnvError
from prompt_r1.protocol import ANSWER_IN_TAGS
from prompt_r1.types import Message, Question


@dataclass(frozen=True)
class AnswerFormat:
    """The words that ask for an answer in a certain form, the same for all methods."""

    request: str
    separator: str  # between the question and the request
    tagged: bool  # the answer stands between <answer> and </answer>

    def ask(self, question: str, *, hint: str = "") -> str:
        """The user message; `hint` is a line of its own between question and request."""
        return f"{question}\n{hint}\n{self.request}" if hint else question + self.separator + self.request

    def read(self, reply: str) -> tuple[str, float | None]:
        """The answer in a reply, and whether it stood where it should (None: anywhere will do).

        A reply without tags is an answer as a whole: the format counts that it was not marked.
        """
        if not self.tagged:
            return reply.strip(), None
        close = reply.rfind("</answer>")
        start = reply.rfind("<answer>", 0, max(close, 0))
        return (reply.strip(), 0.0) if start < 0 else (reply[start + len("<answer>") : close].strip(), 1.0)


FORMATS = {
    "tags": AnswerFormat(ANSWER_IN_TAGS, separator="\n", tagged=True),
    # The one wish for a form that the rules of the mini world understand.
    "only": AnswerFormat("Answer only.", separator=" ", tagged=False),
}


async def ask_once(
    environment: Pool, messages: list[Message], answer_format: AnswerFormat, question: Question, sample: int
) -> Attempt:
    """One call; a failed one is an attempt with an error."""
    meter = Meter(environment)
    try:
        reply = await meter.ask(messages, sample=sample, session=question.id)
    except EnvError as error:
        return meter.billed(Attempt(None, "", stop="env_error", error=str(error)))
    answer, marked = answer_format.read(reply)
    return meter.billed(Attempt(answer, reply, format=marked))


class Direct:
    """The question as it is."""

    def __init__(self, environment: Pool, answer_format: AnswerFormat) -> None:
        self.name = "direct"
        self.ledger = Ledger()
        self._environment = environment
        self._format = answer_format

    async def prepare(self, train: Sequence[Question], validation: Sequence[Question]) -> None:
        pass

    async def answer(self, question: Question, *, sample: int, seed: str) -> Attempt:
        messages: list[Message] = [{"role": "user", "content": self._format.ask(question.text)}]
        return await ask_once(self._environment, messages, self._format, question, sample)
