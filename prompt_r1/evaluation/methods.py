"""Make methods by name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from prompt_r1.data.questions import find_questions, sample_questions
from prompt_r1.environments.environment import Environment
from prompt_r1.environments.specs import parse_fields
from prompt_r1.errors import UsageError
from prompt_r1.evaluation.ask_once import ANSWER_ONLY, IN_TAGS, Answer, direct, think_then_answer
from prompt_r1.evaluation.games import AgentMethod
from prompt_r1.evaluation.gepa import gepa
from prompt_r1.evaluation.imitation import imitate_own_games, right_demonstrations
from prompt_r1.evaluation.opro import opro
from prompt_r1.evaluation.predictions import System
from prompt_r1.evaluation.searches import Algorithm, PromptSearch, file_name, optimised_prompt
from prompt_r1.evaluation.settings import METHODS, EvaluateConfig
from prompt_r1.evaluation.textgrad import textgrad
from prompt_r1.pair.agent import load_agent
from prompt_r1.pair.names import find_agent
from prompt_r1.pair.trained import AgentSpec, resolve_agent, trained_config
from prompt_r1.settings.agent import MINI_AGENT, is_mini, is_mini_data
from prompt_r1.training.warm_start import example_of, fine_tune_agent, one_turn_config
from prompt_r1.training.warm_start_settings import SftConfig
from prompt_r1.types import Question

ALGORITHMS: dict[str, Algorithm] = {"opro": opro, "textgrad": textgrad, "gepa": gepa}
# Request fields of the environment that answers, and of the model that writes prompts, as in the authors'
# code or paper.
TASK_FIELDS: dict[str, Mapping[str, object]] = {
    "cot": {"temperature": 0.0},
    "opro": {"temperature": 0.0, "max_tokens": 1024},
    "textgrad": {"temperature": 0.0, "max_tokens": 2000},
}
OPTIMIZER_FIELDS: dict[str, Mapping[str, object]] = {
    "opro": {"temperature": 1.0, "max_tokens": 512},
    "textgrad": {"temperature": 0.0, "max_tokens": 2000},
}


@dataclass
class MethodMaker:
    """Makes the methods of an evaluation, each with an environment and an agent of its own."""

    config: EvaluateConfig
    systems: Mapping[System, AgentSpec]
    datasets: Sequence[str]  # of the questions that will be answered
    open_environment: Callable[..., Environment]  # of a SPEC; with one journal and one budget for all
    device: torch.device
    seed: int  # of what a method draws while it prepares, and of games
    folder: Path  # prepared results are in folder/SPEC/METHOD

    def preparation_questions(self, method: str) -> tuple[list[Question], list[Question]]:
        """Training and validation questions, if the method needs them; the mini world brings its own."""
        if not METHODS[method].training:
            return [], []
        own = ("mini",) if all(map(is_mini_data, self.config.data)) else ()
        train = find_questions(self.config.train_data or own, "train", self.seed)
        return train, sample_questions(self.config.val_data or own, "validation", self.seed, 0)

    async def make(self, system: System) -> Answer:
        """The method of a system, ready to answer; prompts and agents of an earlier run are used again."""
        name, agent, config = system.method, self.systems[system], self.config
        fields = {**parse_fields(config.env_args), **TASK_FIELDS.get(name, {})}
        # A method that asks no environment gets the mini world, which needs no key.
        environment = self.open_environment(system.environment or "mini", fields=fields)
        await environment.check()  # before large agents are loaded
        spec = system.environment or agent.config.env
        request = ANSWER_ONLY if is_mini(spec) else IN_TAGS
        folder = self.folder / file_name(spec) / name
        train, validation = self.preparation_questions(name)
        match name:
            case "direct":
                return partial(direct, environment, request)
            case "cot":
                return partial(think_then_answer, environment, request)
            case "opro" | "textgrad" | "gepa":
                if is_mini(spec) and not config.optimizer_env:
                    raise UsageError(
                        f"--method {name}: the mini world writes no prompts: name what does, such as "
                        "--optimizer-env py:studies.advice:MiniOptimizer"
                    )
                optimizer = self.open_environment(
                    config.optimizer_env or spec,
                    fields=OPTIMIZER_FIELDS.get(name, {}),
                    price=config.optimizer_price,
                )
                calls, examples = config.optimize_calls, config.optimize_examples
                search = PromptSearch(name, environment, optimizer, request, calls, examples, self.seed)
                questions = self.datasets, folder, train, validation
                return await optimised_prompt(ALGORITHMS[name], search, *questions)
            case "sft" | "bc" | "rft":
                return await self._fine_tuned(name, agent, environment, folder, train)
            case "grpo-only":
                agent = resolve_agent(config.grpo_agent)
            case "untrained":
                agent = replace(agent, path=find_agent(agent.start, agent.config.seed))
        return self._player(name, agent, environment)  # also agent-only and prompt-r1

    def _player(self, name: str, spec: AgentSpec, environment: Environment) -> AgentMethod:
        """The method of this name that plays games with an agent."""
        rule, config = spec.config.base_rule, self.config
        agent = load_agent(spec.path, spec.config, self.device)
        asked, thinks = environment if METHODS[name].environment else None, name != "sft"
        return AgentMethod(agent, asked, rule, config.temperature, config.top_p, self.seed, thinks)

    async def _fine_tuned(
        self, name: str, agent: AgentSpec, environment: Environment, folder: Path, train: Sequence[Question]
    ) -> Answer:
        """`sft`, `bc` or `rft`: fine-tune the user's agent from its start, unless that is done, and play."""
        start = agent.start
        if name == "bc" and start != MINI_AGENT:
            raise UsageError(
                "bc imitates the demonstrations of the mini agent: leave it out with other agents"
            )
        settings = SftConfig(
            agent=start,
            seed=self.seed,
            lr=3e-3 if start == MINI_AGENT else 1e-4,  # at LLaMA-Factory's rate the mini agent does not learn
            rank=8 if name == "sft" else 16,
            device=str(self.device),
        )
        # The mini agent of another seed is another agent: the start is that of the run that trained it.
        game = replace(one_turn_config(settings), seed=agent.config.seed) if name == "sft" else agent.config
        is_new = trained_config(folder / "agent") is None
        if is_new and name == "sft":
            fine_tune_agent(lambda codec: [example_of(one, codec) for one in train], settings, game, folder)
        elif is_new and name == "bc":
            right = partial(right_demonstrations, self.seed, game.base_rule)
            fine_tune_agent(right, settings, game, folder)
        elif is_new:
            player = load_agent(find_agent(start, game.seed), game, self.device)
            calls = self.config.optimize_calls
            await imitate_own_games(player, environment, train, settings, game, folder, calls=calls)
        return self._player(name, AgentSpec(folder / "agent", game, start), environment)
