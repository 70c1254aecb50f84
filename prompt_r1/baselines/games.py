"""The methods that play games: an agent asks an environment and answers.

prompt-r1    the trained agent
untrained    the agent before training, in the same game (the paper's "w/o RL")
agent-only   the trained agent in the same game without an environment ("w/o Env"): every prompt gets the same
             sentence in reply, so that the answers show what the agent itself knows
grpo-only    an agent trained without an environment (train.py --env none), in its game of one turn
sft          an agent fine-tuned on gold answers, also in one turn
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from prompt_r1.agent.agent import Agent
from prompt_r1.baselines.method import Ledger, Meter
from prompt_r1.environments.metered import MuteEnvironment
from prompt_r1.environments.pool import Pool
from prompt_r1.evaluation.predictions import Prediction
from prompt_r1.reward import Rule, score, well_formed
from prompt_r1.rollout import play
from prompt_r1.types import Environment, Question, Trajectory


class AgentMethod:
    """Answers each question by a game. Without an environment the agent learns nothing in it."""

    def __init__(
        self,
        name: str,
        load: Callable[[], Agent],
        environment: Pool | None,
        *,
        rule: Rule,
        temperature: float,
        top_p: float = 1.0,
        thinks: bool = True,
    ) -> None:
        """`load` returns the agent; with `thinks` a turn without a think block is not well-formed."""
        self.name = name
        self.ledger = Ledger()
        self._load = load
        self._environment = environment
        self._rule = rule
        self._temperature = temperature
        self._top_p = top_p
        self._thinks = thinks

    async def prepare(self, train: Sequence[Question], validation: Sequence[Question]) -> None:
        pass

    async def answer(self, question: Question, *, sample: int, seed: str) -> Prediction:
        if self._environment is None:
            return self._prediction(await self._play(question, MuteEnvironment(), sample, seed))
        meter = Meter(self._environment)
        trajectory = await self._play(question, meter, sample, seed)
        return meter.spent.bill(self._prediction(trajectory))

    async def _play(self, question: Question, environment: Environment, sample: int, seed: str) -> Trajectory:
        agent = self._load()
        generate = partial(agent.generate, temperature=self._temperature, top_p=self._top_p)
        ask = partial(environment.ask, sample=sample, session=question.id)
        return await play(question, generate, ask, agent.codec, agent.game, seed=seed)

    def _prediction(self, trajectory: Trajectory) -> Prediction:
        prediction = Prediction(
            trajectory.question,
            trajectory.answer,
            dialogue_text(trajectory),
            stop=trajectory.stop,
            turns=len(trajectory.turns),
        )
        if trajectory.stop == "env_error":
            return replace(prediction, error=trajectory.error or "the environment failed")
        formatted = well_formed(trajectory) if self._thinks else trajectory.answer is not None
        reward = score(trajectory, rule=self._rule).total
        return replace(prediction, format=float(formatted), reward=reward)


def dialogue_text(trajectory: Trajectory) -> str:
    """The agent's turns and the replies as text, without the opening."""
    lines = [text for turn in trajectory.turns for text in (turn.text, turn.reply) if text is not None]
    return "\n".join(lines)
