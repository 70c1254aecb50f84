"""The systems (methods × environments × agents) that an evaluation compares, and what they are made from."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from prompt_r1.data.files import question_key
from prompt_r1.data.questions import check_data, find_questions, hold_out_a_tenth, sample_questions
from prompt_r1.environments.budget import Price, parse_prices
from prompt_r1.environments.environment import Environment
from prompt_r1.environments.specs import check_environment, parse_fields
from prompt_r1.errors import UsageError
from prompt_r1.evaluation.folder_settings import check_same_settings, digests_of
from prompt_r1.evaluation.methods import METHODS, Fields, Method, Setup
from prompt_r1.evaluation.predictions import FILE, System
from prompt_r1.evaluation.settings import EvaluateConfig
from prompt_r1.pair.named_agent import NamedAgent, check_agent, newest_mini_run, resolve_agent, trained_config
from prompt_r1.pair.settings import environment_settings
from prompt_r1.programs.command_line import command
from prompt_r1.programs.files import make_folder
from prompt_r1.programs.launcher import check_device
from prompt_r1.settings.agent import HELD_OUT, MINI_AGENT, AgentConfig, all_mini_data, is_mini, is_mini_data
from prompt_r1.settings.fields import experiment_values
from prompt_r1.settings.flags import parse_arguments
from prompt_r1.settings.functions import OBJECT_PREFIX, import_metric
from prompt_r1.types import Question

if TYPE_CHECKING:  # A wrong command line is reported before torch is imported.
    import torch

NO_AGENT = NamedAgent("", AgentConfig(), "")


def read_evaluate_config(arguments: list[str]) -> EvaluateConfig:
    """The settings of an evaluation. Raises UsageError for an evaluation that cannot start."""
    config = _with_agent_and_folder(parse_arguments(EvaluateConfig, arguments))
    check_device(config.device)
    for name in config.metric:
        import_metric(name)
    methods = methods_of(config)
    if not config.agent and not config.env:
        raise UsageError("no environment to ask: give --env SPEC, or an --agent that was trained with one")
    for name in config.agent:
        check_agent(name)
    if "grpo-only" in methods:
        _check_grpo_agent(config.grpo_agent)
    encoder = Path(config.ssim_model)
    if config.ssim_model not in ("", "auto") and not (encoder / "config.json").is_file():
        raise UsageError(f"--ssim-model {config.ssim_model}: not a folder with a config.json")
    check_data([*config.data, *config.train_data, *config.val_data])
    if not all_mini_data(config.data):
        for method in methods:
            if METHODS[method].needs.training and not config.train_data:
                raise UsageError(f"{method} needs training questions: give --train-data")
            if METHODS[method].needs.validation and not config.val_data:
                raise UsageError(f"{method} needs validation questions: give --val-data")

    folder = Path(config.out)
    begun = (folder / FILE).exists()
    if folder.exists():
        make_folder(folder, lambda folder: begun, "an evaluation")
        check_same_settings(folder, experiment_values(config))
    # A folder with answers may be complete. Then nothing is asked, and no key is needed.
    if not begun and not config.dry_run:  # An estimate needs no key.
        typed = [spec for spec in [*config.env, config.optimizer_env] if spec]
        for spec in typed:
            check_environment(spec, config, typed=typed, others=typed)
    return config


def _with_agent_and_folder(config: EvaluateConfig) -> EvaluateConfig:
    """The settings with the agent and the folder of a command that names none.

    The agent is the newest run in the mini world, if a method needs an agent. It is looked up only here,
    because a training may export a newer agent while the evaluation asks.
    """
    needs_agent = any(METHODS[method].needs.agent for method in methods_of(config))
    if needs_agent and not config.agent:
        config = replace(config, agent=(str(newest_mini_run()),), agent_is_newest=True)
    if not config.out:
        first = Path(config.agent[0]).name if config.agent else "environment"
        config = replace(config, out=f"runs/eval-{first}")
    return config


def _check_grpo_agent(name: str) -> None:
    trained = trained_config(check_agent(name)) if name else None
    if trained is None or trained.env != "none":
        raise UsageError(
            "grpo-only needs an agent that was trained without environment: run "
            f"`{command('train.py', '--env', 'none')}` and give --grpo-agent RUN"
        )


def preparation_questions(
    config: EvaluateConfig, systems: Iterable[System], seed: int
) -> tuple[list[Question], list[Question]]:
    """Training and validation questions, or none if no system needs them. The mini world has its own."""
    if not any(METHODS[system.method].needs.training for system in systems):
        return [], []
    own = ("mini",) if all_mini_data(config.data) else ()
    train = find_questions(config.train_data or own, "train", seed)
    validation = sample_questions(config.val_data or own, "validation", seed, 0)
    return train, validation


def methods_of(config: EvaluateConfig) -> Sequence[str]:
    """The methods of --method, in the order of METHODS.

    Without --method there are three methods; with --tables the paper's (grpo-only needs --grpo-agent).
    """
    if config.method:
        return [name for name in METHODS if name in config.method]
    if not config.tables:
        return [name for name, method in METHODS.items() if method.by_default]
    in_paper = [name for name, method in METHODS.items() if method.in_paper]
    if not config.grpo_agent:
        in_paper.remove("grpo-only")
    return in_paper


def resolve_agents(config: EvaluateConfig) -> dict[str, NamedAgent]:
    """The agents of --agent, by their names."""
    agents = {}
    for name in config.agent:
        agent = resolve_agent(name, max_turns=config.max_turns, max_new=config.max_new)
        agents[name] = replace(agent, is_newest=config.agent_is_newest)
    return agents


def environments_of(config: EvaluateConfig, agents: Mapping[str, NamedAgent]) -> dict[str, EvaluateConfig]:
    """The environments of --env, or of the agents' training, each with the settings by which it is asked.

    Raises UsageError if agents were trained with the same environment, but with other settings of it.
    """
    if config.env:
        return dict.fromkeys(config.env, config)
    environments: dict[str, EvaluateConfig] = {}
    for name, agent in agents.items():
        spec = agent.config.env
        settings = environment_settings("", agent.config, config)
        if environments.setdefault(spec, settings) != settings:
            raise UsageError(
                f"{name} was trained with the environment {spec}, and so was another --agent, but with "
                f"other --env-args, --env-system or --route: give --env {spec} and these flags, or evaluate "
                "the agents one by one"
            )
    return environments


def prices_of(config: EvaluateConfig, environments: Iterable[str]) -> dict[str, Price]:
    """The price of each environment by its name, also of --optimizer-env. Raises UsageError."""
    names = [name for spec in environments for name in spec.split(",")]
    prices = parse_prices(config.env_price, names)
    writers = config.optimizer_env.split(",") if config.optimizer_env else []
    if set(writers) <= prices.keys():
        return prices
    if len(config.env_price) > 1 and not config.optimizer_price:
        raise UsageError("--optimizer-env: which of several --env-price is its own? Give --optimizer-price")
    return parse_prices(config.env_price[:1], writers) | prices


def prices_of_writer(config: EvaluateConfig, spec: str, prices: Mapping[str, Price]) -> list[Price]:
    """The prices of the model that writes prompts, in a search that asks the environment of `spec`."""
    names = (config.optimizer_env or spec).split(",")
    if config.optimizer_price:
        return list(parse_prices([config.optimizer_price], names).values())
    return [prices[name] for name in names]


def choose_systems(
    config: EvaluateConfig, environments: Iterable[str], agents: Mapping[str, NamedAgent]
) -> dict[System, NamedAgent]:
    """The systems to evaluate, in the order of METHODS, each with the agent that the user gave for it.

    --tables runs the methods of Table 5 with all environments and agents, and other methods with the first
    environment and the first agent. Searches need a model that writes prompts, which the mini world cannot
    do. There --tables leaves them out, and --method raises UsageError for them.
    """
    all_environments = list(environments)
    all_agents = list(agents.items()) or [("", NO_AGENT)]
    systems: dict[System, NamedAgent] = {}
    for name in methods_of(config):
        method = METHODS[name]
        environments_of_method, agents_of_method = all_environments, all_agents
        if method.needs.agent == "own":
            agents_of_method = [(config.grpo_agent, resolve_agent(config.grpo_agent))]
        if config.tables and not method.in_transfer:
            environments_of_method, agents_of_method = all_environments[:1], all_agents[:1]
        if not method.needs.environment:
            environments_of_method = [""]
        for environment in environments_of_method:
            if method.needs.optimizer and is_mini(environment) and not config.optimizer_env:
                if config.method:
                    raise UsageError(
                        f"--method {name}: the mini world writes no prompts: name what does, such as "
                        "--optimizer-env py:studies.advice:MiniOptimizer"
                    )
                continue
            for agent_name, agent in agents_of_method:
                answering = _answering_agent(method, agent_name, agent)
                # Two --agent from one untrained model give one system, because it is evaluated once. If their
                # games differ, one evaluation cannot stand for both.
                first = systems.setdefault(System(name, environment, answering), agent)
                if method.needs.agent == "start" and game_of_start(first) != game_of_start(agent):
                    raise UsageError(
                        f"{agent_name} begins with the agent {answering}, and so does another --agent, but "
                        "their games differ: evaluate them one by one, each with its own --out"
                    )
    return systems


def game_of_start(agent: NamedAgent) -> str:
    """What an agent's start plays: the rules, the instruction and the reward, and which mini agent it is."""
    config = agent.config
    game: list[object] = [config.game, config.instruction_text, config.base_rule, config.reward]
    if agent.start == MINI_AGENT:  # Each seed has its own mini agent.
        game.append(config.seed)
    return repr(game)


def _answering_agent(method: Method, name: str, agent: NamedAgent) -> str:
    """The agent that answers, if the user gives the agent `name`; "" for a method without an agent."""
    match method.needs.agent:
        case "trained" | "own":
            return name
        case "start":
            return agent.start
        case "":
            return ""


def common_seed(config: EvaluateConfig, agents: Mapping[str, NamedAgent]) -> int:
    """The seed of --seed, or the seed of the agents' runs.

    Some questions are made from the seed, as in the mini world. Then all agents must have the same seed, or
    UsageError is raised.
    """
    seeds = {agent.config.seed: name for name, agent in agents.items()}
    if config.seed >= 0 or not seeds:
        return max(config.seed, 0)
    made = [name for name in config.data if is_mini_data(name) or name.startswith(OBJECT_PREFIX)]
    if len(seeds) > 1 and made:
        raise UsageError(
            f"{' and '.join(seeds.values())} were trained with other seeds, so on other questions: give "
            "--seed, or evaluate them one by one"
        )
    return next(iter(seeds))


def trained_on(agent: NamedAgent, questions: Sequence[Question]) -> int:
    """How many of the questions the agent was trained on, as far as its question files are here."""
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
    """Digests of what the answers depend on: what is on this machine, and the games of the agents' starts."""
    specs = [config.optimizer_env, *(system.environment for system in systems)]
    # An agent's path says which weights answer. Its name may be another one: of the run folder, or of the
    # start.
    agents = [str(agent.path) for agent in systems.values()]
    agents += [system.agent for system in systems]
    games = {}
    for system, agent in systems.items():
        if METHODS[system.method].needs.agent == "start":
            games[f"game of {system.agent}"] = game_of_start(agent)
    return {**digests_of([*config.train_data, *config.val_data], specs, agents), **games}


def setup_of(
    system: System,
    agent: NamedAgent,
    config: EvaluateConfig,
    *,
    environments: Mapping[str, EvaluateConfig],
    open_environment: Callable[..., Environment],
    prices: Mapping[str, Price],
    datasets: Sequence[str],
    train: Sequence[Question],
    validation: Sequence[Question],
    device: "torch.device",
    seed: int,
) -> Setup:
    """What a system's method is made from.

    `environments` has the settings by which each environment is asked, and `datasets` the datasets of all
    questions. `train` and `validation` prepare the methods that need training.
    """
    method = METHODS[system.method]
    spec = system.environment or agent.config.env
    environment = None
    if method.needs.environment:
        settings = environments[spec]
        fields = {**parse_fields(settings.env_args), **method.fields}
        asking = replace(settings, env_args=json.dumps(fields))
        environment = open_environment(spec, asking, prices=prices)

    def open_optimizer(fields: Fields) -> Environment:
        writer = config.optimizer_env or spec
        settings = config if config.optimizer_env else environments[spec]
        writing = replace(settings, env_args=json.dumps(fields))
        own_prices = dict(zip(writer.split(","), prices_of_writer(config, spec, prices), strict=True))
        return open_environment(writer, writing, prices=own_prices)

    return Setup(
        method=system.method,
        spec=spec,
        environment=environment,
        open_optimizer=open_optimizer,
        agent=agent,
        datasets=datasets,
        train=train,
        validation=validation,
        results=Path(config.out),
        device=device,
        seed=seed,
        temperature=config.temperature,
        top_p=config.top_p,
        calls=config.optimize_calls,
        examples=config.optimize_examples,
    )
