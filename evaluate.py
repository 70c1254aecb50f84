"""Score methods on questions: `python evaluate.py [--data FILE …] [--method NAME …] [--agent …] [--env …]`.

    direct      the environment alone, asked the question itself
    untrained   the agent before training, in the same game
    prompt-r1   the trained agent

docs/evaluation.md describes the other methods and the tables. Each answer is appended to
predictions.jsonl in the folder --out. The same command again asks only for missing and failed answers, and
writes the tables anew.
"""

if __name__ == "__main__":  # --help and usage errors, before the imports below take seconds
    from prompt_r1.programs.installation import check_installation

    check_installation()
    from prompt_r1.evaluation.systems import read_evaluate_config
    from prompt_r1.programs.command_line import read_settings

    settings = read_settings(read_evaluate_config)

import asyncio
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

from prompt_r1.data.questions import sample_questions
from prompt_r1.environments.specs import Account, open_account, open_environment
from prompt_r1.errors import Resumable, UsageError
from prompt_r1.evaluation.folder_settings import keep_settings
from prompt_r1.evaluation.methods import METHODS, Setup
from prompt_r1.evaluation.predictions import FILE, Prediction, PredictionFile, System
from prompt_r1.evaluation.results_folder import TABLES, write_results
from prompt_r1.evaluation.scores import score_predictions
from prompt_r1.evaluation.settings import EvaluateConfig
from prompt_r1.evaluation.similarity import SentenceEncoder, load_encoder
from prompt_r1.evaluation.systems import (
    choose_systems,
    common_seed,
    digests_of_systems,
    environments_of,
    resolve_agents,
    results_folder,
    setup_of,
)
from prompt_r1.model.distributed import pick_device
from prompt_r1.pair.agent import check_question_lengths, load_codec
from prompt_r1.pair.trained import AgentSpec, trained_config
from prompt_r1.programs.command_line import command, run_program
from prompt_r1.programs.progress import progress_style
from prompt_r1.programs.text import printable
from prompt_r1.settings.fields import identifying_values
from prompt_r1.types import Question

Pair = tuple[Question, int]
"""A question, and the number of its repeat."""


def main(config: EvaluateConfig) -> None:
    """Ask for the answers that are missing, and write the tables."""
    device = pick_device(config.device)
    encoder = load_encoder(config.ssim_model, device)  # A missing one is reported before any call is made.
    agents = resolve_agents(config)
    seed = common_seed(config, agents)
    questions = load_questions(config, seed)
    datasets = list(dict.fromkeys(question.dataset for question in questions))
    describe_agents(config, agents, seed, questions)
    systems = choose_systems(config, agents)
    folder = results_folder(config)

    with closing(PredictionFile(folder / FILE)) as file:
        identifying = identifying_values(config) | {"seed": seed}
        keep_settings(folder, identifying, digests_of_systems(config, systems))
        wanted: list[Pair] = []
        for question in questions:
            wanted += [(question, sample) for sample in range(config.repeats)]
        missing = missing_answers(file, systems, wanted)
        try:
            # An evaluation that is complete opens no environment and no journal.
            if missing:
                account = open_account(config, folder)
                make_setup = setup_maker(
                    config,
                    systems,
                    account=account,
                    datasets=datasets,
                    device=device,
                    seed=seed,
                    folder=folder,
                )
                asyncio.run(answer_missing(missing, systems, make_setup, file, account))
        finally:
            # The rows that are finished are shown whatever has failed after them.
            predictions = file.answers_to(wanted, systems)
            if predictions:
                print(tables_of(predictions, config, agents, encoder, folder))

    if config.tables and not config.method:
        print_left_out(config, systems)
    print(f"\nIn {folder / TABLES}: all datasets, and the paper's tables")
    raise_for_failed_calls([one for one in predictions if one.system in systems])


def load_questions(config: EvaluateConfig, seed: int) -> list[Question]:
    """The questions of --data; with --tables and the mini world also those out of distribution."""
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
    config: EvaluateConfig, agents: Mapping[str, AgentSpec], seed: int, questions: Sequence[Question]
) -> None:
    """Say which agents play. Raises QuestionTooLong for a question that leaves an agent no room."""
    playing = ",".join(environments_of(config, agents))
    for agent in agents.values():
        print(printable(agent.describe(environment=playing, seed=seed)), file=sys.stderr, flush=True)
        check_question_lengths(questions, load_codec(agent.path, agent.config), agent.config.game)


def missing_answers(
    file: PredictionFile, systems: Mapping[System, AgentSpec], wanted: Sequence[Pair]
) -> dict[System, list[Pair]]:
    """What each system has not answered yet; systems that have answered everything are left out."""
    missing = {}
    for system in systems:
        asked = [pair for pair in wanted if file.find(system, *pair) is None]
        if asked:
            missing[system] = asked
    return missing


def setup_maker(
    config: EvaluateConfig,
    systems: Mapping[System, AgentSpec],
    *,
    account: Account,
    datasets: Sequence[str],
    device: torch.device,
    seed: int,
    folder: Path,
) -> Callable[[System, AgentSpec], Setup]:
    """What gives each system what its method is made from, all with one journal and one budget."""
    specs = {config.optimizer_env, *(system.environment for system in systems)} - {""}
    open_one = partial(
        open_environment,
        config=config,
        typed=[*config.env, config.optimizer_env],
        others=specs,
        account=account,
        seed=seed,
        device=device,
    )
    return partial(
        setup_of,
        config=config,
        open_environment=open_one,
        datasets=datasets,
        device=device,
        seed=seed,
        folder=folder,
    )


async def answer_missing(
    missing: Mapping[System, Sequence[Pair]],
    agents: Mapping[System, AgentSpec],
    make_setup: Callable[[System, AgentSpec], Setup],
    file: PredictionFile,
    account: Account,
) -> None:
    """Let each system answer the questions that the file lacks, system by system."""
    try:
        for system, asked in missing.items():
            await answer_all(system, make_setup(system, agents[system]), asked, file)
    finally:
        await account.close()


async def answer_all(system: System, setup: Setup, asked: Sequence[Pair], file: PredictionFile) -> None:
    """Make a system's method, answer all questions concurrently, and write each answer at once.

    A failed call of one question is recorded with its answer; any other error is raised, and asyncio.run
    cancels the rest. The method's agent is freed at the end, before the next one is loaded.
    """
    if setup.environment is not None:
        await setup.environment.check()  # A large agent is loaded only if the environment answers.
    answer = await METHODS[system.method].make(setup)

    async def answer_one(question: Question, sample: int) -> None:
        prediction = await answer(question, sample)
        file.add(replace(prediction, sample=sample, system=system))
        bar.update()

    with tqdm(total=len(asked), desc=str(system), leave=False, **progress_style()) as bar:
        await asyncio.gather(*(answer_one(question, sample) for question, sample in asked))


def tables_of(
    predictions: Sequence[Prediction],
    config: EvaluateConfig,
    agents: Mapping[str, AgentSpec],
    encoder: SentenceEncoder | None,
    folder: Path,
) -> str:
    """Score the predictions and write the tables; returns the table for the terminal."""
    results = score_predictions(predictions, official=config.metrics == "official", encoder=encoder)
    trained_with = {name: agent.config.env for name, agent in agents.items() if trained_config(agent.path)}
    return write_results(folder, results, trained_with)


def print_left_out(config: EvaluateConfig, systems: Mapping[System, AgentSpec]) -> None:
    """Say which of the paper's methods --tables has left out, and what they need."""
    if not config.grpo_agent:
        train = command("train.py", "--env", "none")
        print(f"\ngrpo-only is left out: `{train}` trains its agent for --grpo-agent RUN")
    if not any(METHODS[system.method].needs.optimizer for system in systems):
        print("\nSearches are left out: the mini world writes no prompts; --optimizer-env names what does")


def raise_for_failed_calls(predictions: Sequence[Prediction]) -> None:
    """Raise Resumable if answers are missing because calls failed."""
    errors = Counter(one.error for one in predictions if one.error)
    if errors:
        raise Resumable(
            f"{errors.total()} answers are missing because calls failed; the same command asks for them "
            f"again; most often: {errors.most_common(1)[0][0]}"
        )


if __name__ == "__main__":
    run_program(main, settings, then="asks for the missing answers")
