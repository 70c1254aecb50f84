"""Make a method: get the function that answers its questions (`ReadyMethod`) ready."""

from dataclasses import replace
from functools import partial
from pathlib import Path

from prompt_r1.environments.environment import Environment
from prompt_r1.evaluation.ask_once import ReadyMethod, direct, think_then_answer
from prompt_r1.evaluation.evaluation import Evaluation
from prompt_r1.evaluation.games import answer_by_games
from prompt_r1.evaluation.imitation import bc_agent, rft_agent, sft_agent
from prompt_r1.evaluation.methods import METHODS
from prompt_r1.evaluation.predictions import System
from prompt_r1.evaluation.searches import (
    Algorithm,
    Calls,
    Data,
    PromptSearch,
    answer_under,
    file_name,
    find_prompts,
)
from prompt_r1.pair.agent import Sampling, load_agent, with_threads_of_this_machine
from prompt_r1.pair.asking import request_of
from prompt_r1.pair.named_agent import find_agent


async def make_method(
    evaluation: Evaluation,
    system: System,
    data: Data,
    *,
    environment: Environment,
    optimizer: Environment | None,
) -> ReadyMethod:
    """Make the method of a system: search for prompts, or fine-tune an agent if necessary and load it.

    `data` has the questions that prepare the method. `environment` is mute for a method that needs none, and
    `optimizer` is None for a method that searches for no prompts.
    """
    config, seed, device = evaluation.config, evaluation.seed, evaluation.device
    method = METHODS[system.method]
    if method.algorithm is not None:
        assert optimizer is not None, "a search needs a model that writes prompts"
        return await make_search(evaluation, system, data, method.algorithm, environment, optimizer)

    agent = evaluation.systems[system]
    folder = folder_of(evaluation, system)
    match system.method:
        case "direct":
            return partial(direct, environment, request_of(system.environment))
        case "cot":
            return partial(think_then_answer, environment, request_of(system.environment))
        case "untrained":
            agent = replace(agent, path=find_agent(agent.start, agent.config.seed))
        case "sft":
            agent = sft_agent(agent, data.train, seed=seed, device=device, folder=folder)
        case "bc":
            agent = bc_agent(agent, seed=seed, device=device, folder=folder)
        case "rft":
            calls = config.optimize_calls
            agent = await rft_agent(
                agent, environment, data.train, seed=seed, device=device, folder=folder, calls=calls
            )
        case "grpo-only" | "agent-only" | "prompt-r1":
            pass  # The agent plays as it is.
        case _:
            raise AssertionError(f"{system.method} is no method")
    return answer_by_games(
        load_agent(agent.path, with_threads_of_this_machine(agent.config), device),
        environment,
        agent.config.base_rule,
        Sampling(f"evaluation/{seed}", config.temperature, config.top_p),
        is_mute=not method.needs_environment,
        thinks=system.method != "sft",
    )


async def make_search(
    evaluation: Evaluation,
    system: System,
    data: Data,
    algorithm: Algorithm,
    environment: Environment,
    optimizer: Environment,
) -> ReadyMethod:
    """Search for prompts. Then each question gets one call under the prompt of its dataset."""
    config = evaluation.config
    request = request_of(system.environment)

    def new_search(dataset: str) -> PromptSearch:
        return PromptSearch(
            f"{system.method} ({dataset})",
            environment,
            optimizer,
            request,
            Calls(config.optimize_calls),
            examples=config.optimize_examples,
            seed=evaluation.seed,
        )

    folder = folder_of(evaluation, system)
    prompts = await find_prompts(algorithm, new_search, evaluation.datasets, data, folder)
    return answer_under(prompts, environment, request)


def folder_of(evaluation: Evaluation, system: System) -> Path:
    """Where a method keeps the prompts that it finds, or the agent that it fine-tunes from a start."""
    agent = evaluation.systems[system]
    # If a method has no environment, its folder is under the environment of its agent's training.
    spec = system.environment or agent.config.env
    folder = evaluation.folder / file_name(spec) / system.method
    if METHODS[system.method].agent == "start":
        return folder / file_name(agent.start)
    return folder
