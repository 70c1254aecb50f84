"""What the prompt optimisers share.

As their authors do, OPRO, TextGrad and GEPA search a prompt for each dataset. Datasets without training
questions share one more search, over all questions. The prompt becomes the system message; the user message
requests the answer format as in all other methods. Apart from the models a search is deterministic, and every
call is in the run's journal, so a search that is repeated after a kill pays for no call twice.

Without a limit of calls a search makes as many steps as its authors' code; with one it goes on, and ends
before the first step that might exceed the limit. It also ends when the optimiser has no new prompts, or
when none can score higher.
"""

import asyncio
import logging
import random
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean

from prompt_r1.environments.environment import Caller, Environment
from prompt_r1.errors import EnvError, Resumable, UsageError
from prompt_r1.evaluation.ask_once import Answer, direct, task_score
from prompt_r1.evaluation.predictions import Prediction
from prompt_r1.types import Message, Question

logger = logging.getLogger(__name__)

SEED_PROMPT = "Answer the question as well as you can."  # the system message that a search starts from
VALIDATED_ON = 50  # validation questions of textgrad and gepa
PATIENCE = 50  # calls without a new prompt, after which a search ends
ALL = "all questions"  # in place of a dataset: the search over all questions


@dataclass
class PromptSearch:
    """Tries prompts on an environment, and asks an optimiser for new ones.

    Prompts are compared by their scores on the same questions.
    """

    name: str  # of the method and the dataset
    environment: Environment
    optimizer: Environment
    request: str  # of the answer, after a question
    max_calls: int = 0  # of both models in the whole search; 0: no limit
    examples: int = 0  # questions that score a prompt; 0: as many as the authors'
    seed: int = 0
    begun: int = field(init=False, default=0)  # calls, with those that wait for a reply, …
    asked: int = field(init=False, default=0)  # … and those of the environment among them
    steps: int = field(init=False, default=0)
    tried: set[str] = field(init=False, default_factory=set)  # prompts that questions were answered under
    known: int = field(init=False, default=0)  # of them before the last step, …
    last_new: int = field(init=False, default=0)  # … and the calls that had begun when there was a new one
    scores: dict[str, list[float]] = field(init=False, default_factory=dict)  # prompt → of each question

    async def begin(self, questions: Sequence[Question], examples: int) -> list[Question]:
        """Draw the questions that score prompts, and score the seed prompt, if calls allow it.

        `examples` is the authors' number of them. Raises UsageError if there are no questions.
        """
        if not questions:
            raise UsageError("a prompt search needs more questions: give --train-data and --val-data")
        shuffled = random.Random(f"chosen {self.seed}").sample(list(questions), len(questions))
        drawn = shuffled[: self.examples or examples]
        if self.can_afford(len(drawn)):
            await self.score(SEED_PROMPT, drawn)
        return drawn

    def takes_step(self, calls: int, *, ended: bool) -> bool:
        """Whether there is another step, which makes at most `calls` calls until its first prompt is scored.

        `ended` says whether the search of the authors ends here, for a search without a limit.
        """
        if len(self.tried) > self.known:
            self.known, self.last_new = len(self.tried), self.begun
        stuck = self.begun >= self.last_new + PATIENCE
        perfect = not self.scores or min(self.scores[self.best()]) == 1
        if stuck or perfect or not self.can_afford(calls) or (ended and not self.max_calls):
            return False
        self.steps += 1
        return True

    async def score(self, prompt: str, questions: Sequence[Question]) -> float:
        """The mean score of a prompt. A prompt is scored once, so `questions` are always the same."""
        if prompt not in self.scores:
            self.scores[prompt] = list(map(task_score, await self.try_prompt(prompt, questions)))
        return fmean(self.scores[prompt])

    def best(self) -> str:
        """The prompt with the best mean score, the first of equals; the seed prompt if none was scored."""
        return max(self.scores, key=lambda prompt: fmean(self.scores[prompt]), default=SEED_PROMPT)

    def can_afford(self, calls: int) -> bool:
        """Whether the limit allows this many more calls."""
        return not self.max_calls or self.begun + calls <= self.max_calls

    def _count_calls(self, calls: int) -> None:
        assert self.can_afford(calls), f"{self.begun} + {calls} calls exceed the limit of {self.max_calls}"
        self.begun += calls

    async def try_prompt(self, prompt: str, questions: Sequence[Question]) -> list[Prediction]:
        """Answer the questions concurrently, one call each.

        Raises Resumable if a call fails: a score over fewer questions could select another prompt.
        """
        self._count_calls(len(questions))
        self.asked += len(questions)
        self.tried.add(prompt)
        ask = partial(direct, self.environment, self.request, sample=0, prompt=prompt)
        predictions = await asyncio.gather(*map(ask, questions))
        for prediction in predictions:
            if prediction.error:
                raise Resumable(f"the environment failed in the search of {self.name}: {prediction.error}")
        return predictions

    async def ask_optimizer(self, system: str, request: str, *, sample: int = 0) -> str:
        """One call of the optimiser; `sample` numbers several replies to the same request."""
        self._count_calls(1)
        asked: list[Message] = [{"role": "system", "content": system}, {"role": "user", "content": request}]
        try:
            return await self.optimizer.ask(asked, Caller(self.name, sample))
        except EnvError as error:
            raise Resumable(f"the optimiser of {self.name} failed: {error}") from None


Algorithm = Callable[[PromptSearch, Sequence[Question], Sequence[Question]], Awaitable[str]]
"""A search, training and validation questions in, the best prompt out."""


async def optimised_prompt(
    algorithm: Algorithm,
    search: PromptSearch,
    datasets: Sequence[str],
    folder: Path,
    train: Sequence[Question],
    validation: Sequence[Question],
) -> Answer:
    """Search for prompts; then each question gets one call under the prompt of its dataset.

    `datasets` get a search of their own, with the settings of `search`, where they have training questions.
    Prompts are written to `folder`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    asked = (train, validation) if validation else (train,)
    own = [name for name in datasets if all(_of(name, questions) for questions in asked)]
    prompts: dict[str, str] = {}
    searches = own if len(own) == len(datasets) else [*own, ALL]
    for name in searches:
        own_search = replace(search, name=f"{search.name} ({name})")
        found = await algorithm(own_search, _of(name, train), _of(name, validation))
        if found == SEED_PROMPT:
            described, calls = own_search.name, own_search.begun
            logger.warning("%s found no better prompt than its seed in %d calls", described, calls)
        (folder / f"{file_name(name)}.txt").write_text(found, "utf-8", "replace")
        prompts[name] = found

    async def answer(question: Question, sample: int) -> Prediction:
        prompt = prompts[question.dataset if question.dataset in prompts else ALL]
        return await direct(search.environment, search.request, question, sample, prompt=prompt)

    return answer


def _of(dataset: str, questions: Sequence[Question]) -> list[Question]:
    return [question for question in questions if dataset in (ALL, question.dataset)]


def file_name(text: str) -> str:
    """A text as the name of a file."""
    return re.sub(r"[^\w.-]+", "-", text)


def mean_score(predictions: Sequence[Prediction]) -> float:
    """The mean score of at least one prediction."""
    return fmean(map(task_score, predictions))


def text_between(text: str, opening: str, closing: str) -> str:
    """The text between the first `opening` and the next `closing`; empty if either is missing."""
    inside, end, _ = text.partition(opening)[2].partition(closing)
    return inside.strip() if end else ""
