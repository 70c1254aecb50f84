"""What evaluate.py prints about an agent: which one plays, and notes on its training."""

from collections.abc import Sequence
from pathlib import Path

from prompt_r1.data.files import question_key
from prompt_r1.data.questions import find_questions, hold_out_a_tenth
from prompt_r1.errors import UsageError
from prompt_r1.evaluation.evaluation import Evaluation
from prompt_r1.evaluation.predictions import FILE
from prompt_r1.evaluation.tables import RESULTS
from prompt_r1.pair.named_agent import NamedAgent, trained_config
from prompt_r1.settings.agent import HELD_OUT, is_mini_data
from prompt_r1.types import Question


def lines_about(agent: NamedAgent, evaluation: Evaluation) -> list[str]:
    """Which agent plays, and notes on how it was trained."""
    environments = ",".join(evaluation.environments) or "none"
    lines = [agent.describe(environment=environments, seed=evaluation.seed)]
    known = trained_on(agent, evaluation.questions)
    if known:
        lines.append(
            f"Note: the agent was trained on {known:,} of these {len(evaluation.questions):,} questions, as "
            "far as its question files are here; `python -m prompt_r1.data split` holds some out"
        )
    if agent.config.reward:
        # MODULE:FUNCTION was read from the agent's folder, which may come from anyone, so it is not imported.
        lines.append(
            f"Note: the agent was trained with --reward {agent.config.reward}. `reward` in {FILE} and "
            f"{RESULTS} is the reward of eq. 15 under --rule, not this one"
        )
    return lines


def trained_on(agent: NamedAgent, questions: Sequence[Question]) -> int:
    """How many of the questions the agent was trained on, as far as its question files are here.

    This is an estimate if the run held out a tenth of its data, and some of it is not here: what was held out
    depends on all of it.
    """
    if trained_config(agent.path) is None:
        return 0
    # The folder of an agent may come from anyone, so no code is run that it names.
    files = [name for name in agent.config.data if is_mini_data(name) or Path(name).is_file()]
    try:
        trained = find_questions(files, "train", agent.config.seed)
    except UsageError:  # The files have changed since the training.
        return 0
    if tuple(agent.config.val_data) == (HELD_OUT,):
        trained, _ = hold_out_a_tenth(trained, agent.config.val_limit)
    keys = {question_key(question.text) for question in trained}
    return sum(question_key(question.text) in keys for question in questions)
