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
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

from tqdm import tqdm

from prompt_r1.data.questions import sample_questions
from prompt_r1.environments.specs import open_account, open_environment
from prompt_r1.errors import Resumable, UsageError
from prompt_r1.evaluation.methods import MethodMaker
from prompt_r1.evaluation.predictions import FILE, PredictionFile, System
from prompt_r1.evaluation.results_folder import TABLES, write_results
from prompt_r1.evaluation.scores import score_predictions
from prompt_r1.evaluation.settings import EvaluateConfig
from prompt_r1.evaluation.similarity import REPOSITORY, SentenceEncoder
from prompt_r1.evaluation.systems import (
    choose_systems,
    common_seed,
    contents_of,
    environments_of,
    keep_settings,
    resolve_agents,
    results_folder,
)
from prompt_r1.model.distributed import pick_device
from prompt_r1.pair.agent import check_question_lengths, load_codec
from prompt_r1.pair.trained import trained_config
from prompt_r1.programs.command_line import command, run_program
from prompt_r1.programs.progress import progress_style
from prompt_r1.programs.text import printable
from prompt_r1.settings.fields import identifying_values
from prompt_r1.types import Question


def main(config: EvaluateConfig) -> None:
    """Ask for the answers that are missing, and write the tables."""
    device, encoder = pick_device(config.device), None
    if config.ssim_model:  # a missing encoder is reported before any call is made
        source = REPOSITORY if config.ssim_model == "auto" else Path(config.ssim_model)
        encoder = SentenceEncoder(source, device=device)
    agents = resolve_agents(config)
    seed = common_seed(config, agents)
    questions = load_questions(config, seed)
    systems = choose_systems(config, agents)
    playing = ",".join(environments_of(config, agents))
    for agent in agents.values():
        print(printable(agent.describe(environment=playing, seed=seed)), file=sys.stderr, flush=True)
        check_question_lengths(questions, load_codec(agent.path, agent.config), agent.config.game)
    folder = results_folder(config)
    with closing(PredictionFile(folder / FILE)) as file:
        keep_settings(folder, identifying_values(config) | {"seed": seed}, contents_of(config, systems))
        wanted = [(question, sample) for question in questions for sample in range(config.repeats)]
        missing = {
            system: [pair for pair in wanted if file.find(system, *pair) is None] for system in systems
        }
        if any(missing.values()):  # a complete evaluation needs no journal
            open_one = partial(
                open_environment,
                config=config,
                typed=[*config.env, config.optimizer_env],
                others={config.optimizer_env, *(system.environment for system in systems)} - {""},
                account=open_account(config, folder),
                seed=seed,
                device=device,
            )
            datasets = list(dict.fromkeys(question.dataset for question in questions))
            maker = MethodMaker(config, systems, datasets, open_one, device, seed, folder)
            asyncio.run(answer_missing(missing, maker, file))
        predictions = file.answers_to(wanted, systems)
        results = score_predictions(predictions, official=config.metrics == "official", encoder=encoder)
        trained_with = {name: spec.config.env for name, spec in agents.items() if trained_config(spec.path)}
        print(write_results(folder, results, trained_with))
    errors = Counter(one.error for one in predictions if one.error and one.system in systems)
    if config.tables and not config.method and not config.grpo_agent:
        train = command("train.py", "--env", "none")
        print(f"\ngrpo-only is left out: `{train}` trains its agent for --grpo-agent RUN")
    print(f"\nIn {folder / TABLES}: all datasets, and the paper's tables")
    if errors:
        raise Resumable(
            f"{errors.total()} answers are missing because calls failed; the same command asks for them "
            f"again; most often: {errors.most_common(1)[0][0]}"
        )


def load_questions(config: EvaluateConfig, seed: int) -> list[Question]:
    """The questions of --data; with --tables and the mini world also those out of distribution."""
    names = ("mini", "mini:ood") if config.tables and config.data == ("mini",) else config.data
    questions = [one for name in names for one in sample_questions([name], "test", seed, config.limit)]
    counts = Counter((one.dataset, one.id) for one in questions)
    for (dataset, identity), count in counts.items():
        if count > 1:
            raise UsageError(f"--data: question {identity!r} of {dataset} occurs twice; give each file once")
    return questions


async def answer_missing(
    missing: Mapping[System, Sequence[tuple[Question, int]]], maker: MethodMaker, file: PredictionFile
) -> None:
    """Let each system answer the questions that the file lacks, system by system."""
    for system, asked in missing.items():
        if asked:
            await answer_all(system, asked, maker, file)


async def answer_all(
    system: System, asked: Sequence[tuple[Question, int]], maker: MethodMaker, file: PredictionFile
) -> None:
    """Answer all questions concurrently, and write each answer at once.

    A failed call of one question is recorded with its answer; any other error is raised, and asyncio.run
    cancels the rest.
    """
    answer = await maker.make(system)

    async def answer_one(question: Question, sample: int) -> None:
        found = await answer(question, sample)
        file.add(replace(found, sample=sample, system=system))
        bar.update()

    with tqdm(total=len(asked), desc=str(system), leave=False, **progress_style()) as bar:
        await asyncio.gather(*(answer_one(*pair) for pair in asked))


if __name__ == "__main__":
    run_program(main, settings, then="asks for the missing answers")
