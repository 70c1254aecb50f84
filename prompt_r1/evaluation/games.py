"""Methods that play games: an agent asks an environment.

They differ in the agent, and in whether there is an environment:

    prompt-r1    the trained agent
    untrained    the agent before training, in the same game (the paper's "w/o RL")
    agent-only   the trained agent in the same game without an environment ("w/o Env"). Every prompt gets the
                 same sentence in reply, so the answers show what the agent itself knows
    grpo-only    an agent that was trained without an environment (train.py --env none), in games of one turn
    sft          an agent that was fine-tuned on gold answers, in games of one turn
    bc, rft      an agent that was fine-tuned on games that ended right
"""

from dataclasses import dataclass, replace

from prompt_r1.environments.environment import Environment
from prompt_r1.environments.own import MuteEnvironment, OwnSource
from prompt_r1.evaluation.predictions import Prediction
from prompt_r1.pair.agent import Agent, Sampling, play_question
from prompt_r1.reward import Rule, score, well_formed
from prompt_r1.types import Question, Spending, Trajectory


def mute_environment() -> Environment:
    """The environment of a method that needs none."""
    return Environment([OwnSource(MuteEnvironment(), seed=0)])


@dataclass
class AgentMethod:
    """Answers each question by a game."""

    agent: Agent
    environment: Environment
    rule: Rule
    sampling: Sampling  # Each game has its own seed, which begins with this one.
    is_mute: bool = False  # whether the environment is mute. Its calls do not count.
    # Whether a turn needs a think block to be well formed. The agent of `sft` writes none.
    thinks: bool = True

    async def __call__(self, question: Question, sample: int) -> Prediction:
        game = await play_question(
            self.agent,
            self.environment,
            question,
            replace(self.sampling, seed=f"{self.sampling.seed}/{question.id}/{sample}"),
            sample=sample,
        )
        prediction = Prediction(
            question,
            game.answer,
            _dialogue(game),
            stop=str(game.stop),
            turns=len(game.turns),
            spent=Spending() if self.is_mute else game.spent,
        )
        if game.stop == "env_error":
            return replace(prediction, error=game.error or "the environment failed")
        formatted = well_formed(game) if self.thinks else game.answer is not None
        return replace(prediction, format=float(formatted), reward=score(game, rule=self.rule).total)


def _dialogue(game: Trajectory) -> str:
    """What the agent wrote and what the environment replied, line by line."""
    lines = []
    for turn in game.turns:
        lines.append(turn.text)
        if turn.reply is not None:
            lines.append(turn.reply)
    return "\n".join(lines)
