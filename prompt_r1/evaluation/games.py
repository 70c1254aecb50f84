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

from dataclasses import replace

from prompt_r1.environments.environment import Environment
from prompt_r1.evaluation.ask_once import ReadyMethod
from prompt_r1.evaluation.predictions import Prediction
from prompt_r1.pair.agent import Agent, Sampling, play_question
from prompt_r1.reward import Rule, score_games, well_formed
from prompt_r1.types import Question, Reward, Spending, Trajectory


def answer_by_games(
    agent: Agent,
    environment: Environment,
    rule: Rule,
    sampling: Sampling,
    *,
    is_mute: bool = False,
    thinks: bool = True,
) -> ReadyMethod:
    """The method that answers each question by a game of this agent.

    Each game has its own seed, which begins with the seed of `sampling`. `is_mute`: whether the environment
    is mute. Its calls do not count. `thinks`: see `prediction_of`.
    """

    async def answer(question: Question, sample: int) -> Prediction:
        of_game = replace(sampling, seed=f"{sampling.seed}/{question.id}/{sample}")
        game = await play_question(agent, environment, question, of_game, sample=sample)
        [reward] = score_games([game], rule=rule)
        prediction = prediction_of(game, reward, thinks=thinks)
        return replace(prediction, spent=Spending()) if is_mute else prediction

    return answer


def prediction_of(game: Trajectory, reward: Reward | None, *, thinks: bool = True) -> Prediction:
    """The answer of a game. `reward` is None if the environment broke the game.

    `thinks`: whether the agent should write think blocks. If not, every game with an answer has the right
    format.
    """
    prediction = Prediction(
        game.question,
        game.answer,
        _dialogue(game),
        stop=str(game.stop),
        turns=len(game.turns),
        spent=game.spent,
    )
    if reward is None:
        return replace(prediction, error=game.error or "the environment failed")
    formatted = well_formed(game) if thinks else game.answer is not None
    return replace(prediction, format=float(formatted), reward=reward.total)


def _dialogue(game: Trajectory) -> str:
    """What the agent wrote and what the environment replied, line by line."""
    lines = []
    for turn in game.turns:
        lines.append(turn.text)
        if turn.reply is not None:
            lines.append(turn.reply)
    return "\n".join(lines)
