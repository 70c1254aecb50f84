"""Proposition 3: an agent that was trained with one environment does better with others too (eqs 40-54).

The proof bounds how far accuracy can fall by the distance of the environments' replies (eq. 46, total
variation). Both mini environments are functions of the prompt, so the distance at a prompt is 0 or 1, and its
mean over the prompts that the trained agent asks at home is a share: of prompts to which the other one
*tells* something else (another value, or none), and of prompts that it *words* otherwise. Environments
between home and another are mixtures: of every prompt a hash decides who replies.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from prompt_r1.metrics.statistics import paired_bootstrap
from prompt_r1.metrics.text import exact_match
from prompt_r1.miniworld import MiniEnvironment
from prompt_r1.miniworld.environment import MiniReply
from prompt_r1.studies.figure import Point, Series, Study, cell, markdown_table
from prompt_r1.studies.runs import Run, play_greedily
from prompt_r1.studies.turns import rate
from prompt_r1.types import Message, Trajectory

CLAIM = (
    "Proposition 3. The agent trained with an LLM as the environment can also perform better with other LLMs."
)
SHARES = (0.25, 0.5, 0.75, 1.0)
SILENCE = MiniReply("I have nothing to say about this.", "")


@dataclass
class Mixture:
    """Replies as `other` (None: mute) to that share of all prompts, else as `home`."""

    home: MiniEnvironment
    other: MiniEnvironment | None
    share: float
    name: str = "mixture"

    def reply(self, prompt: str) -> MiniReply:
        draw = random.Random(f"mixture {self.home.seed} {prompt}".encode("utf-8", "replace")).random()
        if draw >= self.share:
            return self.home.reply(prompt)
        return self.other.reply(prompt) if self.other else SILENCE

    async def ask(self, messages: list[Message], *, sample: int = 0, session: str = "") -> str:
        return self.reply(messages[-1]["content"]).text

    async def close(self) -> None:
        pass


@dataclass
class Tally:
    """What was seen with one environment, over all seeds."""

    told: list[bool]  # a prompt: does it tell something else?
    worded: list[bool]  # a prompt: does it reply in other words?
    touched: list[bool]  # a game at home: would any of its replies have been another?
    scores: dict[str, list[float]]  # agent → EM of each question


def study_distance(runs: Sequence[Run]) -> Study:
    """EM of both agents with the home environment, with B and with silence, and with mixtures."""
    tallies: dict[tuple[str, float], Tally] = {}
    for run in runs:
        home = play_greedily(run.agents["trained"], run.questions, run.environment)
        others = {
            "mute": None,
            "B": MiniEnvironment(run.environment.world, "B", seed=run.environment.seed),
        }
        for name, part in [("home", 0.0), *product(("B", "mute"), SHARES)]:
            tally = tallies.setdefault((name, part), Tally([], [], [], {"trained": [], "untrained": []}))
            measure(tally, run, Mixture(run.environment, others.get(name), part), home)
    series = [
        Series(f"{agent}, {name}", points(tallies, agent, name), dashed=agent == "untrained")
        for name in ("B", "mute") for agent in ("trained", "untrained")
    ]  # fmt: skip
    notes = (
        f"EM [95 % Wilson interval], greedy games of test questions, pooled over {len(runs)} seeds.",
        "Distances: over the prompts that the trained agent asks at home, the share to which the environment "
        "tells something else, and the share that it words otherwise.",
        "Margin: trained minus untrained on the same questions, paired bootstrap.",
        "Fall: of the trained agent's EM against home. Bound (eq. 48): the share of its games at home in "
        "which any reply would have been another; greedy games without such a reply are the same game.",
    )
    x_label = "share of prompts to which it tells something else"
    return Study("distance", "Accuracy against distance of the environment", CLAIM, x_label, "EM",
                 series, rows(tallies), notes)  # fmt: skip


def measure(tally: Tally, run: Run, environment: Mixture, home: Sequence[Trajectory]) -> None:
    """Add one run's distances and scores with an environment."""
    for game in home:
        prompts = [turn.action.prompt or "" for turn in game.turns if turn.reply is not None]
        pairs = [(run.environment.reply(prompt), environment.reply(prompt)) for prompt in prompts]
        tally.told += [ours.value != theirs.value for ours, theirs in pairs]
        tally.worded += [ours.text != theirs.text for ours, theirs in pairs]
        tally.touched.append(any(ours.text != theirs.text for ours, theirs in pairs))
    for name, player in run.agents.items():
        games = play_greedily(player, run.questions, environment)
        tally.scores[name] += [exact_match(game.answer or "", game.question.answers) for game in games]


def share(flags: Sequence[bool]) -> float:
    """The share of true ones; 0 of nothing."""
    return sum(flags) / max(1, len(flags))


def points(tallies: dict[tuple[str, float], Tally], agent: str, name: str) -> list[Point]:
    """By distance, from home to the whole of the other environment."""
    own = [tally for (environment, _), tally in tallies.items() if environment in ("home", name)]
    return sorted((rate(share(tally.told), tally.scores[agent]) for tally in own), key=lambda point: point.x)


def rows(tallies: dict[tuple[str, float], Tally]) -> str:
    """The Markdown table."""
    head = ["environment", "n", "tells else", "words else", "untrained", "trained", "margin", "fall", "bound"]
    at_home = tallies["home", 0.0].scores["trained"]
    lines = []
    for (name, part), tally in tallies.items():
        trained, untrained = tally.scores["trained"], tally.scores["untrained"]
        margin = paired_bootstrap(trained, untrained)
        fall = sum(at_home) / len(at_home) - sum(trained) / len(trained)
        lines.append([
            "home" if name == "home" else f"{part:.0%} {name}", str(len(trained)), f"{share(tally.told):.3f}",
            f"{share(tally.worded):.3f}", cell(rate(0, untrained)), cell(rate(0, trained)),
            f"{margin.difference:+.3f} [{margin.low:+.2f}, {margin.high:+.2f}]", f"{fall:+.3f}",
            f"{share(tally.touched):.3f}",
        ])  # fmt: skip
    return markdown_table(head, lines)
