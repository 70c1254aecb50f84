"""The methods that play: an agent questions an environment, and answers.

prompt-r1    the trained agent
untrained    what it was before training, in the same game (the paper's "w/o RL")
agent-only   the trained agent in the same game with nobody to ask ("w/o Env"): it writes its prompts as
             it has learnt to, and each gets the same sentence: what it answers is its own knowledge
grpo-only    an agent that was trained without environment (train.py --env none), in its game of one turn
sft          an agent that was fine-tuned on gold answers, in one turn, too
"""

from collections.abc import Callable, Sequence
from functools import partial

from prompt_r1.agent.agent import Agent
from prompt_r1.baselines.method import Attempt, Ledger, Meter
from prompt_r1.config.train import TrainConfig
from prompt_r1.environments.metered import MuteEnvironment
from prompt_r1.environments.pool import Pool
from prompt_r1.reward import well_formed
from prompt_r1.rollout import play
from prompt_r1.types import Environment, Question, Trajectory


class Game:
    """One game for an answer. `load` gives the agent. Without an environment nobody replies."""

    def __init__(
        self,
        name: str,
        load: Callable[[], Agent],
        environment: Pool | None,
        *,
        game: TrainConfig,
        temperature: float,
        thinks: bool = True,
    ) -> None:
        """`thinks`: a turn without a thought is not well-formed."""
        self.name = name
        self.ledger = Ledger()
        self._thinks = thinks
        self._load = load
        self._environment = environment
        self._game = game
        self._temperature = temperature

    async def prepare(self, train: Sequence[Question], validation: Sequence[Question]) -> None:
        pass

    async def answer(self, question: Question, *, sample: int, seed: str) -> Attempt:
        if self._environment is None:
            trajectory = await self._play(question, MuteEnvironment(), sample, seed)
            return self._attempt(trajectory)
        meter = Meter(self._environment)
        trajectory = await self._play(question, meter, sample, seed)
        return meter.billed(self._attempt(trajectory))

    async def _play(self, question: Question, environment: Environment, sample: int, seed: str) -> Trajectory:
        agent = self._load()
        generate = partial(agent.generate, temperature=self._temperature)
        ask = partial(environment.ask, sample=sample, session=question.id)
        return await play(question, generate, ask, agent.codec, self._game.game, seed=seed)

    def _attempt(self, trajectory: Trajectory) -> Attempt:
        failed = trajectory.stop == "env_error"
        formed = well_formed(trajectory) if self._thinks else trajectory.answer is not None
        return Attempt(
            trajectory.answer,
            spoken(trajectory),
            turns=len(trajectory.turns),
            stop=trajectory.stop,
            error=(trajectory.error or "the environment failed") if failed else None,
            format=None if failed else float(formed),
            trajectory=trajectory,
        )


def spoken(trajectory: Trajectory) -> str:
    """The dialogue as text, without the opening."""
    lines = [text for turn in trajectory.turns for text in (turn.text, turn.reply) if text is not None]
    return "\n".join(lines)
