"""What the prompt optimisers (OPRO, TextGrad and GEPA) share.

As in their papers, there is a search for each dataset. Datasets without training questions share one more
search, over all questions. The prompt becomes the system message. The user message requests the answer
format, as in all other methods. Apart from the models a search is deterministic, and every call is in the
journal, so a search that is repeated after a kill pays for no call twice.

Without a limit of calls, a search makes as many steps as its authors' code. With a limit, it ends before the
first step that might exceed the limit. A search also ends if the optimiser has no new prompts, or if no
prompt can score higher.
"""

import hashlib
import logging
import random
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Literal

from prompt_r1.environments.environment import Caller, Environment, Reply
from prompt_r1.errors import EnvError, Resumable, UsageError
from prompt_r1.evaluation.ask_once import Answer, direct, task_score
from prompt_r1.evaluation.predictions import Prediction
from prompt_r1.rollout import run_together
from prompt_r1.types import Message, Question

logger = logging.getLogger(__name__)

SEED_PROMPT = "Answer the question as well as you can."  # A search starts from this system message.
VALIDATED_ON = 50  # the number of validation questions of textgrad and gepa
PATIENCE = 50  # A search ends after so many calls without a new prompt.
ALL = "all-questions"  # names the search over all questions

Fields = Mapping[str, object]
"""Fields of a request to an endpoint."""


@dataclass(frozen=True)
class Data:
    """The questions that prepare a method."""

    train: Sequence[Question]
    validation: Sequence[Question]

    def of_dataset(self, name: str) -> "Data":
        """The questions of a dataset, or all questions for ALL."""
        if name == ALL:
            return self
        train = [question for question in self.train if question.dataset == name]
        validation = [question for question in self.validation if question.dataset == name]
        return Data(train, validation)


@dataclass(frozen=True)
class SearchSettings:
    """What the searches of a method have in common."""

    method: str
    environment: Environment
    optimizer: Environment
    request: str  # This text after a question requests the answer.
    max_calls: int = 0  # the limit of calls of both models in each search; 0: no limit
    examples: int = 0  # how many questions score a prompt; 0: the authors' number
    seed: int = 0


@dataclass
class PromptSearch:
    """Tries prompts on an environment, and asks an optimiser for new ones.

    Prompts are compared by their scores on the same questions.
    """

    settings: SearchSettings
    name: str  # the method and the dataset
    # The state of the search. Calls count when they begin, so also without a reply.
    steps: int = 0
    environment_calls: int = 0
    optimizer_calls: int = 0
    calls_at_new_prompt: int = 0  # `calls` when a new prompt was last tried
    tried: set[str] = field(default_factory=set)  # the prompts that were tried on any question
    scores: dict[str, list[float]] = field(default_factory=dict)  # prompt → score per question

    @property
    def calls(self) -> int:
        """How many calls of both models have begun."""
        return self.environment_calls + self.optimizer_calls

    async def begin(self, questions: Sequence[Question], authors_count: int) -> list[Question]:
        """Draw the questions that score prompts, and score the seed prompt if the limit of calls allows it.

        `authors_count`: how many questions the authors draw. Raises UsageError if there are no questions.
        """
        if not questions:
            raise UsageError("a prompt search needs more questions: give --train-data and --val-data")
        shuffled = random.Random(f"chosen {self.settings.seed}").sample(list(questions), len(questions))
        drawn = shuffled[: self.settings.examples or authors_count]
        if self.can_afford(len(drawn)):
            await self.score(SEED_PROMPT, drawn)
        return drawn

    def may_go_on(self, step_calls: int, *, authors_stop: bool) -> bool:
        """Whether to take another step.

        `step_calls`: the most calls that a step makes until it has scored its first new prompt. If the limit
        does not allow them, the step is not begun. `authors_stop`: whether the authors' search would end
        here. So does ours, unless --optimize-calls gives a limit. Then it goes on until the limit, or until
        no prompt can be better.
        """
        if authors_stop and not self.settings.max_calls:
            return False
        if not self.can_afford(step_calls):
            return False
        if self.calls >= self.calls_at_new_prompt + PATIENCE:
            return False
        if not self.scores:  # The limit does not even allow the seed prompt.
            return False
        has_all_right = all(score == 1 for score in self.scores[self.best()])
        return not has_all_right  # No prompt can score higher than all right.

    async def score(self, prompt: str, questions: Sequence[Question]) -> float:
        """The mean score of a prompt. It is scored only once, so `questions` must always be the same."""
        if prompt not in self.scores:
            predictions = await self.try_prompt(prompt, questions)
            self.scores[prompt] = [task_score(prediction) for prediction in predictions]
        return fmean(self.scores[prompt])

    def best(self) -> str:
        """The prompt with the best mean score (of equal prompts, the first); without scores, SEED_PROMPT."""
        means = {prompt: fmean(scores) for prompt, scores in self.scores.items()}
        return max(means, key=lambda prompt: means[prompt], default=SEED_PROMPT)

    def can_afford(self, more_calls: int) -> bool:
        """Whether the limit allows this many more calls."""
        limit = self.settings.max_calls
        return not limit or self.calls + more_calls <= limit

    async def try_prompt(self, prompt: str, questions: Sequence[Question]) -> list[Prediction]:
        """Answer the questions concurrently, one call each.

        Raises Resumable if a call fails: a score over fewer questions could select another prompt.
        """
        self._assert_affordable(len(questions))
        self.environment_calls += len(questions)
        if prompt not in self.tried:
            self.tried.add(prompt)
            self.calls_at_new_prompt = self.calls
        environment, request = self.settings.environment, self.settings.request
        asked = [direct(environment, request, question, 0, prompt=prompt) for question in questions]
        predictions = await run_together(asked)
        for prediction in predictions:
            if prediction.error:
                raise Resumable(f"the environment failed in the search of {self.name}: {prediction.error}")
        return predictions

    async def ask_optimizer(self, system: str, request: str, *, sample: int) -> Reply:
        """One call of the optimiser.

        `sample` is the number of the request in the search. If an equal request has the same number, it gets
        the recorded reply from the journal, and not a new reply.
        """
        self._assert_affordable(1)
        self.optimizer_calls += 1
        messages: list[Message] = [
            {"role": "system", "content": system},
            {"role": "user", "content": request},
        ]
        try:
            return await self.settings.optimizer.ask(messages, Caller(self.name, sample))
        except EnvError as error:
            raise Resumable(f"the optimiser of {self.name} failed: {error}") from None

    def _assert_affordable(self, calls: int) -> None:
        limit = self.settings.max_calls
        assert self.can_afford(calls), f"{self.calls} + {calls} calls exceed the limit of {limit}"


@dataclass(frozen=True)
class SearchCalls:
    """The calls of a search as its authors' code makes them."""

    most: int  # calls of both models
    of_optimizer: float  # the optimiser's share of the calls


@dataclass(frozen=True)
class Algorithm:
    """A search, and what its authors' code or paper says about it."""

    search: Callable[[PromptSearch, Data], Awaitable[str]]  # finds the best prompt
    scored_by: Literal["train", "validation"]  # the questions that score prompts
    scored_on: int  # the number of these questions
    calls: Callable[[int], SearchCalls]  # the calls, if this many questions score a prompt
    fields: Fields  # fields of each request to the environment
    optimizer_fields: Fields  # fields of each request to the optimiser


async def optimised_prompt(
    algorithm: Algorithm, settings: SearchSettings, datasets: Sequence[str], data: Data, folder: Path
) -> Answer:
    """Search for prompts. Then each question gets one call under the prompt of its dataset.

    `datasets` are the datasets of the questions that will be answered. Prompts are written to `folder`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    prompts: dict[str, str] = {}
    for name in searched(datasets, data):
        search = PromptSearch(settings, f"{settings.method} ({name})")
        found = await algorithm.search(search, data.of_dataset(name))
        if found == SEED_PROMPT:
            logger.warning("%s found no better prompt than its seed in %d calls", search.name, search.calls)
        (folder / f"{file_name(name)}.txt").write_text(found, "utf-8", "replace")
        prompts[name] = found

    async def answer(question: Question, sample: int) -> Prediction:
        search_name = question.dataset if question.dataset in prompts else ALL
        prompt = prompts[search_name]
        return await direct(settings.environment, settings.request, question, sample, prompt=prompt)

    return answer


def searched(datasets: Sequence[str], data: Data) -> list[str]:
    """The datasets that get a search of their own, and ALL if there are others.

    A dataset gets its own search if it has training questions and, if any validation questions are given,
    some of these, too.
    """
    own = []
    for name in datasets:
        of_dataset = data.of_dataset(name)
        if of_dataset.train and (of_dataset.validation or not data.validation):
            own.append(name)
    return own if len(own) == len(datasets) else [*own, ALL]


def file_name(text: str) -> str:
    """A text as the name of a file. Other texts have other names."""
    name = re.sub(r"[^\w.-]+", "-", text)
    return name if name == text else f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"


def mean_score(predictions: Sequence[Prediction]) -> float:
    """The mean score of at least one prediction."""
    return fmean(task_score(prediction) for prediction in predictions)


def text_between(text: str, opening: str, closing: str) -> str:
    """The text in the last pair of `opening` and `closing`; "" if there is none, or an unpaired opening.

    Before its proposal, a model may write about the tags.
    """
    before_end, end, rest = text.rpartition(closing)
    _, start, inside = before_end.rpartition(opening)
    is_paired = bool(start and end) and opening not in rest
    return inside.strip() if is_paired else ""
