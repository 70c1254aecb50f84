"""`bc` and `rft`: LoRA on games that ended right.

bc     behaviour cloning of recorded games: in the mini world, the demonstrations of the warm start
rft    rejection-sampling fine-tuning on the agent's own games on training questions. In each round the agent
       of the round before plays, and its start learns from all right games so far (STaR, Zelikman et al.
       2022, arXiv 2203.14465; ReST, Gulcehre et al. 2023, arXiv 2308.08998)
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from prompt_r1.agent.agent import Agent, load_agent
from prompt_r1.baselines.sft import FineTuned, fine_tune_agent
from prompt_r1.data.sampler import digest_of
from prompt_r1.environments.pool import Pool
from prompt_r1.errors import UsageError
from prompt_r1.miniworld.agent import demonstrations
from prompt_r1.miniworld.demonstrations import record
from prompt_r1.playing import PlaySettings, play_question
from prompt_r1.protocol import Codec
from prompt_r1.reward import Rule, score, well_formed
from prompt_r1.types import Question, Trajectory

# Of rft:
QUESTIONS_AT_ONCE = 32  # played between two looks at the calls that are left
GROUP_SIZE = 5  # games of a question


@dataclass
class Imitation(FineTuned):
    """Imitates those demonstrations of the mini agent's warm start that ended right."""

    def lesson(self, train: Sequence[Question]) -> str:
        """What the agent learns from, and how."""
        return f"right demonstrations, {self.settings}"

    async def learn(self, train: Sequence[Question]) -> None:
        """Fine-tune the agent of `folder`."""
        fine_tune_agent(self.right_demonstrations, self.settings, self.game, self.folder)

    def right_demonstrations(self, codec: Codec) -> list[Trajectory]:
        """The games to learn from."""
        shown = demonstrations(self.settings.seed)
        played = (record(*one, codec) for one in shown)
        return [game for game in played if is_right(game, self.player.rule)]


def is_right(game: Trajectory, rule: Rule) -> bool:
    """Whether a game asks, is well-formed throughout, and earns the full reward."""
    full = score(game, rule=rule).total > 1 - 1e-6
    return full and well_formed(game) and len(game.turns) > 1


@dataclass
class RejectionSampling(FineTuned):
    """Imitates the agent's own games that ended right."""

    load_start: Callable[[], Agent]
    environment: Pool
    rounds: int
    calls: int  # after which the last round ends

    def lesson(self, train: Sequence[Question]) -> str:
        """What the agent learns from, and how."""
        plan = f"{self.rounds} rounds, {self.calls} calls, groups of {GROUP_SIZE}"
        return f"games on {digest_of(train) if train else ''}, {plan}, {self.settings}"

    async def learn(self, train: Sequence[Question]) -> None:
        """Fine-tune the agent of `folder`. Raises UsageError without training questions or a right game."""
        if not train:
            raise UsageError("rft needs training questions: give --train-data")
        agent, right = self.load_start(), list[Trajectory]()
        rng = random.Random(f"rft {self.settings.seed}")
        for number in range(1, self.rounds + 1):
            right += await self._play(agent, train, rng, number)
            if not right:
                raise UsageError(f"no game of {self.settings.agent} ended right: there is nothing to imitate")
            if number < self.rounds:
                folder = self.folder.with_name(f"{self.folder.name}-round-{number}")
                agent = load_agent(self.imitate(right, folder), self.game, agent.policy.device)
        self.imitate(right, self.folder)

    def imitate(self, games: Sequence[Trajectory], folder: Path) -> Path:
        """Fine-tune the start on games; the folder of the agent."""
        return fine_tune_agent(lambda codec: list(games), self.settings, self.game, folder)

    async def _play(
        self, agent: Agent, train: Sequence[Question], rng: random.Random, number: int
    ) -> list[Trajectory]:
        """The right games of a round."""
        made, right = 0, list[Trajectory]()
        play = partial(play_question, agent, self.environment, how=PlaySettings(temperature=1.0))
        while made < self.calls / self.rounds:
            asked = rng.sample(train, min(QUESTIONS_AT_ONCE, len(train)))
            seeds = [f"rft {self.settings.seed}/{number}/{made}/{sample}" for sample in range(GROUP_SIZE)]
            games = [
                play(question, seed=f"{seed}/{question.id}", sample=sample)
                for question in asked
                for sample, seed in enumerate(seeds)
            ]
            played = await asyncio.gather(*games)
            self.ledger.task = sum((game.spent for game in played), self.ledger.task)
            made += sum(max(1, game.spent.calls) for game in played)  # an agent that never asks must end too
            right += [game for game in played if is_right(game, self.player.rule)]
        return right
