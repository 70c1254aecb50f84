"""Methods that fine-tune an agent before it plays: `sft`, `bc` and `rft`.

sft    LoRA on gold answers
bc     LoRA on recorded games that ended right: in the mini world, the demonstrations of the warm start
rft    LoRA on the agent's own games on training questions that ended right. In each of two rounds the agent
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
from prompt_r1.agent.names import trained_config
from prompt_r1.baselines.games import AgentMethod
from prompt_r1.baselines.method import Method
from prompt_r1.baselines.sft import fine_tune_agent, learn_answers
from prompt_r1.cli.command_line import teaching_command
from prompt_r1.config.agent import AgentConfig
from prompt_r1.config.methods import SftConfig
from prompt_r1.environments.environment import Environment
from prompt_r1.errors import UsageError
from prompt_r1.evaluation.predictions import Prediction
from prompt_r1.miniworld.agent import demonstrations
from prompt_r1.miniworld.demonstrations import record
from prompt_r1.protocol import Codec
from prompt_r1.reward import Rule, score, well_formed
from prompt_r1.rollout import play_question
from prompt_r1.types import Question, Trajectory

# Of rft:
ROUNDS, CALLS = 2, 10_000  # of playing and fine-tuning, and calls in all rounds
QUESTIONS_AT_ONCE = 20  # played between two looks at the calls that are left
GROUP_SIZE = 5  # games of a question
GAMES_WITHOUT_RIGHT = 100  # after which rft gives up, if none of them ended right


@dataclass
class FineTuned(Method):
    """Plays with the agent of `folder`, and fine-tunes it on gold answers unless it is there."""

    settings: SftConfig
    game: AgentConfig  # how the agent plays
    folder: Path
    player: AgentMethod  # plays with the agent that will be in `folder`

    async def prepare(self, train: Sequence[Question], validation: Sequence[Question]) -> None:
        if trained_config(self.folder / "agent") is None:
            await self.learn(train)

    async def learn(self, train: Sequence[Question]) -> None:
        """Fine-tune the agent of `folder`. Raises UsageError if there is nothing to learn from."""
        learn_answers(train, self.settings, self.folder)

    def imitate(self, games: Callable[[Codec], Sequence[Trajectory]], folder: Path) -> Path:
        """Fine-tune the start on games; the folder of the agent."""
        return fine_tune_agent(games, self.settings, self.game, folder)

    async def answer(self, question: Question, *, sample: int, seed: str) -> Prediction:
        return await self.player.answer(question, sample=sample, seed=seed)


@dataclass
class Imitation(FineTuned):
    """Imitates those demonstrations of the mini agent's warm start that ended right."""

    async def learn(self, train: Sequence[Question]) -> None:
        self.imitate(self.right_demonstrations, self.folder)

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
    environment: Environment
    calls: int = 0  # after which the last round ends; 0: CALLS

    async def learn(self, train: Sequence[Question]) -> None:
        if not train:
            raise UsageError("rft needs training questions: give --train-data")
        agent, right = self.load_start(), list[Trajectory]()
        rng = random.Random(f"rft {self.settings.seed}")
        for number in range(1, ROUNDS + 1):
            await self._play(agent, train, rng, number, right)
            if number < ROUNDS:
                folder = self.folder.with_name(f"{self.folder.name}-round-{number}")
                agent = load_agent(self.imitate(lambda _: right, folder), self.game, agent.policy.device)
        self.imitate(lambda _: right, self.folder)

    async def _play(
        self,
        agent: Agent,
        train: Sequence[Question],
        rng: random.Random,
        number: int,
        right: list[Trajectory],
    ) -> None:
        """Add the right games of a round. Raises UsageError if none of its first games ended right."""
        made = tried = 0
        play = partial(play_question, agent, self.environment, temperature=1.0)
        while made < (self.calls or CALLS) / ROUNDS and (right or tried < GAMES_WITHOUT_RIGHT):
            asked = rng.sample(train, min(QUESTIONS_AT_ONCE, len(train)))
            seeds = [f"rft {self.settings.seed}/{number}/{made}/{sample}" for sample in range(GROUP_SIZE)]
            games = [
                play(question, seed=f"{seed}/{question.id}", sample=sample)
                for question in asked
                for sample, seed in enumerate(seeds)
            ]
            played = await asyncio.gather(*games)
            made += sum(max(1, game.spent.calls) for game in played)  # an agent that never asks must end too
            tried += len(played)
            right += [game for game in played if is_right(game, self.player.rule)]
        if not right:
            start = self.settings.agent
            raise UsageError(
                f"no game of {start} ended right in {tried}: there is nothing to imitate. If it lacks the "
                f"format, `{teaching_command(str(start))}` teaches it"
            )
