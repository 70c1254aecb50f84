"""The test after a training: environment, untrained agent and trained agent answer the same questions.

It is a small evaluation in the process of train.py. Answers are read, scored and averaged as in evaluate.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from prompt_r1.environments.environment import Environment
from prompt_r1.evaluation.ask_once import direct
from prompt_r1.evaluation.predictions import Prediction, System, prediction_of
from prompt_r1.evaluation.scores import Means, score_predictions
from prompt_r1.evaluation.tables import UNKNOWN, datasets_table, notes_on_texts, rate_text
from prompt_r1.pair.agent import load_agent
from prompt_r1.programs.progress import progress_bar
from prompt_r1.programs.tables import text_table
from prompt_r1.rollout import run_together
from prompt_r1.training.run import Run
from prompt_r1.training.run_folder import TEST_FILE
from prompt_r1.training.validation import play_share
from prompt_r1.types import Question


def compare_on_test(run: Run) -> str:
    """Let the environment, the untrained agent and the trained agent answer the questions of the test.

    Called by every rank, which asks its share of the questions. Writes the means by dataset to TEST_FILE in
    the run folder, and the games to trajectories/. Returns the table for a terminal.
    """
    questions = run.questions.test
    own = run.ranks.share(questions)
    asked = len(own) * (2 if run.config.without_environment else 3)
    answers: list[Prediction] = []
    with progress_bar(name="test", total=asked, shown=run.ranks.is_first) as bar:
        if not run.config.without_environment:
            answers += run.wait_for(ask_alone(own, run.environment, after_each=bar.update))
        for name, path in [("untrained", run.start), ("trained", run.folder / "agent")]:
            agent = load_agent(path, run.config, run.ranks.device)
            games = play_share(run, agent, questions, name=f"test-{name}", after_each=bar.update)
            system = System(f"{name} agent")
            answers += [prediction_of(system, game.trajectory, 0, game.reward) for game in games]
            del agent  # Its memory is free before the next agent is loaded.
    # The columns that only rewards read may hold objects that cannot be sent to other ranks.
    sendable = [replace(answer, question=replace(answer.question, extra={})) for answer in answers]
    return write_test(run, run.ranks.gather_lists(sendable))


async def ask_alone(
    questions: Sequence[Question], environment: Environment, *, after_each: Callable[[], object]
) -> list[Prediction]:
    """Ask the environment the questions themselves, all concurrently, as the method `direct`."""

    system = System("environment alone")

    async def ask_one(question: Question) -> Prediction:
        prediction = await direct(environment, system, question, 0)
        after_each()
        return prediction

    return await run_together(map(ask_one, questions))


def write_test(run: Run, predictions: Sequence[Prediction]) -> str:
    """Write the means by dataset to TEST_FILE. Returns the means over all questions, for a terminal."""
    results = score_predictions(predictions)
    parts = [datasets_table(results, cells_of_test), *notes_on_texts(results)]
    file = run.folder / TEST_FILE
    run.ranks.on_first_rank(lambda: file.write_text("\n\n".join(parts) + "\n", "utf-8"))
    rows = []
    for system, means in results.means.items():
        rows.append({"test": str(system), **cells_of_test(means)})
    return text_table(list(rows[0]), [list(row.values()) for row in rows])


def cells_of_test(means: Means) -> dict[str, str]:
    """A row of the test: label of the column → text."""
    cells = {
        "n": str(means.n),
        "errors": str(means.errors),
        "EM": rate_text(means.rates.get("em"), interval=False),
        "F1": rate_text(means.rates.get("f1"), interval=False),
    }
    for name in ("reward", "format", "turns"):
        # The "z" writes a rounded -0.0 as 0.
        cells[name] = f"{means.counts[name]:z.3f}" if name in means.counts else UNKNOWN
    return cells
