"""What the prompt optimisers share.

As their authors do, OPRO, TextGrad and GEPA search a prompt for each dataset. Datasets without training
questions get the prompt of one more search, over the mixture of all. The optimised text is the system
message; the user message requests the answer format as in all other methods. Apart from the models a search
is deterministic, and every call is in the run's journal, so a search that is repeated (after a kill, for
example) pays for no call twice.

Without a limit of calls a search makes as many steps as its authors' code; with one it goes on, and ends
before the first step that might exceed the limit.
"""

import asyncio
import json
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from prompt_r1.baselines.ask_once import AnswerFormat, ask_once, task_score
from prompt_r1.baselines.method import Ledger, Method
from prompt_r1.environments.environment import Environment, Game
from prompt_r1.errors import EnvError, Resumable
from prompt_r1.evaluation.predictions import Prediction
from prompt_r1.types import Message, Question

logger = logging.getLogger(__name__)

SEED_PROMPT = "Answer the question as well as you can."  # the system message that a search starts from
VALIDATED_ON = 50  # validation questions of textgrad and gepa
MIXTURE = ""  # in place of a dataset: the questions of all datasets


@dataclass
class PromptSearch:
    """Tries prompts on an environment, asks an optimiser for new ones, and records both.

    `max_calls` limits the calls of both models in the whole search; 0: no limit.
    """

    name: str  # of the method, and of the dataset if there is one
    environment: Environment
    optimizer: Environment
    answer_format: AnswerFormat
    folder: Path
    max_calls: int = 0
    ledger: Ledger = field(init=False, default_factory=Ledger)
    _begun: int = field(init=False, default=0)  # calls, with those that wait for a reply

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "history.jsonl").write_text("", "utf-8")  # a resumed search writes it again

    def can_afford(self, calls: int) -> bool:
        """Whether the limit allows this many more calls."""
        return not self.max_calls or self._begun + calls <= self.max_calls

    def _begin(self, calls: int) -> None:
        assert self.can_afford(calls), f"{self._begun} + {calls} calls exceed the limit of {self.max_calls}"
        self._begun += calls

    async def answer(self, prompt: str, question: Question, sample: int = 0) -> Prediction:
        """Answer a question with one call of the environment, with `prompt` as its system message."""
        messages: list[Message] = [
            {"role": "system", "content": prompt},
            self.answer_format.user_message(question.text),
        ]
        return await ask_once(self.environment, messages, self.answer_format, question, sample)

    async def try_prompt(self, prompt: str, questions: Sequence[Question]) -> list[Prediction]:
        """Answer the questions concurrently, one call each.

        Raises Resumable if a call fails: a score over fewer questions could select another prompt.
        """
        self._begin(len(questions))
        predictions = await asyncio.gather(*(self.answer(prompt, question) for question in questions))
        for prediction in predictions:
            self.ledger.task += prediction.spent
            if prediction.error:
                raise Resumable(
                    f"the environment failed while {self.name} searched a prompt: {prediction.error}"
                )
        return predictions

    async def ask_optimizer(self, system: str, request: str, *, sample: int = 0) -> str:
        """One call of the optimiser; `sample` numbers several replies to the same request."""
        self._begin(1)
        messages: list[Message] = [
            {"role": "system", "content": system},
            {"role": "user", "content": request},
        ]
        game = Game(self.name, sample)
        try:
            reply = await self.optimizer.ask(messages, game)
        except EnvError as error:
            raise Resumable(f"the optimiser of {self.name} failed: {error}") from None
        self.ledger.optimizer += game.spent
        return reply

    def record(self, **event: object) -> None:
        """Append an event to history.jsonl, with the number of calls so far."""
        calls = {"task_calls": self.ledger.task.calls, "optimizer_calls": self.ledger.optimizer.calls}
        with (self.folder / "history.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(event | calls, ensure_ascii=False) + "\n")


@dataclass(frozen=True)
class SearchPart:
    """The questions of one search."""

    dataset: str  # MIXTURE: the questions of all datasets
    train: Sequence[Question]
    validation: Sequence[Question]


@dataclass
class OptimisedPrompt(Method):
    """Searches for prompts, then answers each question with one call under the prompt of its dataset.

    `datasets` are those that get a search of their own, where they have training questions.
    """

    algorithm: Callable[[PromptSearch, SearchPart], Awaitable[str]]  # returns the best prompt
    open_search: Callable[[str], PromptSearch]
    datasets: Sequence[str]
    prompts: dict[str, str] = field(init=False, default_factory=dict)  # dataset or MIXTURE → prompt
    _searches: dict[str, PromptSearch] = field(init=False, default_factory=dict)

    async def prepare(self, train: Sequence[Question], validation: Sequence[Question]) -> None:
        for part in parts_of(self.datasets, train, validation):
            search = self._searches[part.dataset] = self.open_search(part.dataset)
            prompt = await self.algorithm(search, part)
            if prompt == SEED_PROMPT:
                logger.warning(
                    "%s found no better prompt than its seed in %d calls", search.name, search._begun
                )
            (search.folder / "prompt.txt").write_text(prompt, "utf-8")
            self.ledger.task += search.ledger.task
            self.ledger.optimizer += search.ledger.optimizer
            self.prompts[part.dataset] = prompt

    async def answer(self, question: Question, *, sample: int, seed: str) -> Prediction:
        assert self.prompts, "prepare was not awaited"
        part = question.dataset if question.dataset in self.prompts else MIXTURE
        return await self._searches[part].answer(self.prompts[part], question, sample)


def parts_of(
    datasets: Sequence[str], train: Sequence[Question], validation: Sequence[Question]
) -> list[SearchPart]:
    """A part for each dataset that has questions of its own, and the mixture for the others, if any."""
    parts = []
    for dataset in datasets:
        of_train = [question for question in train if question.dataset == dataset]
        of_validation = [question for question in validation if question.dataset == dataset]
        if of_train and (of_validation or not validation):
            parts.append(SearchPart(dataset, of_train, of_validation))
    if len(parts) < len(datasets):
        parts.append(SearchPart(MIXTURE, train, validation))
    return parts


def mean_score(predictions: Sequence[Prediction]) -> float:
    """The mean score of at least one prediction."""
    return sum(map(task_score, predictions)) / len(predictions)


def draw_questions(questions: Sequence[Question], limit: int, seed: int) -> list[Question]:
    """At most `limit` of the questions, drawn by seed."""
    order = random.Random(f"chosen {seed}").sample(list(questions), len(questions))
    return order[:limit]


def text_between(text: str, opening: str, closing: str) -> str | None:
    """The text between the first `opening` and the next `closing`; None if either is missing."""
    start = text.find(opening)
    end = text.find(closing, start + len(opening)) if start >= 0 else -1
    return text[start + len(opening) : end].strip() if end >= 0 else None
