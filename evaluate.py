"""Score methods on questions: `python evaluate.py [--data FILE …] [--method NAME …] [--agent …] [--env …]`.

    direct      the environment alone, asked the question itself
    untrained   the agent before training, in the same game
    prompt-r1   the trained agent

A *system* is a method with its environment and its agent. A *repeat* is a question with the number of its
answer, because each system answers every question --repeats times. Each answer of a system is appended to
predictions.jsonl in the folder --out. If the same command is given again, it asks only for missing and failed
answers, and writes the tables anew. docs/evaluation.md describes the other methods and the tables.
"""

if __name__ == "__main__":  # Show --help and usage errors before the imports below, which take seconds.
    from prompt_r1.programs.installation import check_installation

    check_installation()
    from prompt_r1.evaluation.preflight import read_evaluation
    from prompt_r1.programs.command_line import begin_imports, read_settings

    evaluation = read_settings(read_evaluation)
    begin_imports()

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import closing

from prompt_r1.environments.specs import Account, open_account
from prompt_r1.errors import Resumable
from prompt_r1.evaluation.agents import check_agents
from prompt_r1.evaluation.dry_run import estimate
from prompt_r1.evaluation.evaluation import Evaluation, Repeat
from prompt_r1.evaluation.folder_settings import write_settings
from prompt_r1.evaluation.making import open_method
from prompt_r1.evaluation.predictions import FILE, Prediction, PredictionFile, System
from prompt_r1.evaluation.scores import score_predictions
from prompt_r1.evaluation.similarity import SentenceEncoder, load_encoder
from prompt_r1.evaluation.tables import TABLES, terminal_table, write_results
from prompt_r1.model.machine import pick_device, use_threads
from prompt_r1.programs.command_line import run_program
from prompt_r1.programs.progress import progress_bar
from prompt_r1.rollout import run_together
from prompt_r1.types import Question


def main(evaluation: Evaluation) -> None:
    """Ask for the answers that are missing, score all answers, and write the tables."""
    config = evaluation.config
    use_threads()
    # The encoder is loaded first: if its files are missing, no call has been paid for.
    encoder = load_encoder(config.ssim_model, pick_device(config.device))
    check_agents(evaluation)
    if config.dry_run:
        print(estimate(evaluation))
        return
    with closing(PredictionFile(evaluation.folder / FILE)) as file:
        write_settings(evaluation)  # Raises UsageError if the folder's answers depend on other settings.
        try:
            asyncio.run(ask_missing(evaluation, file))
        finally:  # If a method cannot go on, the finished answers are still shown.
            # The tables also show what other systems in the file have answered, in earlier commands.
            answers = file.answers_to(evaluation.repeats, first=evaluation.systems)
            if answers:
                show_results(evaluation, answers, encoder)
    print(f"\nIn {evaluation.folder / TABLES}: each dataset, also in the form of the paper's tables")
    raise_for_failed_calls(evaluation, answers)


async def ask_missing(evaluation: Evaluation, file: PredictionFile) -> None:
    """Let each system answer the questions that the file lacks, one system after the other."""
    missing: dict[System, list[Repeat]] = {}
    for system in evaluation.systems:
        unanswered = [repeat for repeat in evaluation.repeats if file.find(system, *repeat) is None]
        if unanswered:
            missing[system] = unanswered
    if not missing:  # A complete evaluation opens no environment and no journal.
        return
    account = open_account(evaluation.config, evaluation.folder)  # the journal and budget of all systems
    for system, unanswered in missing.items():
        await ask_system(evaluation, system, unanswered, account, file)


async def ask_system(
    evaluation: Evaluation,
    system: System,
    unanswered: Sequence[Repeat],
    account: Account,
    file: PredictionFile,
) -> None:
    """Make a system's method, answer all questions concurrently, and write each answer when it is there.

    If a call fails, the error is recorded in place of the answer. Any other error cancels the other questions
    and is raised.
    """
    async with open_method(evaluation, system, account) as answer:
        with progress_bar(name=str(system), total=len(unanswered)) as bar:

            async def answer_one(question: Question, sample: int) -> None:
                file.add(await answer(question, sample))
                bar.update()

            await run_together(answer_one(question, sample) for question, sample in unanswered)


def show_results(
    evaluation: Evaluation, answers: Sequence[Prediction], encoder: SentenceEncoder | None
) -> None:
    """Score the answers, print the table, then write all tables."""
    results = score_predictions(
        answers,
        official=evaluation.config.metrics == "official",
        encoder=encoder,
        own_metrics=evaluation.metrics,
    )
    print(terminal_table(results))  # Printed first, because the disk may be full.
    agents = {name: evaluation.agents[name] for name in evaluation.config.agent}
    trained_with = {name: agent.config.env for name, agent in agents.items() if agent.trained}
    write_results(evaluation.folder, results, trained_with)


def raise_for_failed_calls(evaluation: Evaluation, answers: Sequence[Prediction]) -> None:
    """Raise Resumable if answers are missing because calls failed."""
    errors = Counter[str]()
    for answer in answers:
        # This command cannot ask the other systems in the file again.
        if answer.error and answer.system in evaluation.systems:
            errors[answer.error] += 1
    if errors:
        raise Resumable(
            f"{errors.total()} answers are missing because calls failed; the same command asks for them "
            f"again; most often: {errors.most_common(1)[0][0]}"
        )


if __name__ == "__main__":
    run_program(main, evaluation, then="asks for the missing answers")
