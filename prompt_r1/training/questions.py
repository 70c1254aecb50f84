"""The questions of a run, and which of them a rank plays in a step."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from prompt_r1.data.questions import find_questions, training_and_validation
from prompt_r1.data.sampler import questions_of_step
from prompt_r1.model.distributed import Ranks
from prompt_r1.pair.agent import check_question_lengths
from prompt_r1.protocol import Codec
from prompt_r1.settings.train import TrainConfig
from prompt_r1.types import Question


@dataclass(frozen=True)
class RunQuestions:
    """Questions to train on, to validate and to test with."""

    training: Sequence[Question]
    validation: Sequence[Question]
    test: Sequence[Question]
    per_step: int
    seed: int

    @classmethod
    def load(cls, config: TrainConfig, codec: Codec) -> "RunQuestions":
        """Read the questions. Raises UsageError, also for a question that leaves the agent no room."""
        training, validation = training_and_validation(
            config.data, config.val_data, seed=config.seed, limit=config.val_limit
        )
        test = find_questions(config.test_data, "test", config.seed)
        check_question_lengths([*training, *validation, *test], codec, config.game)
        return cls(training, validation, test, config.questions, config.seed)

    def epoch(self, step: int, number: int) -> int:
        """How often the run has drawn question `number` of this step before."""
        return ((step - 1) * self.per_step + number) // len(self.training)

    def of_rank(self, step: int, ranks: Ranks) -> dict[int, Question]:
        """This rank's questions of a step, by their numbers in the step."""
        questions = questions_of_step(self.training, step, count=self.per_step, seed=self.seed)
        return {number: questions[number] for number in range(ranks.rank, len(questions), ranks.count)}


def with_steps(config: TrainConfig, count: int) -> TrainConfig:
    """Replace --epochs by the number of steps that it means for `count` training questions, rounded up."""
    if not config.epochs:
        return config
    steps = math.ceil(config.epochs * count / config.questions)
    return replace(config, steps=steps, epochs=0)


def repetition_note(config: TrainConfig, count: int) -> str:
    """A sentence on how often a run repeats its `count` training questions; "" if it does not."""
    drawn = config.steps * config.questions
    if drawn <= count:
        return ""
    return (
        f"Note: training repeats its questions: {config.steps:,} steps of {config.questions:,} draw each of "
        f"the {count:,} questions {drawn / count:,.1f} times on average (--epochs sets this number)"
    )
