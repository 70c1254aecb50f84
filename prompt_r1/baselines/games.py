"""The methods that play: an agent questions an environment, and answers.

prompt-r1    the trained agent
untrained    what it was before training, in the same game (the paper's "w/o RL")
agent-only   the trained agent in the same game with nobody to ask ("w/o Env"): it writes its prompts as
             it has learnt to, and each gets the same sentence: what it answers is its own knowledge
"""

from collections.abc import Callable, Sequence

from prompt_r1.baselines.method import Attempt, Ledger, Meter
from prompt_r1.config import TrainConfig
from prompt_r1.environments.pool import Pool
from prompt_r1.players import Player
from prompt_r1.reward import well_formed
from prompt_r1.types import Environment, Message, Question, Trajectory


class Nobody:
    """Tells nothing, costs nothing."""

    name = "nobody"

    async def ask(self, messages: list[Message], *, sample: int = 0, session: str = "") -> str:
        return "I have nothing to say about this."

    async def close(self) -> None:
        pass


class Game:
    """One game for an answer. `load` gives the agent. Without an environment nobody replies."""

    def __init__(
        self,
        name: str,
        load: Callable[[], Player],
        environment: Pool | None,
        *,
        game: TrainConfig,
        temperature: float,
    ) -> None:
        self.name = name
        self.ledger = Ledger()
        self._load = load
        self._environment = environment
        self._game = game
        self._temperature = temperature

    async def prepare(self, train: Sequence[Question], validation: Sequence[Question]) -> None:
        pass

    async def answer(self, question: Question, *, sample: int, seed: str) -> Attempt:
        if self._environment is None:
            trajectory = await self._play(question, Nobody(), sample, seed)
            return Attempt(trajectory.answer, spoken(trajectory), **_ending(trajectory))
        meter = Meter(self._environment)
        trajectory = await self._play(question, meter, sample, seed)
        return meter.attempt(trajectory.answer, spoken(trajectory), **_ending(trajectory))

    async def _play(self, question: Question, environment: Environment, sample: int, seed: str) -> Trajectory:
        return await self._load().play(
            question, seed, sample, environment=environment, config=self._game, temperature=self._temperature
        )


def spoken(trajectory: Trajectory) -> str:
    """The dialogue as text, without the opening."""
    lines = [text for turn in trajectory.turns for text in (turn.text, turn.reply) if text is not None]
    return "\n".join(lines)


def _ending(trajectory: Trajectory) -> dict[str, object]:
    failed = trajectory.stop == "env_error"
    return {
        "turns": len(trajectory.turns),
        "stop": trajectory.stop,
        "error": (trajectory.error or "the environment failed") if failed else None,
        "format": None if failed else float(well_formed(trajectory)),
        "trajectory": trajectory,
    }
