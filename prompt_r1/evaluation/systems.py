"""Choose what an evaluation compares: its systems (methods × environments × agents), and its questions."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from prompt_r1.data.questions import sample_questions
from prompt_r1.environments.budget import Price, parse_prices
from prompt_r1.errors import UsageError
from prompt_r1.evaluation.methods import DEFAULT_METHODS, EXTRA_METHODS, METHODS, TRANSFER_METHODS
from prompt_r1.evaluation.predictions import System
from prompt_r1.evaluation.settings import EvaluateConfig
from prompt_r1.pair.named_agent import NamedAgent, resolve_agent
from prompt_r1.pair.settings import settings_of_training
from prompt_r1.programs.command_line import command
from prompt_r1.settings.agent import MINI_AGENT, AgentConfig, has_own_splits, is_mini
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


def find_agents(config: EvaluateConfig) -> dict[str, NamedAgent]:
    """The agents of --agent and, if grpo-only is compared, of --grpo-agent, by their names.

    Raises UsageError if there is no such agent, or if --grpo-agent was not trained without an environment.
    """

    def find(name: str) -> NamedAgent:
        return resolve_agent(name, max_turns=config.max_turns, max_new=config.max_new)

    agents = {name: find(name) for name in config.agent}
    if "grpo-only" in methods_of(config):
        alone = find(config.grpo_agent) if config.grpo_agent else NO_AGENT
        if not alone.config.without_environment:
            raise UsageError(
                "grpo-only needs an agent that was trained without environment: run "
                f"`{command('train.py', '--env', 'none')}` and give --grpo-agent RUN"
            )
        agents[config.grpo_agent] = alone
    return agents


def environments_of(config: EvaluateConfig, agents: Mapping[str, NamedAgent]) -> dict[str, EvaluateConfig]:
    """The environments of --env, or of the training of --agent, each with the settings by which it is asked.

    There are none if no method asks an environment. Raises UsageError if a method does and there is none, and
    if agents were trained with the same environment, but with other settings of it.
    """
    if not any(METHODS[name].needs_environment for name in methods_of(config)):
        return {}
    if config.env:
        return dict.fromkeys(config.env, config)
    environments: dict[str, EvaluateConfig] = {}
    for name in config.agent:
        training = agents[name].config
        settings = settings_of_training(config, training)
        if environments.setdefault(training.env, settings) != settings:
            raise UsageError(
                f"{name} was trained with the environment {training.env}, and so was another --agent, but "
                f"with other --env-args, --env-system or --route: give --env {training.env} and these flags, "
                "or evaluate the agents one by one"
            )
    if not environments:
        raise UsageError("no environment to ask: give --env SPEC, or an --agent that was trained with one")
    return environments


def choose_systems(
    config: EvaluateConfig, environments: Iterable[str], agents: Mapping[str, NamedAgent]
) -> dict[System, NamedAgent]:
    """The systems to evaluate, in the order of METHODS, each with the agent that the user gave for it.

    --tables runs the methods of Table 5 with all environments and agents, and other methods with the first
    environment and the first agent. Raises UsageError for a method that --method names, but that an
    environment or an agent cannot serve.
    """
    systems: dict[System, NamedAgent] = {}
    for method_name in methods_of(config):
        method = METHODS[method_name]
        for spec in _environments_for(method_name, config, environments):
            for name in _agents_for(method_name, config):
                agent = agents.get(name, NO_AGENT)
                if method.agent != "start":
                    systems[System(method_name, spec, name)] = agent
                    continue
                # If two agents started from one model, the model is evaluated once, for the first of them.
                first = systems.setdefault(System(method_name, spec, agent.start), agent)
                _check_start(method_name, name, agent, first)
    return systems


def _environments_for(method_name: str, config: EvaluateConfig, environments: Iterable[str]) -> list[str]:
    """The environments that a method asks, without those that cannot serve it; [""] if it needs none."""
    if not METHODS[method_name].needs_environment:
        return [""]
    specs = list(environments)
    if config.tables and method_name not in TRANSFER_METHODS:
        specs = specs[:1]
    serving = []
    for spec in specs:
        problem = _problem_with(method_name, spec, config)
        if problem and config.method:
            raise UsageError(problem)
        if not problem:
            serving.append(spec)
    return serving


def _agents_for(method_name: str, config: EvaluateConfig) -> list[str]:
    """The names of the agents that a method takes; [""] if it takes none."""
    match METHODS[method_name].agent:
        case "":
            return [""]
        case "grpo":
            return [config.grpo_agent]
    if config.tables and method_name not in TRANSFER_METHODS:
        return list(config.agent[:1])
    return list(config.agent)


def _check_start(method_name: str, name: str, agent: NamedAgent, first: NamedAgent) -> None:
    """Raise UsageError if a method cannot begin with the start of an agent, or not for two agents at once.

    `first` is the first agent with this start.
    """
    if method_name == "bc" and agent.start != MINI_AGENT:
        raise UsageError("bc imitates the demonstrations of the mini agent: leave it out with other agents")
    if game_of_start(first) != game_of_start(agent):
        raise UsageError(
            f"{name} begins with the agent {agent.start}, and so does another --agent, but their games "
            "differ: evaluate them one by one, each with its own --out"
        )


def _problem_with(method_name: str, environment: str, config: EvaluateConfig) -> str:
    """Why a method cannot answer with an environment; "" if it can.

    With `none` there is no environment that answers alone. Searches need a model that writes prompts, which
    the mini world cannot do.
    """
    method = METHODS[method_name]
    if environment == "none" and not method.agent:
        return (
            f"--method {method_name} asks the environment without an agent, and there is no environment "
            "(none): name one by --env"
        )
    if method.algorithm and is_mini(environment) and not config.optimizer_env:
        return (
            f"--method {method_name}: the mini world writes no prompts: name what does, such as "
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
    if len(seeds) > 1 and any(has_own_splits(name) for name in config.data):
        raise UsageError(
            f"{' and '.join(seeds.values())} were trained with other seeds, so on other questions: give "
            "--seed, or evaluate them one by one"
        )
    return next(iter(seeds))


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


def prices_of(config: EvaluateConfig, environments: Iterable[str]) -> dict[str, Price]:
    """The price of each environment by its name, and last of --optimizer-env."""
    names = []
    for spec in [*environments, config.optimizer_env]:
        names += spec.split(",") if spec else []
    return parse_prices(config.env_price, names)
