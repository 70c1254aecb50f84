"""One game as a coroutine, and groups of games side by side.

Waiting for the environment is waiting for one game only: the others go on decoding. A failed call is not a
reply: the game ends as "env_error" and leaves its group; no error text is ever shown to the agent.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from prompt_r1.errors import EnvError
from prompt_r1.protocol import LAST_TURN, Codec, parse
from prompt_r1.types import Ask, Generate, Message, Question, Trajectory, Turn


async def play(
    question: Question,
    generate: Generate,
    ask: Ask,
    codec: Codec,
    *,
    max_turns: int,
    max_tokens: int,
    max_new: int,
    max_reply: int = 0,
    force_answer: bool = False,
    seed: str,
) -> Trajectory:
    """Play one game (paper, eqs 1-11): at most `max_turns` turns of `max_new` tokens, `max_tokens` in all.

    The environment sees this game's prompts and replies, whole, and of the question what the agent repeats.
    At the last turn it is not asked: nobody would read the reply. The agent reads `max_reply` tokens of a
    reply (0: all). `force_answer`: it is told its last turn.
    """
    trajectory, history = Trajectory(question), list[Message]()
    notes = [""] * (max_turns - 1) + [LAST_TURN if force_answer else ""]  # one a turn
    trajectory.add_context(codec.opening(question.text, note=notes[0]))
    for number in range(1, max_turns + 1):
        room = max_tokens - len(trajectory.tokens)
        if room < 1:
            trajectory.stop = "max_tokens"
            break
        completion = await generate(trajectory.tokens, max_new=min(max_new, room), seed=f"{seed}/{number}")
        trajectory.add_sampled(completion)
        action = parse(text := codec.decode(completion.tokens))
        if not action.prompt or number == max_turns:
            trajectory.turns.append(Turn(text, action, reply=None))
            if action.answer is not None:
                trajectory.stop = "answered"
            elif not action.prompt:
                trajectory.stop = "malformed" if completion.finished else "max_tokens"
            break
        history.append({"role": "user", "content": action.prompt})
        asked = time.perf_counter()
        try:
            reply = await ask(history)
        except EnvError as error:
            trajectory.turns.append(Turn(text, action, reply=None, latency=time.perf_counter() - asked))
            trajectory.stop, trajectory.error = "env_error", str(error)
            break
        trajectory.turns.append(Turn(text, action, reply, latency=time.perf_counter() - asked))
        history.append({"role": "assistant", "content": reply})
        after, note = trajectory.tokens[-1], notes[number]
        trajectory.add_context(codec.reply(reply, after=after, max_tokens=max_reply, note=note))
    return trajectory


async def play_groups(
    questions: Sequence[Question],
    group_size: int,
    play_one: Callable[[Question, str, int], Awaitable[Trajectory]],
    *,
    seeds: Sequence[str],
) -> list[list[Trajectory]]:
    """`group_size` games of each question, all at once: P × G trajectories.

    Each question has its own seed (a question may come twice); its games' seeds end with their number in the
    group. `play_one` gets question, seed and this number.
    """
    games = [
        asyncio.ensure_future(play_one(question, f"{seed}/{number}", number))
        for question, seed in zip(questions, seeds, strict=True)
        for number in range(group_size)
    ]
    try:
        trajectories = await asyncio.gather(*games)  # raises the first error at once
    finally:
        for game in games:
            game.cancel()  # does nothing to a game that has ended
        await asyncio.gather(*games, return_exceptions=True)
    return [trajectories[start : start + group_size] for start in range(0, len(games), group_size)]
