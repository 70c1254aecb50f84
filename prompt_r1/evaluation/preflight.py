"""Read the flags of evaluate.py: choose what is compared, and check it before it starts.

The functions below `read_evaluation` are its steps. This file does not import torch, so that a wrong command
line is reported at once.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from prompt_r1.data.questions import check_data, find_questions, sample_questions
from prompt_r1.environments.specs import is_mini
from prompt_r1.errors import UsageError
from prompt_r1.evaluation.evaluation import Evaluation
from prompt_r1.evaluation.folder_settings import check_settings, game_of
from prompt_r1.evaluation.methods import DEFAULT_METHODS, METHODS, TRANSFER_METHODS
from prompt_r1.evaluation.predictions import FILE, System
from prompt_r1.evaluation.searches import Data
from prompt_r1.evaluation.settings import EvaluateConfig
from prompt_r1.pair.named_agent import NamedAgent, newest_mini_run, resolve_agent, run_of
from prompt_r1.pair.settings import with_settings_of_training
from prompt_r1.programs.command_line import command
from prompt_r1.programs.files import make_folder
from prompt_r1.programs.launcher import check_device
from prompt_r1.settings.agent import MINI, EnvironmentConfig, all_mini_data
from prompt_r1.settings.flags import given_values
from prompt_r1.settings.functions import import_metric
from prompt_r1.types import Question


def read_evaluation(arguments: list[str]) -> Evaluation:
    """Read the settings of evaluate.py, and choose what they compare.

    Raises UsageError for an evaluation that cannot start.
    """
    given = given_values(EvaluateConfig, arguments)
    config = EvaluateConfig(**given)
    check_device(config.device)
    metrics = {name: import_metric(name) for name in config.metric}
    methods = methods_of(config)
    config = with_agent_and_folder(config, methods)
    agents = find_agents(config, methods)
    environments = find_environments(config, given, methods, agents)
    systems = choose_systems(config, methods, environments, agents)
    seed = common_seed(config, agents)
    check_folder(config, seed)
    evaluation = Evaluation(config, seed, metrics, agents, systems, environments)
    check_environments(evaluation)
    # A function of the user or the Hub may take minutes to give its questions, so it is asked last.
    questions = questions_of(config, seed)
    data = data_for(config, systems, seed)
    return replace(evaluation, questions=questions, data=data)


def methods_of(config: EvaluateConfig) -> Sequence[str]:
    """The methods of --method, of the paper (--tables) or by default, in the order of METHODS."""
    if config.method:
        return [name for name in METHODS if name in config.method]
    if config.tables:
        return [name for name, method in METHODS.items() if method.in_paper]
    return DEFAULT_METHODS


def with_agent_and_folder(config: EvaluateConfig, methods: Iterable[str]) -> EvaluateConfig:
    """The settings with the agent and the folder of a command that names none.

    The agent is the newest run in the mini world, if a method needs an agent of --agent.
    """
    needs_agent = any(METHODS[name].agent in ("trained", "start") for name in methods)
    if needs_agent and not config.agent:
        config = replace(config, agent=(str(newest_mini_run()),))
    if not config.out:
        named = [name for name in (*config.agent, config.grpo_agent) if name]
        name = Path(run_of(named[0])).name if named else "environment"
        config = replace(config, out=f"runs/eval-{name}")
    return config


def find_agents(config: EvaluateConfig, methods: Iterable[str]) -> dict[str, NamedAgent]:
    """The agents of --agent and, if grpo-only is compared, of --grpo-agent, by their names.

    Raises UsageError if there is no such agent.
    """
    names = list(config.agent)
    if config.grpo_agent and "grpo-only" in methods:
        names.append(config.grpo_agent)
    return {name: resolve_agent(name, max_turns=config.max_turns, max_new=config.max_new) for name in names}


def find_environments(
    config: EvaluateConfig, given: Collection[str], methods: Iterable[str], agents: Mapping[str, NamedAgent]
) -> Mapping[str, EnvironmentConfig]:
    """The environments of --env, or of the training of --agent, each with the settings by which it is asked.

    `given` are the names of the settings that the user gave. There are no environments if no method asks one.
    Raises UsageError if a method does and there is none, and if agents were trained with the same
    environment, but with other settings of it.
    """
    if not any(METHODS[name].needs_environment for name in methods):
        return {}
    if config.env:
        return dict.fromkeys(config.env, config)
    environments: dict[str, EnvironmentConfig] = {}
    for name in config.agent:
        training = agents[name].config
        settings = with_settings_of_training(config, given, training)
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
    config: EvaluateConfig,
    methods: Iterable[str],
    environments: Iterable[str],
    agents: Mapping[str, NamedAgent],
) -> dict[System, NamedAgent | None]:
    """The systems to evaluate, in the order of METHODS, each with its agent (see `Evaluation.systems`).

    Raises UsageError if what the user named is impossible: a method by --method, or an agent. Other methods
    of --tables and of the default are left out.
    """
    systems: dict[System, NamedAgent | None] = {}
    for system in list_systems(config, methods, list(environments)):
        agent = agents.get(system.agent)
        problem = problem_with(system, agent, config)
        if not problem:
            systems[system] = agent
        elif config.method or system.agent:
            raise UsageError(problem)
    return merge_starts(systems)


def list_systems(config: EvaluateConfig, methods: Iterable[str], environments: list[str]) -> list[System]:
    """Each method with each of its environments, and with each agent that the user named for it.

    With --tables, only the methods of Table 5 have all environments and agents. Others have the first ones.
    """
    given_agents = {None: [""], "grpo": [config.grpo_agent], "trained": config.agent, "start": config.agent}
    systems = []
    for name in methods:
        method = METHODS[name]
        specs = environments if method.needs_environment else [""]
        agents = given_agents[method.agent]
        if config.tables and name not in TRANSFER_METHODS:
            specs, agents = specs[:1], agents[:1]
        systems += [System(name, spec, agent) for spec in specs for agent in agents]
    return systems


def problem_with(system: System, agent: NamedAgent | None, config: EvaluateConfig) -> str:
    """Why a system cannot be compared; "" if it can."""
    name, method = system.method, METHODS[system.method]
    if method.agent == "grpo":
        if agent is not None and agent.config.without_environment:
            return ""
        return (
            "grpo-only needs an agent that was trained without environment: run "
            f"`{command('train.py', '--env', 'none')}` and give --grpo-agent RUN"
        )
    if agent is None:
        if system.environment == "none":
            return (
                f"--method {name} asks the environment without an agent, and there is no environment (none): "
                "name one by --env"
            )
        if method.algorithm and is_mini(config.optimizer_env or system.environment):
            return (
                f"--method {name}: the mini world writes no prompts: name what does, such as "
                "--optimizer-env py:studies.advice:optimizer_0"
            )
        return ""
    if method.fine_tuned_on == "demonstrations" and agent.start != MINI:
        return f"{name} imitates the demonstrations of the mini agent: leave it out with other agents"
    asks_nobody = system.environment == "none" or agent.config.game.max_turns == 1
    if method.fine_tuned_on in ("demonstrations", "own games") and asks_nobody:
        return f"{name} imitates games that ask an environment, and {system.agent} asks none: leave it out"
    return ""


def merge_starts(systems: Mapping[System, NamedAgent | None]) -> dict[System, NamedAgent | None]:
    """Replace agents by their starts, for methods that begin with the start. Equal systems become one.

    Raises UsageError if agents started from one model, but play other games.
    """
    merged: dict[System, NamedAgent | None] = {}
    for system, agent in systems.items():
        if agent is None or METHODS[system.method].agent != "start":
            merged[system] = agent
            continue
        start = agent.before_training()
        first = merged.setdefault(replace(system, agent=start.start), start)
        if first is not None and game_of(first) != game_of(start):
            raise UsageError(
                f"{system.agent} begins with the agent {start.start}, and so does another --agent, but their "
                "games differ: evaluate them one by one, each with its own --out"
            )
    return merged


def common_seed(config: EvaluateConfig, agents: Mapping[str, NamedAgent]) -> int:
    """The seed of --seed, or the seed of the agents' training; without agents, 0.

    Questions of the mini world are made from the seed. Raises UsageError if the agents have several seeds.
    """
    if config.seed is not None:
        return config.seed
    seeds = {agent.config.seed: name for name, agent in agents.items()}
    if len(seeds) > 1:
        raise UsageError(
            f"{' and '.join(seeds.values())} were trained with other seeds: give --seed, or evaluate them "
            "one by one"
        )
    return next(iter(seeds), 0)


def check_folder(config: EvaluateConfig, seed: int) -> None:
    """Raise UsageError for an --out with other files, or with answers of another experiment."""
    folder = Path(config.out)
    if folder.exists():  # Otherwise `make_folder` would make it. An evaluation that cannot start makes none.
        make_folder(folder, lambda folder: (folder / FILE).exists(), "an evaluation")
        check_settings(config, seed)


def check_environments(evaluation: Evaluation) -> None:
    """Raise UsageError for an environment, or an optimiser, that cannot be opened.

    An estimate needs no keys and servers, and neither does a folder with answers: it may be complete.
    """
    if evaluation.config.dry_run or (evaluation.folder / FILE).exists():
        return
    for spec in evaluation.specs:
        evaluation.check_environment(spec)


def questions_of(config: EvaluateConfig, seed: int) -> list[Question]:
    """The questions of --data. With --tables, the mini world also has its questions out of distribution."""
    names = list(config.data)
    if config.tables and names == [MINI]:
        names.append("mini:ood")
    questions: list[Question] = []
    for name in names:
        questions += sample_questions([name], "test", seed, config.limit)
    counts = Counter((question.dataset, question.id) for question in questions)
    for (dataset, identity), count in counts.items():
        if count > 1:
            raise UsageError(f"--data: question {identity!r} of {dataset} occurs twice; give each file once")
    return questions


def data_for(config: EvaluateConfig, systems: Iterable[System], seed: int) -> Data:
    """The questions that prepare the methods of these systems, or none if no method needs them.

    They are the questions of --train-data and --val-data. If all questions of --data are of the mini world,
    its training and validation questions are the default. Raises UsageError if a file cannot be read, and if
    a method lacks questions.
    """
    default = (MINI,) if all_mini_data(config.data) else ()
    train = config.train_data or default
    validation = config.val_data or default
    methods = [system.method for system in systems if METHODS[system.method].needs_training]
    if not methods:
        check_data([*train, *validation])  # The folder keeps these names, so they must be right.
        return Data()
    for name in methods:
        if not train:
            raise UsageError(f"{name} needs training questions: give --train-data")
        if METHODS[name].needs_validation and not validation:
            raise UsageError(f"{name} needs validation questions: give --val-data")
    return Data(find_questions(train, "train", seed), sample_questions(validation, "validation", seed, 0))
