"""Make a method: prepare the function that answers its questions (`ReadyMethod`).

methods.py says what each method is.
"""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

from prompt_r1.environments.check import check_servers
from prompt_r1.environments.environment import Environment
from prompt_r1.environments.specs import Account
from prompt_r1.evaluation.ask_once import direct
from prompt_r1.evaluation.evaluation import Evaluation, file_name
from prompt_r1.evaluation.imitation import fine_tuned_agent
from prompt_r1.evaluation.methods import METHODS, Method
from prompt_r1.evaluation.predictions import Prediction, System, prediction_of
from prompt_r1.evaluation.searches import ALL, SEED_PROMPT, Algorithm, PromptSearch
from prompt_r1.model.machine import use_threads
from prompt_r1.pair.agent import Agent, Sampling, load_agent, play_question
from prompt_r1.reward import Rule, score_games
from prompt_r1.spending import Spending
from prompt_r1.types import Question

logger = logging.getLogger(__name__)

ReadyMethod = Callable[[Question, int], Awaitable[Prediction]]
"""A method that is ready: a question and the number of its repeat → a prediction. Calls may overlap."""


@asynccontextmanager
async def open_method(evaluation: Evaluation, system: System, account: Account) -> AsyncIterator[ReadyMethod]:
    """Open the environment of a system, make its method, and close the environment in the end.

    Environment and agent may be models in this process. Nothing else refers to them, so they are freed before
    the next system loads its own.
    """
    environment = evaluation.open_environment(system, account)
    try:
        await check_servers(environment)  # If the environment does not answer, no other model is loaded.
        yield await make_method(evaluation, system, environment, account)
    finally:
        await environment.close()


async def make_method(
    evaluation: Evaluation, system: System, environment: Environment, account: Account
) -> ReadyMethod:
    """Make the method of a system: search for its prompts, or fine-tune and load its agent.

    `environment` is mute for a method that needs none. The calls of a search are in `account`.
    """
    method = METHODS[system.method]
    if method.ask is not None:
        return partial(method.ask, environment)
    if method.algorithm is not None:
        optimizer = evaluation.open_optimizer(system, method.algorithm, account)
        try:
            if evaluation.config.optimizer_env:  # Without it, the environment writes prompts, and is checked.
                await check_servers(optimizer)
            prompts = await find_prompts(evaluation, system, method.algorithm, environment, optimizer)
        finally:
            await optimizer.close()
        return answer_under_prompts(prompts, environment)
    agent = evaluation.systems[system]
    assert agent is not None, f"{system.method} has no agent that plays"
    if method.fine_tuned_on is None:
        player = agent
        path = agent.make(agent.config.seed)
    else:
        player = await fine_tuned_agent(evaluation, system, agent, environment)
        path = player.path
    config = evaluation.config
    use_threads(in_training=player.config.threads)
    return answer_by_games(
        load_agent(path, player.config, evaluation.device),
        environment,
        player.config.base_rule,
        Sampling(f"evaluation/{evaluation.seed}", config.temperature, config.top_p),
        method,
    )


def answer_by_games(
    agent: Agent, environment: Environment, rule: Rule, sampling: Sampling, method: Method
) -> ReadyMethod:
    """The method, ready to answer each question by a game of this agent.

    Each game has its own seed, which begins with the seed of `sampling`.
    """

    async def answer(question: Question, sample: int) -> Prediction:
        game_sampling = replace(sampling, seed=f"{sampling.seed}/{question.id}/{sample}")
        game = await play_question(agent, environment, question, game_sampling, sample=sample)
        [reward] = score_games([game], rule=rule)
        prediction = prediction_of(game, reward)
        if not method.needs_environment:  # The environment is mute, and its calls do not count.
            prediction = replace(prediction, spent=Spending())
        if method.fine_tuned_on == "gold answers" and not prediction.error:
            # Gold answers have no think blocks, so a game has the right format if it has an answer.
            prediction = replace(prediction, format=float(game.answer is not None))
        return prediction

    return answer


async def find_prompts(
    evaluation: Evaluation,
    system: System,
    algorithm: Algorithm,
    environment: Environment,
    optimizer: Environment,
) -> dict[str, str]:
    """Search for the prompt of each dataset, and write the prompts to the system's folder.

    Datasets without a search of their own share the prompt of ALL (see `data_of_searches`).
    """
    config = evaluation.config
    folder = evaluation.folder_of(system)
    folder.mkdir(parents=True, exist_ok=True)
    prompts: dict[str, str] = {}
    for name, data in evaluation.searches.items():
        search = PromptSearch(
            f"{system.method} ({name})",
            environment,
            optimizer,
            limit=config.optimize_calls,
            examples=config.optimize_examples,
            seed=evaluation.seed,
        )
        found = await algorithm.find_prompt(search, data)
        if found == SEED_PROMPT:
            logger.warning("%s found no better prompt than its seed in %d calls", search.name, search.calls)
        (folder / f"{file_name(name)}.txt").write_text(found, "utf-8", "replace")
        prompts[name] = found
    return prompts


def answer_under_prompts(prompts: Mapping[str, str], environment: Environment) -> ReadyMethod:
    """The method, ready to ask each question once, under the prompt of its dataset or else of ALL."""

    async def answer(question: Question, sample: int) -> Prediction:
        name = question.dataset if question.dataset in prompts else ALL
        return await direct(environment, question, sample, prompt=prompts[name])

    return answer
