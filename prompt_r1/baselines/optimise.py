"""What the prompt optimisers share: the task that a prompt is tried on, the model that writes prompts, the
ledger, and the method that answers with the prompt that was found.

The optimised text is the system message; the user message is the question with the same words for the form of
the answer as everywhere. A search is deterministic but for the models, and every call is in the run's
journal: the same search again, after a kill say, pays for nothing twice.
"""

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from prompt_r1.baselines.direct import AnswerFormat, ask_once
from prompt_r1.baselines.method import Attempt, Ledger
from prompt_r1.environments.pool import Pool
from prompt_r1.errors import EnvError, Resumable
from prompt_r1.metrics.text import exact_match, f1
from prompt_r1.types import Message, Question


@dataclass(frozen=True)
class Trial:
    """One question answered under a prompt."""

    question: Question
    reply: str
    score: float


class Bench:
    """Tries prompts on an environment and asks the optimiser for new ones; writes down what happened.

    `max_calls`: of both models together, for the whole search; 0: as many as the algorithm makes.
    """

    def __init__(
        self,
        name: str,
        environment: Pool,
        optimizer: Pool,
        answer_format: AnswerFormat,
        *,
        max_calls: int = 0,
        folder: Path | None = None,
    ) -> None:
        self.name = name
        self.ledger = Ledger()
        self._environment = environment
        self._optimizer = optimizer
        self._format = answer_format
        self._max_calls = max_calls
        self._folder = folder
        if folder:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "history.jsonl").write_text("", "utf-8")  # a resumed search writes it again

    def affords(self, calls: int) -> bool:
        """May so many more calls be made?"""
        return not self._max_calls or self.ledger.calls + calls <= self._max_calls

    async def answer(self, prompt: str, question: Question, sample: int = 0) -> Attempt:
        """One call of the environment with `prompt` as its system message."""
        system: list[Message] = [{"role": "system", "content": prompt}]
        user: Message = {"role": "user", "content": self._format.ask(question.text)}
        return await ask_once(self._environment, [*system, user], self._format, question, sample)

    async def trial(self, prompt: str, question: Question) -> Trial:
        """Raises Resumable for a failed call: a score with holes would choose another prompt."""
        attempt = await self.answer(prompt, question)
        self.ledger.add_attempt(attempt)
        if attempt.error:
            raise Resumable(f"the environment failed while {self.name} searched a prompt: {attempt.error}")
        return Trial(question, attempt.raw, score(attempt.answer, question))

    async def trials(self, prompt: str, questions: Sequence[Question]) -> list[Trial]:
        """All at once: one call each."""
        return await asyncio.gather(*(self.trial(prompt, question) for question in questions))

    async def write(self, system: str, request: str, *, sample: int = 0) -> str:
        """One call of the optimiser; `sample` tells apart several replies to the same request."""
        messages: list[Message] = [
            {"role": "system", "content": system},
            {"role": "user", "content": request},
        ]
        try:
            reply = await self._optimizer.call(messages, sample=sample, session=self.name)
        except EnvError as error:
            raise Resumable(f"the optimiser of {self.name} failed: {error}") from None
        self.ledger.add(reply, optimizer=True)
        return reply.text

    def record(self, **event: object) -> None:
        """One line of history.jsonl, with the calls so far."""
        if self._folder:
            line = {**event, "task_calls": self.ledger.task_calls,
                    "optimizer_calls": self.ledger.optimizer_calls}  # fmt: skip
            with (self._folder / "history.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(line, ensure_ascii=False) + "\n")

    async def finish(self, prompt: str) -> None:
        """Write prompt.txt and ledger.json."""
        await self._optimizer.close()
        if self._folder:
            (self._folder / "prompt.txt").write_text(prompt, "utf-8")
            (self._folder / "ledger.json").write_text(json.dumps(asdict(self.ledger)), "utf-8")


Search = Callable[[Bench, Sequence[Question], Sequence[Question]], Awaitable[str]]
"""Bench, training and validation questions → the best prompt."""


class OptimisedPrompt:
    """Searches a prompt, then asks once with it."""

    def __init__(self, name: str, search: Search, bench: Bench) -> None:
        self.name = name
        self.ledger = bench.ledger
        self.prompt = ""
        self._search = search
        self._bench = bench

    async def prepare(self, train: Sequence[Question], validation: Sequence[Question]) -> None:
        self.prompt = await self._search(self._bench, train, validation)
        await self._bench.finish(self.prompt)

    async def answer(self, question: Question, *, sample: int, seed: str) -> Attempt:
        assert self.prompt, "prepare was not awaited"
        return await self._bench.answer(self.prompt, question, sample)


def score(answer: str | None, question: Question) -> float:
    """What is optimised: exact match, F1 for free texts."""
    return (f1 if question.kind == "text" else exact_match)(answer or "", question.answers)


def mean_score(trials: Sequence[Trial]) -> float:
    """The mean score of at least one trial."""
    return sum(trial.score for trial in trials) / len(trials)


def chosen(questions: Sequence[Question], limit: int, seed: int) -> list[Question]:
    """At most `limit` of the questions, by seed."""
    order = random.Random(f"chosen {seed}").sample(list(questions), len(questions))
    return order[:limit]


def between(text: str, opening: str, closing: str) -> str | None:
    """What stands between the first `opening` and the next `closing`."""
    start = text.find(opening)
    end = text.find(closing, start + len(opening)) if start >= 0 else -1
    return text[start + len(opening) : end].strip() if end >= 0 else None
