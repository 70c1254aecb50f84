"""Proposition 1: more interactions with the environment give more correct answers (eqs 20-33).

The proof is about the accuracy of what the agent knows after t interactions (eq. 31). Each game is therefore
played for t interactions; then the agent's next turn is started for it, with a thought and an opening
<answer> tag, and what it writes there is its answer. A game that ends earlier keeps its answer.
"""

from collections.abc import Sequence
from dataclasses import replace

from prompt_r1.agent.agent import Agent
from prompt_r1.cli.markdown import markdown_table
from prompt_r1.metrics.text import exact_match
from prompt_r1.report.svg import Plot, Series, rate_text
from prompt_r1.studies.runs import StudiedRun, greedy, play_all, seed_groups
from prompt_r1.studies.study import Study, rate_point
from prompt_r1.types import Completion, Generate, Trajectory

CLAIM = (
    "Proposition 1. Multiple-turn interactions of small-scale and large-scale LLMs can better solve problems."
)
# The warm-start demonstrations end with these thoughts, so the agent knows how to continue after them.
THOUGHT_BEFORE_ASKING = "<think>I think I know this.</think>\n<answer>"
THOUGHT_AFTER_ASKING = "<think>Now I know the answer.</think>\n<answer>"


def answer_in_turn(turn: int, generate: Generate, prefix: list[int]) -> Generate:
    """The same agent, except that its turn number `turn` (from 1) starts with the tokens of `prefix`."""

    async def generate_or_answer(tokens: list[int], *, max_new: int, seed: str) -> Completion:
        if int(seed.rsplit("/", 1)[1]) != turn:
            return await generate(tokens, max_new=max_new, seed=seed)
        rest = await generate([*tokens, *prefix], max_new=max(1, max_new - len(prefix)), seed=seed)
        return Completion([*prefix, *rest.tokens], [0.0] * len(prefix) + rest.logprobs, rest.finished)

    return generate_or_answer


def play_and_answer(run: StudiedRun, agent: Agent, interactions: int) -> list[Trajectory]:
    """A greedy game of each question, answered after at most `interactions` interactions."""
    text = THOUGHT_AFTER_ASKING if interactions else THOUGHT_BEFORE_ASKING
    prefix = agent.codec.encode_trusted(text)
    generate = answer_in_turn(interactions + 1, greedy(agent), prefix)
    game = replace(agent.game, max_turns=interactions + 1)
    return play_all(run.questions, generate, run.environment.ask, agent, game)


def study_turns(runs: Sequence[StudiedRun], *, most: int = 3) -> Study:
    """EM after 0 to `most` interactions: both agents on all questions, the trained one also by kind."""
    scores: dict[tuple[str, int], list[float]] = {}  # line of the table and interactions → EM of each game
    groups = seed_groups({run.seed for run in runs})
    for run in runs:
        for name, agent in run.agents.items():
            for interactions in range(most + 1):
                for game in play_and_answer(run, agent, interactions):
                    em = exact_match(game.answer or "", game.question.answers)
                    scores.setdefault((f"{name}, all", interactions), []).append(em)
                    if name == "trained":
                        scores.setdefault((game.question.dataset, interactions), []).append(em)
                        for group in [group for group, seeds in groups.items() if run.seed in seeds]:
                            scores.setdefault((f"trained, {group}", interactions), []).append(em)
    agents, apart = ["trained, all", "untrained, all"], [f"trained, {group}" for group in groups]
    kinds = sorted({label for label, _ in scores} - {*agents, *apart})
    series = [
        Series(
            label,
            [rate_point(interactions, scores[label, interactions]) for interactions in range(most + 1)],
            dashed=label.startswith("untrained"),
        )
        for label in [*agents, *kinds, *apart]
    ]
    header = ["agent, questions", "n"]
    header += [f"{n} interaction" if n == 1 else f"{n} interactions" for n in range(most + 1)]
    rows = [[one.label, str(one.points[0].n), *map(rate_text, one.points)] for one in series]
    notes = (
        f"EM [95 % Wilson interval], greedy games of test questions, {len(runs)} seeds pooled.",
        "After t interactions the agent is forced to answer; an agent that answers earlier keeps its answer.",
        "Kinds: the trained agent. By construction, pop and gen need one interaction; bridge, compare and "
        "math need two.",
        "The wordings of the mini world were chosen on seed 0.",
    )
    drawn = [one for one in series if one.label not in apart]
    plot = Plot("Exact match by interactions", "interactions before the answer", "EM", drawn)
    return Study("turns", CLAIM, plot, markdown_table(header, rows), notes)
