"""`python -m prompt_r1.studies routes`: quality per dollar with a dear and a cheap environment.

Two agents choose the environment in every turn (`--route agent`), one of them cost-aware (`--cost-weight`); a
third one is trained with the dear environment, and plays with static routes. The same command reuses finished
runs and resumes the others.
"""

import argparse
import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from prompt_r1.agent.agent import load_agent
from prompt_r1.agent.names import RUNS, trained_config
from prompt_r1.cli.command_line import program_name, run_program
from prompt_r1.cli.markdown import markdown_table
from prompt_r1.config.fields import POSITIVE, EnvironmentConfig, check_number
from prompt_r1.distributed.ranks import Ranks, pick_device
from prompt_r1.environments.opening import Environments
from prompt_r1.metrics.statistics import mean_interval, paired_bootstrap, wilson
from prompt_r1.metrics.text import exact_match
from prompt_r1.miniworld import make_questions, make_world
from prompt_r1.report.svg import Plot, Point, Series, rate_text, svg
from prompt_r1.rollout import play
from prompt_r1.studies.programs import Flags, add_seeds, train
from prompt_r1.studies.runs import greedy
from prompt_r1.types import Question

SPEC = "mini,mini-small"
PRICES = ("2,8", "0.1,0.4")  # dollars per million tokens, sent and received
COST_WEIGHT = 0.3
ROUTED: Flags = {
    "--agent": ["mini-route"],
    "--env": [SPEC],
    "--route": ["agent"],
    "--env-price": PRICES,
}
AGENTS: dict[str, Flags] = {
    "static": {"--env": ["mini"]},
    "blind": ROUTED,
    "aware": {**ROUTED, "--cost-weight": [COST_WEIGHT]},
}
AWARE, BLIND = "cost-aware agent", "cost-blind agent"


@dataclass(frozen=True)
class RoutedAgent:
    """A trained agent of AGENTS, and the route between the environments."""

    agent: str
    route: str


SYSTEMS = {
    AWARE: RoutedAgent("aware", "agent"),
    BLIND: RoutedAgent("blind", "agent"),
    "always mini": RoutedAgent("static", "1,0"),
    "mini 3 : 1 mini-small": RoutedAgent("static", "3,1"),
    "uniform": RoutedAgent("static", "uniform"),
    "mini 1 : 3 mini-small": RoutedAgent("static", "1,3"),
    "always mini-small": RoutedAgent("static", "0,1"),
}
SWAPPED = (AWARE, BLIND, "always mini", "always mini-small")


@dataclass(frozen=True)
class Played:
    """Greedy games of test questions, of one seed: EM and dollars of each, and calls by environment."""

    em: list[float]
    usd: list[float]
    calls: tuple[float, float]


def play_system(system: RoutedAgent, folder: Path, prices: tuple[str, ...], per_kind: int) -> Played:
    """Play test questions of the run's world, `per_kind` of each kind, with these prices told and paid."""
    config = trained_config(folder / "agent")
    assert config is not None, f"{folder} has no trained agent"
    if config.route == "agent":
        config = replace(config, env_price=prices)
    device = pick_device("cpu")
    calls = EnvironmentConfig(env_price=prices, route=system.route)
    pool = Environments(calls, seed=config.seed, folder=None, ranks=Ranks(0, 1, device)).open(SPEC)
    agent = load_agent(folder / "agent", config, device)
    world = make_world(config.seed)
    questions = [mini.question for mini in make_questions(world, "test", 5 * per_kind, config.seed)]

    async def play_one(question: Question) -> tuple[float, float]:
        ask = pool.ask_in_game("", sample=0, session=question.id, deadline=0.0)
        seed = f"study/{question.id}"
        game = await play(question, greedy(agent), ask, agent.codec, agent.game, seed=seed)
        return exact_match(game.answer or "", question.answers), ask.usd

    async def games() -> list[tuple[float, float]]:
        return await asyncio.gather(*map(play_one, questions))

    results = asyncio.run(games())
    counts = pool.take_metrics()
    mini, small = counts["env/1:mini/paid"], counts["env/2:mini-small/paid"]
    return Played([em for em, _ in results], [usd for _, usd in results], (mini, small))


def pooled(by_seed: Mapping[int, Played]) -> Played:
    """The games of all seeds."""
    return Played(
        [em for played in by_seed.values() for em in played.em],
        [usd for played in by_seed.values() for usd in played.usd],
        (
            sum(played.calls[0] for played in by_seed.values()),
            sum(played.calls[1] for played in by_seed.values()),
        ),
    )


def point_of(played: Played) -> Point:
    """EM with Wilson's interval, over dollars per 1,000 questions."""
    right, n = sum(played.em), len(played.em)
    return Point(1000 * fmean(played.usd), right / n, *wilson(right, n), n)


def routes_table(games: Mapping[str, Mapping[int, Played]]) -> str:
    """A Markdown row for each system."""
    seeds = list(next(iter(games.values())))
    header = ["system", "EM", *(f"seed {seed}" for seed in seeds), "dollars per 1,000 questions"]
    header += ["of the cost-blind", "calls of mini", "of mini-small"]
    blind = fmean(pooled(games[BLIND]).usd)
    rows = []
    for name, by_seed in games.items():
        played = pooled(by_seed)
        low, high = (1000 * end for end in mean_interval(played.usd))
        rows.append(
            [
                name,
                rate_text(point_of(played)),
                *(f"{fmean(each.em):.3f}" for each in by_seed.values()),
                f"{1000 * fmean(played.usd):.4f} [{low:.4f}, {high:.4f}]",
                f"{fmean(played.usd) / blind:.0%}",
                f"{played.calls[0]:,.0f}",
                f"{played.calls[1]:,.0f}",
            ]
        )
    return markdown_table(header, rows)


def conclusion(games: Mapping[str, Mapping[int, Played]]) -> str:
    """The difference in EM between the cost-aware and the cost-blind agent, and what it saves by seed."""
    aware, blind = games[AWARE], games[BLIND]
    difference = paired_bootstrap(pooled(aware).em, pooled(blind).em)
    saved = [1 - fmean(aware[seed].usd) / fmean(blind[seed].usd) for seed in aware]
    return (
        f"Cost-aware minus cost-blind, on the same questions: EM {difference.difference:+.3f} "
        f"[{difference.low:+.3f}, {difference.high:+.3f}]; dollars saved by seed: "
        f"{', '.join(f'{share:.0%}' for share in saved)}."
    )


def frontier(games: Mapping[str, Mapping[int, Played]]) -> Plot:
    """EM over dollars."""
    series = [Series(name, [point_of(pooled(by_seed))], joined=False) for name, by_seed in games.items()]
    title = "Exact match and dollars, by route"
    return Plot(title, "dollars per 1,000 questions", "EM", series, names_at_points=True)


def study(
    out: Path, seeds: Sequence[int], *, steps: int, per_kind: int, names: Sequence[str] = tuple(SYSTEMS)
) -> tuple[dict[str, dict[int, Played]], dict[str, dict[int, Played]]]:
    """Train the agents, one run at a time, and play: with the prices of training, and with them swapped."""
    # A single validation, at the end, exports the agent of the last step. Of several, the one with the best
    # answers is exported, which may not be cheap yet.
    common: Flags = {"--val-every": [steps], "--test-data": ["none"]}
    folders = {(agent, seed): out / f"{agent}-seed{seed}" for seed in seeds for agent in AGENTS}
    for (agent, seed), folder in folders.items():
        train(folder, steps, {"--seed": [seed], **common, **AGENTS[agent]})

    def played(name: str, seed: int, prices: tuple[str, ...]) -> Played:
        return play_system(SYSTEMS[name], folders[SYSTEMS[name].agent, seed], prices, per_kind)

    as_trained = {name: {seed: played(name, seed, PRICES) for seed in seeds} for name in names}
    swapped = {name: {seed: played(name, seed, PRICES[::-1]) for seed in seeds} for name in SWAPPED}
    return as_trained, swapped


def main(arguments: list[str]) -> None:
    """Train, play and compare from a command line."""
    parser = argparse.ArgumentParser(
        program_name("python -m prompt_r1.studies") + " routes", description="\n".join(__doc__.split("\n\n"))
    )
    add_seeds(parser)
    parser.add_argument("--steps", type=int, default=80, help="GRPO steps (80)")
    parser.add_argument("--per-kind", type=int, default=160, help="test questions of each kind (160)")
    parser.add_argument("--out", type=Path, default=RUNS / "routes", help="folder of the runs (runs/routes)")
    given = parser.parse_args(arguments)
    for flag in ("steps", "per_kind"):
        check_number(f"--{flag.replace('_', '-')}", getattr(given, flag), POSITIVE)

    import torch

    torch.set_num_threads(1)  # more threads do not make a tiny model faster
    games, swapped = study(given.out, given.seeds, steps=given.steps, per_kind=given.per_kind)
    plot = frontier(games)
    text = f"{routes_table(games)}\n\n{conclusion(games)}\n\nPrices swapped:\n\n{routes_table(swapped)}\n"
    file = given.out / "routes.md"
    file.write_text(f"# {plot.title}\n\n![](routes.svg)\n\n{text}", "utf-8")
    file.with_suffix(".svg").write_text(svg(plot), "utf-8")
    print(f"\n{file}, .svg\n\n{text}")


if __name__ == "__main__":
    run_program(main)
