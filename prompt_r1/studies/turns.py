"""Proposition 1: more interactions give more correct answers (eqs 20-33).

    Multiple-turn interactions of small-scale and large-scale LLMs can better solve problems.

The proof is about the accuracy of what the agent knows after t interactions (eq. 31). Each game is therefore
played for t interactions; then the agent's next turn is started for it, with a thought and an opening
<answer> tag, and what it writes there is its answer. A game that ends earlier keeps its answer.
"""

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from prompt_r1.agent.agent import Agent, load_agent
from prompt_r1.agent.frame_file import kept_frame
from prompt_r1.agent.names import find_agent, trained_config
from prompt_r1.cli.markdown import markdown_table
from prompt_r1.config.yaml_files import GAME_FILE, read_mapping
from prompt_r1.distributed.ranks import pick_device
from prompt_r1.errors import UsageError
from prompt_r1.metrics.em_f1 import exact_match
from prompt_r1.miniworld import MiniEnvironment, mini_world
from prompt_r1.rollout import play
from prompt_r1.studies.study import rate_point
from prompt_r1.types import Completion, Generate, Question, Trajectory

MOST = 3  # interactions
# The warm-start demonstrations end with these thoughts, so the agent knows how to continue after them.
THOUGHT_BEFORE_ASKING = "<think>I think I know this.</think>\n<answer>"
THOUGHT_AFTER_ASKING = "<think>Now I know the answer.</think>\n<answer>"


@dataclass(frozen=True)
class StudiedRun:
    """A mini run: its agent before and after training, its environment and test questions."""

    agents: dict[str, Agent]  # "untrained", "trained"
    environment: MiniEnvironment
    questions: list[Question]


def find_runs(under: Path) -> list[Path]:
    """The mini runs in a folder; the longest of each seed."""
    longest: dict[int, tuple[int, Path]] = {}  # seed → steps and agent folder
    for file in sorted(under.glob(f"*/agent/{GAME_FILE}")):
        config = trained_config(file.parent)
        if config and config.agent == "mini" and config.env == "mini":
            found = int(str(read_mapping(file)["steps"])), file.parent
            longest[config.seed] = max(longest.get(config.seed, found), found)
    return [agent.parent for _, agent in longest.values()]


def load_run(folder: Path, *, per_kind: int) -> StudiedRun:
    """A run with the first `per_kind` test questions of each kind.

    Raises UsageError if it was not trained with the mini world.
    """
    config = trained_config(folder / "agent")
    if config is None or config.env != "mini":
        raise UsageError(f"{folder} is not a run with the environment mini, which the studies need")
    device, mini = pick_device("cpu"), mini_world(config.seed)
    start, frame = find_agent(config.agent, config.seed), kept_frame(folder / "agent")
    agents = {
        "untrained": load_agent(start, config, device, frame=frame),
        "trained": load_agent(folder / "agent", config, device),
    }
    environment = MiniEnvironment(mini.world, seed=config.seed)
    return StudiedRun(agents, environment, first_of_each_kind(mini.test, per_kind))


def first_of_each_kind(questions: Sequence[Question], per_kind: int) -> list[Question]:
    """The first `per_kind` questions of each kind."""
    found: list[Question] = []
    for kind in dict.fromkeys(question.dataset for question in questions):
        found += [question for question in questions if question.dataset == kind][:per_kind]
    return found


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
    prefix = agent.codec.encode_trusted(THOUGHT_AFTER_ASKING if interactions else THOUGHT_BEFORE_ASKING)
    greedy = partial(agent.engine.generate, temperature=0.0)
    generate = answer_in_turn(interactions + 1, greedy, prefix)
    rules = replace(agent.game, max_turns=interactions + 1)

    async def play_one(question: Question) -> Trajectory:
        seed = f"study/{question.id}"
        return await play(question, generate, run.environment.ask, agent.codec, rules, seed=seed)

    async def play_all() -> list[Trajectory]:
        return await asyncio.gather(*map(play_one, run.questions))

    games = asyncio.run(play_all())
    assert all(game.stop != "env_error" for game in games), "the mini world never fails"
    return games


def turns_table(runs: Sequence[StudiedRun]) -> str:
    """A Markdown table: EM of greedy games of test questions after 0 to MOST interactions.

    With 95 % intervals; both agents on all questions, the trained one also by kind.
    """
    # row, interactions → run → EM of each game
    scores: dict[tuple[str, int], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for number, run in enumerate(runs):
        for name, agent in run.agents.items():
            for interactions in range(MOST + 1):
                for game in play_and_answer(run, agent, interactions):
                    apart = [game.question.dataset] if name == "trained" else []
                    for label in (f"{name}, all", *apart):
                        em = exact_match(game.answer or "", game.question.answers)
                        scores[label, interactions][number].append(em)
    agents = ["trained, all", "untrained, all"]
    rows = []
    for label in (*agents, *sorted({label for label, _ in scores} - set(agents))):
        columns = [scores[label, count] for count in range(MOST + 1)]
        points = [rate_point(count, list(column.values())) for count, column in enumerate(columns)]
        rows.append([label, str(points[0].n), *map(str, points)])
    header = ["agent, questions", "n"]
    header += [f"{n} interaction" if n == 1 else f"{n} interactions" for n in range(MOST + 1)]
    return markdown_table(header, rows)
