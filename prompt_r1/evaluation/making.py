"""Make a method: get the function that answers its questions (`ReadyMethod`) ready."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from prompt_r1.environments.environment import Environment
from prompt_r1.evaluation.ask_once import Ask, ReadyMethod
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
from prompt_r1.pair.named_agent import NamedAgent, find_agent


@dataclass(frozen=True)
class Maker:
    """Makes the method of a system. Each row of METHODS calls one of its functions."""

    evaluation: Evaluation
    system: System
    data: Data  # the questions that prepare the method
    environment: Environment  # mute for a method that needs none
    optimizer: Environment | None  # None for a method that searches for no prompts

    @property
    def agent(self) -> NamedAgent:
        """The agent that the user gave for the system."""
        return self.evaluation.systems[self.system]

    @property
    def folder(self) -> Path:
        """Where the method keeps the prompts that it finds, or the agent that it fine-tunes.

        It is OUT/ENVIRONMENT/METHOD or, for a method that begins with an untrained agent,
        OUT/ENVIRONMENT/METHOD/START. A method without an environment takes the one of its agent's training.
        """
        spec = self.system.environment or self.agent.config.env
        folder = self.evaluation.folder / file_name(spec) / self.system.method
        if METHODS[self.system.method].agent == "start":
            return folder / file_name(self.agent.start)
        return folder

    async def ask(self, ask: Ask) -> ReadyMethod:
        """Ask the environment each question."""
        return partial(ask, self.environment, request_of(self.system.environment))

    async def search(self, algorithm: Algorithm) -> ReadyMethod:
        """Search for prompts. Then each question gets one call under the prompt of its dataset."""
        evaluation, environment, optimizer = self.evaluation, self.environment, self.optimizer
        assert optimizer is not None, "a search needs a model that writes prompts"
        request = request_of(self.system.environment)

        def new_search(dataset: str) -> PromptSearch:
            return PromptSearch(
                f"{self.system.method} ({dataset})",
                environment,
                optimizer,
                request,
                Calls(evaluation.config.optimize_calls),
                examples=evaluation.config.optimize_examples,
                seed=evaluation.seed,
            )

        prompts = await find_prompts(algorithm, new_search, evaluation.datasets, self.data, self.folder)
        return answer_under(prompts, environment, request)

    async def as_it_is(self) -> ReadyMethod:
        """Let the agent play as it is."""
        return self._play(self.agent)

    async def untrained(self) -> ReadyMethod:
        """Let the agent play as it was before its training."""
        return self._play(replace(self.agent, path=find_agent(self.agent.start, self.agent.config.seed)))

    async def sft(self) -> ReadyMethod:
        """Fine-tune the agent on gold answers, and let it play."""
        seed, device = self.evaluation.seed, self.evaluation.device
        agent = sft_agent(self.agent, self.data.train, seed=seed, device=device, folder=self.folder)
        return self._play(agent, thinks=False)

    async def bc(self) -> ReadyMethod:
        """Fine-tune the agent on demonstrations, and let it play."""
        seed, device = self.evaluation.seed, self.evaluation.device
        return self._play(bc_agent(self.agent, seed=seed, device=device, folder=self.folder))

    async def rft(self) -> ReadyMethod:
        """Fine-tune the agent on its own games that ended right, and let it play."""
        agent = await rft_agent(
            self.agent,
            self.environment,
            self.data.train,
            seed=self.evaluation.seed,
            device=self.evaluation.device,
            folder=self.folder,
            calls=self.evaluation.config.optimize_calls,
        )
        return self._play(agent)

    def _play(self, agent: NamedAgent, *, thinks: bool = True) -> ReadyMethod:
        """Load an agent, which answers each question by a game. `thinks`: see `prediction_of`."""
        evaluation, config = self.evaluation, self.evaluation.config
        return answer_by_games(
            load_agent(agent.path, with_threads_of_this_machine(agent.config), evaluation.device),
            self.environment,
            agent.config.base_rule,
            Sampling(f"evaluation/{evaluation.seed}", config.temperature, config.top_p),
            is_mute=not METHODS[self.system.method].needs_environment,
            thinks=thinks,
        )
