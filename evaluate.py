"""Score methods on questions: `python evaluate.py [--data FILE …] [--method NAME …] [--agent …] [--env SPEC
…]`.

direct      the environment alone: the question as it is
untrained   the agent before training, in the same game
prompt-r1   the trained agent
"""

import asyncio
import json
from dataclasses import asdict
from functools import partial
from pathlib import Path

from prompt_r1.command_line import parse_arguments, run
from prompt_r1.config import EvaluateConfig, TrainConfig
from prompt_r1.distributed import Ranks, pick_device
from prompt_r1.evaluation import Result, ask_directly, means, play_all, table
from prompt_r1.players import (
    KnownAgent,
    Player,
    check_fit,
    find_agent,
    find_questions,
    know_agent,
    load_player,
    open_environments,
)
from prompt_r1.reward import RULES
from prompt_r1.types import Environment, Question, UsageError


def main(arguments: list[str]) -> None:
    """Evaluate from a command line."""
    config = parse_arguments(EvaluateConfig, "evaluate.py", "Score methods on questions.", arguments)
    agent = know_agent(config.agent, kv_tokens=config.kv_tokens)
    game = agent.game
    seed = game.seed if config.seed < 0 else config.seed
    questions = [
        question
        for name in config.data
        for question in find_questions([name], "test", seed)[: config.limit or None]
    ]
    if not questions:
        raise UsageError("no questions: --data names nothing to evaluate on")
    alone = Ranks(0, 1, pick_device(config.device))
    specs = config.env or (game.env,)
    folder = Path(config.out) if config.out else None
    environments = open_environments(config, specs, seed=seed, folder=folder, ranks=alone)
    for environment in environments:
        asyncio.run(environment.check())  # before large agents are loaded
    players = load_players(config, agent)
    for player in players.values():
        check_fit(questions, player.codec, game.max_tokens)

    rows: dict[str, list[Result]] = {}
    for spec, environment in zip(specs, environments, strict=True):
        for method in config.method:
            name = f"{method} ({spec})" if len(specs) > 1 else method
            rows[name] = asyncio.run(
                evaluate(questions, players.get(method), environment, game, config.temperature)
            )
    print(table(rows))
    if config.out:
        write(Path(config.out), rows)


def load_players(config: EvaluateConfig, agent: KnownAgent) -> dict[str, Player]:
    """The agents that the methods need, by method."""
    device = pick_device(config.device)
    players = {}
    if "prompt-r1" in config.method:
        players["prompt-r1"] = load_player(agent.path, agent.game, device)
    if "untrained" in config.method:
        players["untrained"] = load_player(find_agent(agent.start, agent.game.seed), agent.game, device)
    return players


async def evaluate(
    questions: list[Question],
    player: Player | None,
    environment: Environment,
    game: TrainConfig,
    temperature: float,
) -> list[Result]:
    """One result a question; without a player the environment is asked directly."""
    try:
        if player is None:
            return await ask_directly(questions, environment.ask)
        play = partial(player.play, environment=environment, config=game, temperature=temperature)
        return await play_all(questions, play, rule=RULES[game.rule])
    finally:
        await environment.close()


def write(folder: Path, rows: dict[str, list[Result]]) -> None:
    """results.md: the table; results.json: its means; predictions.jsonl: a line a question and method."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.md").write_text(table(rows) + "\n", "utf-8")
    averages = {method: means(results) for method, results in rows.items()}
    (folder / "results.json").write_text(json.dumps(averages, indent=1), "utf-8")
    lines = [
        json.dumps({"method": method, **asdict(result)})
        for method, results in rows.items()
        for result in results
    ]
    (folder / "predictions.jsonl").write_text("".join(line + "\n" for line in lines), "utf-8")


if __name__ == "__main__":
    run(main)
