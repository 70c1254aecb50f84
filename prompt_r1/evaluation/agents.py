"""The agents of an evaluation: say which they are, and check that the questions fit into their games."""

import sys
from collections.abc import Sequence
from pathlib import Path

from prompt_r1.data.files import question_key
from prompt_r1.data.questions import find_questions
from prompt_r1.errors import UsageError
from prompt_r1.evaluation.evaluation import Evaluation
from prompt_r1.pair.agent import check_question_lengths, load_codec
from prompt_r1.pair.named_agent import NamedAgent
from prompt_r1.programs.text import printable
from prompt_r1.settings.agent import is_mini_data
from prompt_r1.types import Question


def check_agents(evaluation: Evaluation) -> None:
    """Print which agents play, and check that the questions fit into their games."""
    for agent in evaluation.agents.values():
        for line in notes_on(agent, evaluation):
            print(printable(line), file=sys.stderr, flush=True)
        codec = load_codec(agent.make(agent.config.seed), agent.config)
        check_question_lengths(evaluation.questions, codec, agent.config.game)


def notes_on(agent: NamedAgent, evaluation: Evaluation) -> list[str]:
    """Which agent plays, and notes on how it was trained."""
    environments = ",".join(evaluation.environments) or "none"
    lines = [agent.describe(environment=environments, seed=evaluation.seed)]
    known = count_in_training_files(agent, evaluation.questions)
    if known:
        lines.append(
            f"Note: {known:,} of these {len(evaluation.questions):,} questions are in the files of the "
            "agent's training, as far as these are here; `python -m prompt_r1.data split` holds some out"
        )
    if agent.config.reward:
        # The name was read from the agent's folder, which may come from anyone, so it is not imported.
        lines.append(
            f"Note: the agent was trained with --reward {agent.config.reward}. `reward` in the "
            "results is the reward of eq. 15 under --rule, not this one"
        )
    return lines


def count_in_training_files(agent: NamedAgent, questions: Sequence[Question]) -> int:
    """How many of the questions are in the files of an agent's training, as far as these are here."""
    if not agent.trained:
        return 0
    # The folder of an agent may come from anyone, so no code is run that it names.
    files = [name for name in agent.config.data if is_mini_data(name) or Path(name).is_file()]
    try:
        trained = find_questions(files, "train", agent.config.seed)
    except UsageError:  # The files have changed since the training.
        return 0
    keys = {question_key(question.text) for question in trained}
    return sum(question_key(question.text) in keys for question in questions)
