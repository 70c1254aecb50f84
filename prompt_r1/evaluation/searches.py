"""What the prompt optimisers (OPRO, TextGrad and GEPA) share.

As in their papers, there is a search for each dataset. Datasets that lack training or validation
questions share one more search, over all questions. The prompt becomes the system message. The user message
requests the answer format, as in all other methods. Apart from the models a search is deterministic, and
every call is in the journal, so a search that is repeated after a kill pays for no call twice.

Without a limit of calls, a search makes as many steps as its authors' code. With a limit, it ends before the
first step that might exceed the limit. A search also ends if the optimiser has no new prompts, or if no
prompt can score higher.
"""

import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from prompt_r1.environments.environment import Environment
from prompt_r1.environments.sources import Caller, Reply
from prompt_r1.errors import EnvError, Resumable
from prompt_r1.evaluation.ask_once import direct
from prompt_r1.evaluation.predictions import Prediction, System
from prompt_r1.f1 import exact_match, f1
from prompt_r1.rollout import run_together
from prompt_r1.types import Message, Question

SEED_PROMPT = "Answer the question as well as you can."  # A search starts from this system message.
VALIDATED_ON = 50  # the number of validation questions of textgrad and gepa
# A search ends after this many attempts without a new prompt. An attempt is a call of the optimiser, or a
# batch of gepa that gives the optimiser nothing to improve.
PATIENCE = 50
ALL = "all-questions"  # names the search over all questions

RequestFields = Mapping[str, object]
"""Fields of a request to an endpoint."""


@dataclass(frozen=True)
class Data:
    """The questions that prepare a method."""

    train: Sequence[Question] = ()
    validation: Sequence[Question] = ()


@dataclass
class PromptSearch:
    """Tries prompts on an environment, and asks an optimiser for new ones."""

    system: System
    dataset: str  # or ALL
    environment: Environment
    optimizer: Environment
    limit: int = 0  # the most calls of both models together; 0: no limit
    examples: int = 0  # how many questions score a prompt; 0: the authors' number
    seed: int = 0
    # The state of the search. A call counts when it begins, so also without a reply.
    questions: Sequence[Question] = ()  # the questions that score each prompt, which `begin` draws
    environment_calls: int = 0
    optimizer_calls: int = 0
    attempts_without_new_prompt: int = 0  # A new prompt resets them.
    tried: set[str] = field(default_factory=set)  # the prompts that were tried on any question
    scores: dict[str, list[float]] = field(default_factory=dict)  # prompt → score of each of `questions`

    @property
    def name(self) -> str:
        """The method and the dataset."""
        return f"{self.system.method} ({self.dataset})"

    @property
    def calls(self) -> int:
        """How many calls of both models have begun."""
        return self.environment_calls + self.optimizer_calls

    @property
    def means(self) -> dict[str, float]:
        """The mean score of each prompt that was scored."""
        return {prompt: fmean(scores) for prompt, scores in self.scores.items()}

    def may_call(self, more: int) -> bool:
        """Whether the limit allows this many more calls."""
        return not self.limit or self.calls + more <= self.limit

    async def begin(self, questions: Sequence[Question], authors_count: int) -> None:
        """Draw the questions that score prompts, and score the seed prompt if the limit of calls allows it.

        `authors_count`: how many questions the authors draw.
        """
        self.questions = draw(questions, self.examples or authors_count, seed=self.seed)
        if self.may_call(len(self.questions)):
            await self.score(SEED_PROMPT)

    def may_go_on(self, step_calls: int, *, authors_stop: bool) -> bool:
        """Whether to take another step.

        `step_calls` is how many calls a step needs, at most, to score a new prompt. With a limit of calls,
        the search goes on while the limit allows so many more, also beyond the authors' number of steps.
        Without a limit, it ends when the authors' code ends (`authors_stop`).
        """
        if not self.may_call(step_calls):
            return False
        if authors_stop and not self.limit:
            return False
        # `begin` needs fewer calls than a step. So if the limit allows a step, `begin` has scored a prompt.
        assert self.scores, "`begin` has not scored the seed prompt"
        is_perfect = all(score == 1 for score in self.scores[self.best()])
        return not is_perfect and self.attempts_without_new_prompt < PATIENCE

    async def score(self, prompt: str) -> float:
        """The mean score of a prompt on `questions`. It is scored only once."""
        if prompt not in self.scores:
            predictions = await self.try_prompt(prompt, self.questions)
            self.scores[prompt] = [task_score(prediction) for prediction in predictions]
        return fmean(self.scores[prompt])

    def best(self) -> str:
        """The prompt with the best mean score (of equal prompts, the first); without scores, SEED_PROMPT."""
        means = self.means
        return max(means, key=lambda prompt: means[prompt], default=SEED_PROMPT)

    async def try_prompt(self, prompt: str, questions: Sequence[Question]) -> list[Prediction]:
        """Answer the questions concurrently, one call each.

        Raises Resumable if a call fails: a score over fewer questions could select another prompt.
        """
        assert self.may_call(len(questions)), f"{self.calls} + {len(questions)} calls, limit {self.limit}"
        self.environment_calls += len(questions)
        if prompt not in self.tried:
            self.tried.add(prompt)
            self.attempts_without_new_prompt = 0
        asked = [direct(self.environment, self.system, question, 0, prompt=prompt) for question in questions]
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
        assert self.may_call(1), f"{self.calls} + 1 calls, limit {self.limit}"
        self.optimizer_calls += 1
        self.attempts_without_new_prompt += 1
        messages: list[Message] = [
            {"role": "system", "content": system},
            {"role": "user", "content": request},
        ]
        try:
            return await self.optimizer.ask(messages, Caller(self.name, sample))
        except EnvError as error:
            raise Resumable(f"the optimiser of {self.name} failed: {error}") from None


@dataclass(frozen=True)
class Algorithm:
    """A search, and what its authors' code or paper says about it."""

    find_prompt: Callable[[PromptSearch, Data], Awaitable[str]]
    authors_calls: int  # how many calls of both models the authors' code makes
    optimizer_share: float  # the optimiser's share of these calls
    optimizer_fields: RequestFields  # fields of each request to the optimiser


def draw(questions: Sequence[Question], count: int, *, seed: int) -> list[Question]:
    """Draw `count` questions in random order, or all of them if there are fewer."""
    return random.Random(f"chosen {seed}").sample(list(questions), len(questions))[:count]


def task_score(prediction: Prediction) -> float:
    """The score of an answer in a search: F1 for free texts, else exact match."""
    question = prediction.question
    metric = f1 if question.kind == "text" else exact_match
    return metric(prediction.answer or "", question.answers)


def data_of_searches(questions: Sequence[Question], data: Data) -> dict[str, Data]:
    """The questions that prepare prompts for `questions`, by the names of the searches: a dataset or ALL.

    A dataset gets its own search if it has both training and validation questions. (If there are no
    validation questions at all, training questions are enough.) The other datasets share one search over all
    questions, also over the questions of datasets that have their own search.
    """
    datasets = dict.fromkeys(question.dataset for question in questions)
    searches = {}
    for name in datasets:
        train = [question for question in data.train if question.dataset == name]
        validation = [question for question in data.validation if question.dataset == name]
        if train and (validation or not data.validation):
            searches[name] = Data(train, validation)
    if len(searches) < len(datasets):
        searches[ALL] = data
    return searches
