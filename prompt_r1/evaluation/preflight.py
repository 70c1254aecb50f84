"""Read the flags of evaluate.py: choose what is compared, and check it before it starts.

The functions below `read_evaluation` are its steps. This file does not import torch, so that a wrong command
line is reported at once.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from prompt_r1.data.questions import find_questions, sample_questions
from prompt_r1.environments.specs import check_environment, is_mini
from prompt_r1.errors import UsageError
from prompt_r1.evaluation.evaluation import Evaluation, prices_of, trusted_environments
from prompt_r1.evaluation.folder_settings import check_settings, game_of, settings_in_common
from prompt_r1.evaluation.methods import DEFAULT_METHODS, METHODS, TRANSFER_METHODS
from prompt_r1.evaluation.predictions import FILE, System
from prompt_r1.evaluation.searches import Data
from prompt_r1.evaluation.settings import EvaluateConfig
from prompt_r1.pair.named_agent import NamedAgent, newest_mini_run, resolve_agent, run_of
from prompt_r1.pair.settings import with_settings_of_training
from prompt_r1.programs.command_line import command
from prompt_r1.programs.files import make_folder
from prompt_r1.programs.launcher import check_device
from prompt_r1.settings.agent import MINI_AGENT, all_mini_data, is_mini_data
from prompt_r1.settings.flags import given_values
from prompt_r1.settings.functions import OBJECT_PREFIX, import_metric
from prompt_r1.types import Question


def read_evaluation(arguments: list[str]) -> Evaluation:
    """Read the settings of evaluate.py, and choose what they compare.

    Raises UsageError for an evaluation that cannot start.
    """
    given = given_values(EvaluateConfig, arguments)
    config = _with_agent_and_folder(EvaluateConfig(**given))
    check_device(config.device)
    for name in config.metric:
        import_metric(name)
    agents = find_agents(config)
    environments = environments_of(config, given, agents)
    systems = choose_systems(config, environments, agents)
    seed = common_seed(config, agents)
    _check_folder(config, seed)
    _check_environments(config, environments)
    # A function of the user or the Hub may take minutes to give its questions, so it is asked last.
    questions = questions_of(config, seed)
    data = data_for(config, systems, seed)
    return Evaluation(config, seed, questions, data, agents, systems, environments)


def methods_of(config: EvaluateConfig) -> Sequence[str]:
    """The methods of --method, of --tables or by default, in the order of METHODS.

    --tables compares the paper's methods. It leaves out grpo-only if there is no --grpo-agent.
    """
    if config.method:
        return [name for name in METHODS if name in config.method]
    if not config.tables:
        return DEFAULT_METHODS
    in_paper = [name for name, method in METHODS.items() if method.in_paper]
    return [name for name in in_paper if config.grpo_agent or METHODS[name].agent != "grpo"]


def _with_agent_and_folder(config: EvaluateConfig) -> EvaluateConfig:
    """The settings with the agent and the folder of a command that names none.

    The agent is the newest run in the mini world, if a method needs an agent of --agent.
    """
    needs_agent = any(METHODS[name].agent in ("trained", "start") for name in methods_of(config))
    if needs_agent and not config.agent:
        config = replace(config, agent=(str(newest_mini_run()),))
    if not config.out:
        named = [name for name in (*config.agent, config.grpo_agent) if name]
        name = Path(run_of(named[0])).name if named else "environment"
        config = replace(config, out=f"runs/eval-{name}")
    return config


def find_agents(config: EvaluateConfig) -> dict[str, NamedAgent]:
    """The agents of --agent and, if grpo-only is compared, of --grpo-agent, by their names.

    Raises UsageError if there is no such agent, or if --grpo-agent was not trained without an environment.
    """

    def find(name: str) -> NamedAgent:
        return resolve_agent(name, max_turns=config.max_turns, max_new=config.max_new)

    agents = {name: find(name) for name in config.agent}
    if any(METHODS[name].agent == "grpo" for name in methods_of(config)):
        alone = find(config.grpo_agent) if config.grpo_agent else None
        if alone is None or not alone.config.without_environment:
            raise UsageError(
                "grpo-only needs an agent that was trained without environment: run "
                f"`{command('train.py', '--env', 'none')}` and give --grpo-agent RUN"
            )
        agents[config.grpo_agent] = alone
    return agents


def environments_of(
    config: EvaluateConfig, given: Collection[str], agents: Mapping[str, NamedAgent]
) -> dict[str, EvaluateConfig]:
    """The environments of --env, or of the training of --agent, each with the settings by which it is asked.

    `given` are the names of the settings that the user gave. There are no environments if no method asks one.
    Raises UsageError if a method does and there is none, and if agents were trained with the same
    environment, but with other settings of it.
    """
    if not any(METHODS[name].needs_environment for name in methods_of(config)):
        return {}
    if config.env:
        return dict.fromkeys(config.env, config)
    environments: dict[str, EvaluateConfig] = {}
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
    config: EvaluateConfig, environments: Iterable[str], agents: Mapping[str, NamedAgent]
) -> dict[System, NamedAgent | None]:
    """The systems to evaluate, in the order of METHODS, each with its agent (see `Evaluation.systems`).

    Raises UsageError for a method of --method that is impossible with one of the environments or agents, and
    for two agents that started from one model, but play other games.
    """
    systems: dict[System, NamedAgent | None] = {}
    for named in _named_systems(config, environments):
        agent = agents.get(named.agent)
        problem = _problem_with(named, agent, config)
        if problem and config.method:
            raise UsageError(problem)
        if problem:  # --tables and the default leave out what cannot be served.
            continue
        if agent is None or METHODS[named.method].agent != "start":
            systems[named] = agent
            continue
        # Several agents may have started from one model. It is evaluated once, so it must play one game.
        start = agent.before_training()
        first = systems.setdefault(replace(named, agent=start.start), start)
        if first is not None and game_of(first) != game_of(start):
            raise UsageError(
                f"{named.agent} begins with the agent {start.start}, and so does another --agent, but their "
                "games differ: evaluate them one by one, each with its own --out"
            )
    return systems


def _named_systems(config: EvaluateConfig, environments: Iterable[str]) -> list[System]:
    """Each method with each of its environments, and with each agent that the user named for it.

    With --tables, only the methods of Table 5 have all environments and agents. Others have the first ones.
    """
    systems = []
    for name in methods_of(config):
        method = METHODS[name]
        specs = list(environments) if method.needs_environment else [""]
        match method.agent:
            case None:
                agents = [""]
            case "grpo":
                agents = [config.grpo_agent]
            case "trained" | "start":
                agents = list(config.agent)
        if config.tables and name not in TRANSFER_METHODS:
            specs, agents = specs[:1], agents[:1]
        systems += [System(name, spec, agent) for spec in specs for agent in agents]
    return systems


def _problem_with(system: System, agent: NamedAgent | None, config: EvaluateConfig) -> str:
    """Why a method cannot answer with an environment and an agent; "" if it can."""
    name, method = system.method, METHODS[system.method]
    nobody_replies = system.environment == "none"
    if agent is None:
        if nobody_replies:
            return (
                f"--method {name} asks the environment without an agent, and there is no environment (none): "
                "name one by --env"
            )
        if method.algorithm and is_mini(system.environment) and not config.optimizer_env:
            return (
                f"--method {name}: the mini world writes no prompts: name what does, such as "
                "--optimizer-env py:studies.advice:MiniOptimizer"
            )
        return ""
    if method.fine_tuned_on == "demonstrations" and agent.start != MINI_AGENT:
        return f"{name} imitates the demonstrations of the mini agent: leave it out with other agents"
    if method.fine_tuned_on in ("demonstrations", "own games"):
        imitates = f"{name} imitates games that ask an environment"
        if nobody_replies:
            return f"{imitates}, and there is none: leave it out"
        if agent.config.game.max_turns == 1:
            return f"{imitates}, and {system.agent} answers in its only turn: leave it out"
    return ""


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


def _check_folder(config: EvaluateConfig, seed: int) -> None:
    """Raise UsageError for an --out with other files, or with answers of another experiment."""
    folder = Path(config.out)
    if folder.exists():  # Otherwise `make_folder` would make it. An evaluation that cannot start makes none.
        make_folder(folder, lambda folder: (folder / FILE).exists(), "an evaluation")
        check_settings(folder, settings_in_common(config, seed))


def _check_environments(config: EvaluateConfig, environments: Mapping[str, EvaluateConfig]) -> None:
    """Raise UsageError for an environment, or an optimiser, that cannot be opened.

    An estimate needs no keys and servers, and neither does a folder with answers: it may be complete.
    """
    if config.dry_run or (Path(config.out) / FILE).exists():
        return
    asked = dict(environments)
    if config.optimizer_env:
        asked.setdefault(config.optimizer_env, config)
    trusted = trusted_environments(config, environments)
    prices = prices_of(config, environments)
    for spec, settings in asked.items():
        check_environment(spec, settings, trusted=trusted, prices=prices)


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


def data_for(config: EvaluateConfig, systems: Iterable[System], seed: int) -> Data:
    """The questions that prepare the methods of these systems. None are read if no method needs them.

    They are the questions of --train-data and --val-data. If all questions of --data are of the mini world,
    its training and validation questions are the default. Raises UsageError if a method lacks questions.
    """
    default = ("mini",) if all_mini_data(config.data) else ()
    train = config.train_data or default
    validation = config.val_data or default
    # The folder keeps these names, so a wrong name is refused also if no method of this command reads it.
    for name in (*train, *validation):
        is_path = not is_mini_data(name) and not name.startswith(("hf:", OBJECT_PREFIX))
        if is_path and not Path(name).exists():
            raise UsageError(f"{name}: there is no such file")
    methods = [system.method for system in systems if METHODS[system.method].needs_training]
    if not methods:
        return Data([], [])
    for name in methods:
        if not train:
            raise UsageError(f"{name} needs training questions: give --train-data")
        if METHODS[name].needs_validation and not validation:
            raise UsageError(f"{name} needs validation questions: give --val-data")
    return Data(find_questions(train, "train", seed), sample_questions(validation, "validation", seed, 0))
