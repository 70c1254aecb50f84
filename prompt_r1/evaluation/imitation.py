"""Methods that fine-tune an agent before it plays: `sft`, `bc` and `rft`.

sft    LoRA on gold answers
bc     LoRA on recorded games that ended right: in the mini world, the demonstrations of the warm start
rft    LoRA on the agent's own games on training questions that ended right. In each of two rounds the agent
       of the round before plays, and its start learns from all right games so far (STaR, Zelikman et al.
       2022, arXiv 2203.14465; ReST, Gulcehre et al. 2023, arXiv 2308.08998)
"""

import asyncio
import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from prompt_r1.environments.environment import Environment
from prompt_r1.errors import UsageError
from prompt_r1.miniworld.agent import demonstrations
from prompt_r1.miniworld.demonstrations import record
from prompt_r1.pair.agent import Agent, load_agent, play_question
from prompt_r1.programs.command_line import teaching_command
from prompt_r1.protocol import Codec
from prompt_r1.reward import Rule, score, well_formed
from prompt_r1.settings.agent import AgentConfig
from prompt_r1.training.warm_start import fine_tune_agent
from prompt_r1.training.warm_start_settings import SftConfig
from prompt_r1.types import Question, Trajectory

# Of rft:
ROUNDS, CALLS = 2, 10_000  # of playing and fine-tuning, and calls in all rounds
QUESTIONS_AT_ONCE = 20  # played between two looks at the calls that are left
GROUP_SIZE = 5  # games of a question
GAMES_WITHOUT_RIGHT = 100  # after which rft gives up, if none of them ended right


def is_right(game: Trajectory, rule: Rule) -> bool:
    """Whether a game asks, is well-formed throughout, and earns the full reward."""
    full = score(game, rule=rule).total > 1 - 1e-6
    return full and well_formed(game) and len(game.turns) > 1


def right_demonstrations(seed: int, rule: Rule, codec: Codec) -> list[Trajectory]:
    """The demonstrations of the mini agent's warm start that ended right."""
    played = (record(*one, codec) for one in demonstrations(seed))
    return [one for one in played if is_right(one, rule)]


async def imitate_own_games(
    agent: Agent,
    environment: Environment,
    train: Sequence[Question],
    settings: SftConfig,
    game: AgentConfig,
    folder: Path,
    *,
    calls: int,
) -> None:
    """`rft`: rounds of games and of fine-tuning; `calls`, after which the last one ends (0: CALLS).

    Raises UsageError if none of the first games ended right.
    """
    rng, right, epoch = random.Random(f"rft {settings.seed}"), list[Trajectory](), 0
    for number in range(1, ROUNDS + 1):
        made = tried = 0
        play = partial(play_question, agent, environment, temperature=1.0)
        while made < (calls or CALLS) / ROUNDS and (right or tried < GAMES_WITHOUT_RIGHT):
            asked = rng.sample(train, min(QUESTIONS_AT_ONCE, len(train)))
            seeds = [f"rft {settings.seed}/{number}/{made}/{sample}" for sample in range(GROUP_SIZE)]
            epoch += 1  # a question that is drawn again gets new replies where the environment samples
            games = [
                play(question, seed=f"{seed}/{question.id}", sample=sample, epoch=epoch)
                for question in asked
                for sample, seed in enumerate(seeds)
            ]
            played = await asyncio.gather(*games)
            made += sum(max(1, one.spent.calls) for one in played)  # an agent that never asks must end too
            tried += len(played)
            right.extend(one for one in played if is_right(one, game.base_rule))
        if not right:
            raise UsageError(
                f"no game of {settings.agent} ended right in {tried}: there is nothing to imitate. If it "
                f"lacks the format, `{teaching_command(settings.agent)}` teaches it"
            )
        out = folder if number == ROUNDS else folder.with_name(f"{folder.name}-round-{number}")
        learned = fine_tune_agent(lambda _: right, settings, game, out)
        if number < ROUNDS:
            agent = load_agent(learned, game, agent.policy.device)
