"""Make a method: prepare the function that answers its questions (`ReadyMethod`).

methods.py says what each method is.
"""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial

from prompt_r1.environments.check import check_servers
from prompt_r1.environments.environment import Environment
from prompt_r1.environments.own import MuteEnvironment, OwnSource
from prompt_r1.environments.sources import limit_in
from prompt_r1.environments.specs import Account, open_environment
from prompt_r1.evaluation.ask_once import direct
from prompt_r1.evaluation.evaluation import Evaluation
from prompt_r1.evaluation.imitation import fine_tuned_agent
from prompt_r1.evaluation.methods import METHODS
from prompt_r1.evaluation.predictions import Prediction, System, prediction_of
from prompt_r1.evaluation.searches import (
    ALL,
    SEED_PROMPT,
    Algorithm,
    PromptSearch,
    RequestFields,
    data_of_searches,
)
from prompt_r1.model.machine import pick_device, use_threads
from prompt_r1.pair.agent import Agent, Sampling, load_agent, play_question
from prompt_r1.programs.files import file_name
from prompt_r1.reward import Rule, score_games
from prompt_r1.spending import Spending
from prompt_r1.types import Question

logger = logging.getLogger(__name__)

OPTIMIZER_REPLY = 2000  # tokens of what an optimiser writes, if nothing else limits it

ReadyMethod = Callable[[Question, int], Awaitable[Prediction]]
"""A method that is ready: a question and the number of its repeat → a prediction. Calls may overlap."""


@asynccontextmanager
async def open_method(evaluation: Evaluation, system: System, account: Account) -> AsyncIterator[ReadyMethod]:
    """Open the models that a system asks, make its method, and close the models in the end.

    Models and agent may be in this process. Nothing else refers to them, so they are freed before the next
    system loads its own.
    """
    algorithm = METHODS[system.method].algorithm
    async with AsyncExitStack() as opened:
        environment = open_environment_of(evaluation, system, account)
        opened.push_async_callback(environment.close)
        await check_servers(environment)  # If the environment does not answer, no other model is loaded.
        optimizer = None
        if algorithm is not None:
            optimizer = open_optimizer(evaluation, system, algorithm, account)
            opened.push_async_callback(optimizer.close)
            if evaluation.config.optimizer_env:  # Without it, the environment writes prompts, and is checked.
                await check_servers(optimizer)
        yield await make_method(evaluation, system, environment, optimizer)


def open_environment_of(evaluation: Evaluation, system: System, account: Account) -> Environment:
    """Open the environment that a system asks. It is mute for a method that needs none."""
    if not METHODS[system.method].needs_environment:
        return Environment([OwnSource(MuteEnvironment(), seed=0)])
    return open_model(evaluation, system.environment, evaluation.fields_of(system), account)


def open_optimizer(
    evaluation: Evaluation, system: System, algorithm: Algorithm, account: Account
) -> Environment:
    """Open the model that writes prompts in a system's search."""
    spec = evaluation.config.optimizer_env or system.environment
    fields = algorithm.optimizer_fields
    if evaluation.config.max_env_usd and limit_in(fields) is None:
        # The authors of GEPA set no limit, but a limit of dollars needs it.
        fields = {**fields, "max_tokens": OPTIMIZER_REPLY}
    return open_model(evaluation, spec, fields, account)


def open_model(evaluation: Evaluation, spec: str, fields: RequestFields, account: Account) -> Environment:
    """Open an environment or optimiser. Each request to it has `fields`, and its calls are in `account`."""
    checked = evaluation.check_environment(spec, fields)
    device = pick_device(evaluation.config.device)
    return open_environment(checked, account=account, seed=evaluation.seed, device=device)


async def make_method(
    evaluation: Evaluation, system: System, environment: Environment, optimizer: Environment | None
) -> ReadyMethod:
    """Make the method of a system: search for its prompts, or fine-tune and load its agent.

    `environment` is mute for a method that needs none. `optimizer` writes the prompts of a search.
    """
    method = METHODS[system.method]
    if method.ask is not None:
        return partial(method.ask, environment, system)
    if method.algorithm is not None:
        assert optimizer is not None, f"nothing writes prompts for {system.method}"
        prompts = await find_prompts(evaluation, system, method.algorithm, environment, optimizer)
        return answer_under_prompts(prompts, environment, system)
    agent = evaluation.systems[system]
    assert agent is not None, f"{system.method} has no agent that plays"
    if method.fine_tuned_on is None:
        player = agent
    else:
        player = await fine_tuned_agent(evaluation, system, agent, environment)
    config = evaluation.config
    use_threads(in_training=player.config.threads)
    return answer_by_games(
        load_agent(player.make(player.config.seed), player.config, pick_device(config.device)),
        environment,
        system,
        player.config.base_rule,
        Sampling(f"evaluation/{evaluation.seed}", config.temperature, config.top_p),
    )


def answer_by_games(
    agent: Agent, environment: Environment, system: System, rule: Rule, sampling: Sampling
) -> ReadyMethod:
    """The method, ready to answer each question by a game of this agent.

    Each game has its own seed, which begins with the seed of `sampling`.
    """
    method = METHODS[system.method]

    async def answer(question: Question, sample: int) -> Prediction:
        game_sampling = replace(sampling, seed=f"{sampling.seed}/{question.id}/{sample}")
        game = await play_question(agent, environment, question, game_sampling, sample=sample)
        [reward] = score_games([game], rule=rule)
        prediction = prediction_of(system, game, sample, reward)
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
    for name, data in data_of_searches(evaluation.questions, evaluation.data).items():
        search = PromptSearch(
            system,
            name,
            environment,
            optimizer,
            limit=config.optimize_calls,
            examples=config.optimize_examples,
            seed=evaluation.seed,
        )
        found = await algorithm.find_prompt(search, data)
        if found == SEED_PROMPT:
            logger.warning("%s found no better prompt than its seed in %d calls", search.name, search.calls)
        (folder / f"{file_name(name)}.txt").write_text(found, "utf-8")
        prompts[name] = found
    return prompts


def answer_under_prompts(prompts: Mapping[str, str], environment: Environment, system: System) -> ReadyMethod:
    """The method, ready to ask each question once, under the prompt of its dataset or else of ALL."""

    async def answer(question: Question, sample: int) -> Prediction:
        name = question.dataset if question.dataset in prompts else ALL
        return await direct(environment, system, question, sample, prompt=prompts[name])

    return answer
