"""The systems (methods × environments × agents) that an evaluation compares, and their seed."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from prompt_r1.data.files import question_key
from prompt_r1.data.questions import find_questions, hold_out_a_tenth
from prompt_r1.errors import UsageError
from prompt_r1.evaluation.folder_settings import digests_of
from prompt_r1.evaluation.methods import DEFAULT_METHODS, EXTRA_METHODS, METHODS, TRANSFER_METHODS
from prompt_r1.evaluation.predictions import System
from prompt_r1.evaluation.settings import EvaluateConfig
from prompt_r1.pair.named_agent import NamedAgent, resolve_agent, trained_config
from prompt_r1.pair.settings import settings_of_training
from prompt_r1.settings.agent import HELD_OUT, MINI_AGENT, AgentConfig, is_mini, is_mini_data
from prompt_r1.settings.functions import OBJECT_PREFIX
from prompt_r1.types import Question

NO_AGENT = NamedAgent("", AgentConfig(), "")


def methods_of(config: EvaluateConfig) -> Sequence[str]:
    """The methods of --method, in the order of METHODS.

    Without --method there are three methods; with --tables the paper's (grpo-only needs --grpo-agent).
    """
    if config.method:
        return [name for name in METHODS if name in config.method]
    if not config.tables:
        return DEFAULT_METHODS
    in_paper = [name for name in METHODS if name not in EXTRA_METHODS]
    if not config.grpo_agent:
        in_paper.remove("grpo-only")
    return in_paper


def resolve_agents(config: EvaluateConfig) -> dict[str, NamedAgent]:
    """The agents of --agent, by their names."""
    agents = {}
    for name in config.agent:
        agents[name] = resolve_agent(name, max_turns=config.max_turns, max_new=config.max_new).built()
    return agents


def environments_of(config: EvaluateConfig, trained: Mapping[str, AgentConfig]) -> dict[str, EvaluateConfig]:
    """The environments of --env, or of the agents' training, each with the settings by which it is asked.

    `trained` has the settings of each agent's training, by the agent's name. Raises UsageError if agents were
    trained with the same environment, but with other settings of it.
    """
    if config.env:
        return dict.fromkeys(config.env, config)
    environments: dict[str, EvaluateConfig] = {}
    for name, training in trained.items():
        spec = training.env
        settings = settings_of_training(config, training)
        if environments.setdefault(spec, settings) != settings:
            raise UsageError(
                f"{name} was trained with the environment {spec}, and so was another --agent, but with "
                f"other --env-args, --env-system or --route: give --env {spec} and these flags, or evaluate "
                "the agents one by one"
            )
    return environments


def choose_systems(
    config: EvaluateConfig, environments: Iterable[str], agents: Mapping[str, NamedAgent]
) -> dict[System, NamedAgent]:
    """The systems to evaluate, in the order of METHODS, each with the agent that the user gave for it.

    --tables runs the methods of Table 5 with all environments and agents, and other methods with the first
    environment and the first agent. Searches need a model that writes prompts, which the mini world cannot
    do, and with `none` there is no environment that answers alone. A method that an environment cannot serve
    is left out or, if --method names it, raises UsageError.
    """
    systems: dict[System, NamedAgent] = {}
    for name in methods_of(config):
        method = METHODS[name]
        specs = list(environments) if method.needs_environment else [""]
        if method.agent == "grpo":
            named_agents = [(config.grpo_agent, resolve_agent(config.grpo_agent))]
        elif method.agent:
            named_agents = list(agents.items())
        else:
            named_agents = [("", NO_AGENT)]
        if config.tables and name not in TRANSFER_METHODS:
            specs, named_agents = specs[:1], named_agents[:1]
        for spec in specs:
            problem = _problem_with(name, spec, config)
            if problem and config.method:
                raise UsageError(problem)
            if not problem:
                for agent_name, agent in named_agents:
                    shown_as = agent.start if method.agent == "start" else agent_name
                    _add(systems, System(name, spec, shown_as), agent, agent_name)
    return systems


def _add(systems: dict[System, NamedAgent], system: System, agent: NamedAgent, agent_name: str) -> None:
    """Add a system with the agent that the user gave for it.

    Two --agent from one untrained model give one system, because it is evaluated once. If their games differ,
    one evaluation cannot stand for both, and UsageError is raised.
    """
    first = systems.setdefault(system, agent)
    if METHODS[system.method].agent == "start" and game_of_start(first) != game_of_start(agent):
        raise UsageError(
            f"{agent_name} begins with the agent {system.agent}, and so does another --agent, but "
            "their games differ: evaluate them one by one, each with its own --out"
        )


def _problem_with(name: str, environment: str, config: EvaluateConfig) -> str:
    """Why a method cannot answer with an environment; "" if it can."""
    method = METHODS[name]
    if environment == "none" and not method.agent:
        return (
            f"--method {name} asks the environment without an agent, and there is no environment (none): "
            "name one by --env"
        )
    if method.algorithm and is_mini(environment) and not config.optimizer_env:
        return (
            f"--method {name}: the mini world writes no prompts: name what does, such as "
            "--optimizer-env py:studies.advice:MiniOptimizer"
        )
    return ""


def game_of_start(agent: NamedAgent) -> str:
    """What an agent's start plays: the rules, the instruction and the reward, and which mini agent it is."""
    config = agent.config
    game: list[object] = [config.game, config.instruction_text, config.base_rule, config.reward]
    if agent.start == MINI_AGENT:  # Each seed has its own mini agent.
        game.append(config.seed)
    return repr(game)


def common_seed(config: EvaluateConfig, agents: Mapping[str, NamedAgent]) -> int:
    """The seed of --seed, or the seed of the agents' runs.

    Some questions are made from the seed, as in the mini world. Then all agents must have the same seed, or
    UsageError is raised.
    """
    if config.seed is not None:
        return config.seed
    seeds = {agent.config.seed: name for name, agent in agents.items()}
    if not seeds:
        return 0
    made = [name for name in config.data if is_mini_data(name) or name.startswith(OBJECT_PREFIX)]
    if len(seeds) > 1 and made:
        raise UsageError(
            f"{' and '.join(seeds.values())} were trained with other seeds, so on other questions: give "
            "--seed, or evaluate them one by one"
        )
    return next(iter(seeds))


def trained_on(agent: NamedAgent, questions: Sequence[Question]) -> int:
    """How many of the questions the agent was trained on, as far as its question files are here.

    This is an estimate if the run held out a tenth of its data, and some of it is not here: what was held out
    depends on all of it.
    """
    if trained_config(agent.path) is None:
        return 0
    # The folder of an agent may come from anyone, so no code is run that it names.
    files = [name for name in agent.config.data if is_mini_data(name) or Path(name).is_file()]
    trained = find_questions(files, "train", agent.config.seed)
    if tuple(agent.config.val_data) == (HELD_OUT,):
        trained, _ = hold_out_a_tenth(trained, agent.config.val_limit)
    keys = {question_key(question.text) for question in trained}
    return sum(question_key(question.text) in keys for question in questions)


def digests_of_systems(config: EvaluateConfig, systems: Mapping[System, NamedAgent]) -> dict[str, str]:
    """Digests of three things that the answers depend on.

    - the question files that prepare methods
    - the environments and agents that are on this machine
    - the games of the agents' starts
    """
    specs = [config.optimizer_env, *(system.environment for system in systems)]
    # Both paths of an agent are digested: `path` has the weights that answer, and its name in the system may
    # be another path, of its run or of its start.
    agents = [str(agent.path) for agent in systems.values()]
    agents += [system.agent for system in systems]
    games = {}
    for system, agent in systems.items():
        if METHODS[system.method].agent == "start":
            games[f"game of {system.agent}"] = game_of_start(agent)
    return {**digests_of([*config.train_data, *config.val_data], specs, agents), **games}
