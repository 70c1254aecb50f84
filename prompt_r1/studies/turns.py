"""Proposition 1: more interactions, more right answers (eqs 20-33).

The proof is about the accuracy of what is known after t interactions (eq. 31). So each game is let go on for
t interactions, and then the agent's next turn is begun for it with a thought and an opening <answer>; what it
writes there is its answer after t interactions. A game that has ended by itself before keeps its answer.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from prompt_r1.agent.agent import Agent
from prompt_r1.metrics.statistics import wilson
from prompt_r1.metrics.text import exact_match
from prompt_r1.rollout import play
from prompt_r1.studies.figure import Point, Series, Study, cell, markdown_table
from prompt_r1.studies.runs import Run
from prompt_r1.types import Completion, Generate, Question, Trajectory

CLAIM = (
    "Proposition 1. Multiple-turn interactions of small-scale and large-scale LLMs can better solve problems."
)
# The demonstrations of the warm start end with these thoughts: the agent knows how to go on from them.
BLIND = "<think>I think I know this.</think>\n<answer>"
INFORMED = "<think>Now I know the answer.</think>\n<answer>"


def answering_at(turn: int, generate: Generate, prefix: list[int]) -> Generate:
    """The same agent, whose turn number `turn` (from 1) begins with the tokens of `prefix`."""

    async def generate_or_answer(tokens: list[int], *, max_new: int, seed: str) -> Completion:
        if int(seed.rsplit("/", 1)[1]) != turn:
            return await generate(tokens, max_new=max_new, seed=seed)
        rest = await generate([*tokens, *prefix], max_new=max(1, max_new - len(prefix)), seed=seed)
        return Completion([*prefix, *rest.tokens], [0.0] * len(prefix) + rest.logprobs, rest.finished)

    return generate_or_answer


def play_and_answer(run: Run, player: Agent, interactions: int) -> list[Trajectory]:
    """A greedy game of each question, with its answer after at most `interactions` interactions."""
    text = INFORMED if interactions else BLIND
    prefix = player.codec.tokenizer(text, add_special_tokens=False)["input_ids"]
    greedy = partial(player.generate, temperature=0.0)
    settings = replace(player.game, max_turns=interactions + 1)
    generate = answering_at(interactions + 1, greedy, prefix)

    async def one(question: Question) -> Trajectory:
        seed = f"study/{question.id}"
        return await play(question, generate, run.environment.ask, player.codec, settings, seed=seed)

    async def games() -> list[Trajectory]:
        return await asyncio.gather(*map(one, run.questions))

    return asyncio.run(games())


def study_turns(runs: Sequence[Run], *, most: int = 3) -> Study:
    """EM of the answer after 0 to `most` interactions: trained (by kind, and all) and untrained agents."""
    right: dict[tuple[str, int], list[float]] = {}
    for run in runs:
        for name, player in run.agents.items():
            for interactions in range(most + 1):
                for game in play_and_answer(run, player, interactions):
                    score = exact_match(game.answer or "", game.question.answers)
                    right.setdefault((name, interactions), []).append(score)
                    if name == "trained":
                        right.setdefault((game.question.dataset, interactions), []).append(score)
    names = ["trained", "untrained", *sorted({name for name, _ in right} - {"trained", "untrained"})]
    series = [
        Series(
            {"trained": "trained, all", "untrained": "untrained, all"}.get(name, name),
            [rate(interactions, right[name, interactions]) for interactions in range(most + 1)],
            dashed=name == "untrained",
        )
        for name in names
    ]
    table = markdown_table(
        ["agent, questions", "n", *(f"{t} interaction{'s' * (t != 1)}" for t in range(most + 1))],
        [[one.label, str(one.points[0].n), *map(cell, one.points)] for one in series],
    )
    notes = (
        f"EM [95 % Wilson interval], greedy games of test questions, pooled over {len(runs)} seeds.",
        "After t interactions the agent is made to answer; one that has answered before keeps its answer.",
        "Kinds: of the trained agent. pop and gen need one interaction, bridge, compare and math two.",
    )
    return Study("turns", "Accuracy against interactions", CLAIM, "interactions before the answer", "EM",
                 series, table, notes)  # fmt: skip


def rate(x: float, scores: Sequence[float]) -> Point:
    """The mean of scores that are 0 or 1, with Wilson's interval."""
    return Point(x, sum(scores) / len(scores), *wilson(sum(scores), len(scores)), len(scores))
