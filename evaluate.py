"""Score methods on questions: `python evaluate.py [--data FILE …] [--method NAME …] [--agent …] [--env …]`.

    direct      the environment alone, asked the question itself
    untrained   the agent before training, in the same game
    prompt-r1   the trained agent

docs/evaluation.md describes the other methods and the tables. Each answer is appended to predictions.jsonl in
the folder --out. If the same command is given again, it asks only for missing and failed answers, and writes
the tables anew.
"""

if __name__ == "__main__":  # The imports below take seconds. --help and usage errors do not wait for them.
    from prompt_r1.programs.installation import check_installation

    check_installation()
    from prompt_r1.evaluation.systems import read_evaluate_config
    from prompt_r1.programs.command_line import read_settings

    settings = read_settings(read_evaluate_config)

import asyncio
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path

from tqdm import tqdm

from prompt_r1.data.questions import sample_questions
from prompt_r1.environments.budget import Price
from prompt_r1.environments.environment import Environment
from prompt_r1.environments.specs import open_account, open_environment
from prompt_r1.errors import Resumable, UsageError
from prompt_r1.evaluation.dry_run import estimate
from prompt_r1.evaluation.folder_settings import keep_settings
from prompt_r1.evaluation.methods import METHODS, Setup
from prompt_r1.evaluation.predictions import FILE, Prediction, PredictionFile, System
from prompt_r1.evaluation.scores import score_predictions
from prompt_r1.evaluation.settings import EvaluateConfig
from prompt_r1.evaluation.similarity import SentenceEncoder, load_encoder
from prompt_r1.evaluation.systems import (
    choose_systems,
    common_seed,
    digests_of_systems,
    environments_of,
    preparation_questions,
    prices_of,
    resolve_agents,
    setup_of,
    trained_on,
)
from prompt_r1.evaluation.tables import TABLES, terminal_table, write_results
from prompt_r1.model.distributed import pick_device
from prompt_r1.pair.agent import check_question_lengths, load_codec
from prompt_r1.pair.named_agent import NamedAgent, trained_config
from prompt_r1.programs.command_line import command, run_program
from prompt_r1.programs.progress import progress_style
from prompt_r1.programs.text import printable
from prompt_r1.rollout import run_together
from prompt_r1.settings.fields import experiment_values
from prompt_r1.settings.functions import import_metric
from prompt_r1.types import Question

Repeat = tuple[Question, int]
"""A question, and the number of its repeat (--repeats)."""


def main(config: EvaluateConfig) -> None:
    """Ask for the answers that are missing, and write the tables."""
    device = pick_device(config.device)
    encoder = load_encoder(config.ssim_model, device)  # If it is missing, no call is made.
    agents = resolve_agents(config)
    seed = common_seed(config, agents)
    questions = questions_of(config, seed)
    datasets = list(dict.fromkeys(question.dataset for question in questions))
    environments = environments_of(config, agents)
    describe_agents(agents, environments, seed, questions)
    systems = choose_systems(config, environments, agents)
    prices = prices_of(config, environments)
    if config.dry_run:
        print(estimate(config, systems, environments, prices, questions, seed=seed))
        return
    folder = Path(config.out)

    with closing(PredictionFile(folder / FILE)) as file:
        # A folder whose answers have other settings, files or agents is refused.
        experiment = experiment_values(config) | {"seed": seed}
        keep_settings(folder, experiment, digests_of_systems(config, systems))
        wanted: list[Repeat] = []
        for question in questions:
            wanted += [(question, sample) for sample in range(config.repeats)]
        missing = missing_answers(file, systems, wanted)
        try:
            # A complete evaluation opens no environment and no journal.
            if missing:
                train, validation = preparation_questions(config, missing, seed)
                make_setup = partial(
                    setup_of,
                    config=config,
                    environments=environments,
                    prices=prices,
                    datasets=datasets,
                    train=train,
                    validation=validation,
                    device=device,
                    seed=seed,
                )
                # Only specs that the user typed may get the key. `others` are all specs that this run opens.
                open_one = partial(
                    open_environment,
                    typed=[*config.env, config.optimizer_env],
                    others={config.optimizer_env, *(system.environment for system in systems)},
                    account=open_account(config, folder),  # All systems share its journal and its budget.
                    seed=seed,
                    device=device,
                )
                asyncio.run(answer_missing(missing, systems, make_setup, open_one, file))
        finally:
            # If something has failed, the rows that are finished are still shown.
            predictions = file.answers_to(wanted, systems)
            if predictions:
                show_results(predictions, config, agents, encoder, folder)

    if config.tables and not config.method:
        print_left_out(config, systems)
    print(f"\nIn {folder / TABLES}: each dataset, also in the form of the paper's tables")
    raise_for_failed_calls([prediction for prediction in predictions if prediction.system in systems])


def questions_of(config: EvaluateConfig, seed: int) -> list[Question]:
    """The questions of --data. With --tables, the mini world also has its questions out of distribution."""
    names = list(config.data)
    if config.tables and names == ["mini"]:
        names.append("mini:ood")
    questions: list[Question] = []
    for name in names:
        questions += sample_questions([name], "test", seed, config.limit)
    counts = Counter((question.dataset, question.id) for question in questions)
    for (dataset, identity), count in counts.items():
        if count > 1:
            raise UsageError(f"--data: question {identity!r} of {dataset} occurs twice; give each file once")
    return questions


def describe_agents(
    agents: Mapping[str, NamedAgent], environments: Iterable[str], seed: int, questions: Sequence[Question]
) -> None:
    """Print which agents play. Raises QuestionTooLong for a question that leaves an agent no room."""
    playing = ",".join(environments)
    for agent in agents.values():
        print(printable(agent.describe(environment=playing, seed=seed)), file=sys.stderr, flush=True)
        known = trained_on(agent, questions)
        if known:
            print(
                f"Note: the agent was trained on {known:,} of these {len(questions):,} questions; "
                "`python -m prompt_r1.data split` holds some out",
                file=sys.stderr,
                flush=True,
            )
        check_question_lengths(questions, load_codec(agent.path, agent.config), agent.config.game)


def missing_answers(
    file: PredictionFile, systems: Mapping[System, NamedAgent], wanted: Sequence[Repeat]
) -> dict[System, list[Repeat]]:
    """What each system has not answered yet. Systems that have answered everything are left out."""
    missing = {}
    for system in systems:
        unanswered = [repeat for repeat in wanted if file.find(system, *repeat) is None]
        if unanswered:
            missing[system] = unanswered
    return missing


async def answer_missing(
    missing: Mapping[System, Sequence[Repeat]],
    systems: Mapping[System, NamedAgent],
    make_setup: Callable[..., Setup],
    open_one: Callable[..., Environment],
    file: PredictionFile,
) -> None:
    """Let each system answer the questions that the file lacks, system by system."""
    for system, unanswered in missing.items():
        # An environment may be a model in this process. `answer_system` holds it in local variables, so it
        # is freed when the function returns, before the next system loads a model.
        await answer_system(system, systems[system], unanswered, make_setup, open_one, file)


async def answer_system(
    system: System,
    agent: NamedAgent,
    unanswered: Sequence[Repeat],
    make_setup: Callable[..., Setup],
    open_one: Callable[..., Environment],
    file: PredictionFile,
) -> None:
    """Let a system answer the questions that the file lacks, and close the environments that it opens."""
    async with AsyncExitStack() as opened:

        def open_and_close_later(
            spec: str, settings: EvaluateConfig, *, prices: Mapping[str, Price]
        ) -> Environment:
            environment = open_one(spec, settings, prices=prices)
            opened.push_async_callback(environment.close)
            return environment

        setup = make_setup(system, agent, open_environment=open_and_close_later)
        await answer_all(system, setup, unanswered, file)


async def answer_all(
    system: System, setup: Setup, unanswered: Sequence[Repeat], file: PredictionFile
) -> None:
    """Make a system's method, answer all questions concurrently, and write each answer at once.

    If a call fails, the error is recorded in place of the answer. Any other error cancels the other questions
    and is raised. At the end the method's agent is freed, before the next agent is loaded.
    """
    if setup.environment is not None:
        await setup.environment.check()  # If the environment does not answer, no agent is loaded.
    answer = await METHODS[system.method].make(setup)

    with tqdm(total=len(unanswered), desc=str(system), **progress_style()) as bar:

        async def answer_one(question: Question, sample: int) -> None:
            prediction = await answer(question, sample)
            file.add(replace(prediction, sample=sample, system=system))
            bar.update()

        await run_together(answer_one(question, sample) for question, sample in unanswered)


def show_results(
    predictions: Sequence[Prediction],
    config: EvaluateConfig,
    agents: Mapping[str, NamedAgent],
    encoder: SentenceEncoder | None,
    folder: Path,
) -> None:
    """Score the predictions, print the table, then write all tables."""
    results = score_predictions(
        predictions,
        official=config.metrics == "official",
        encoder=encoder,
        own_metrics={name: import_metric(name) for name in config.metric},
    )
    trained_with = {name: agent.config.env for name, agent in agents.items() if trained_config(agent.path)}
    print(terminal_table(results))  # Printed first, because the disk may be full.
    write_results(folder, results, trained_with)


def print_left_out(config: EvaluateConfig, systems: Mapping[System, NamedAgent]) -> None:
    """Print which of the paper's methods --tables has left out, and what these methods need."""
    if not config.grpo_agent:
        train = command("train.py", "--env", "none")
        print(f"\ngrpo-only is left out: `{train}` trains its agent for --grpo-agent RUN")
    if not any(METHODS[system.method].needs.optimizer for system in systems):
        print("\nSearches are left out: they need an LLM that writes prompts; name it with --optimizer-env")


def raise_for_failed_calls(predictions: Sequence[Prediction]) -> None:
    """Raise Resumable if answers are missing because calls failed."""
    errors = Counter(prediction.error for prediction in predictions if prediction.error)
    if errors:
        raise Resumable(
            f"{errors.total()} answers are missing because calls failed; the same command asks for them "
            f"again; most often: {errors.most_common(1)[0][0]}"
        )


if __name__ == "__main__":
    run_program(main, settings, then="asks for the missing answers")
