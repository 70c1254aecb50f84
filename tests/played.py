"""Run folders with games that were really played, by scripted agents, for tests of what reads them."""

import asyncio
from pathlib import Path

from prompt_r1.config.train import TrainConfig
from prompt_r1.config.yaml_files import write_yaml
from prompt_r1.errors import EnvError
from prompt_r1.grpo import group_advantages
from prompt_r1.protocol import INSTRUCTIONS, Codec
from prompt_r1.reward import RULES, score
from prompt_r1.rollout import play
from prompt_r1.storage.run_log import Log
from prompt_r1.types import Question, ScoredGame, Trajectory
from tests import tiny
from tests.tiny import ScriptedAgent, ScriptedEnvironment, think

RULE = RULES["release"]


def play_game(question: Question, texts: list[str], replies: list[str | EnvError]) -> Trajectory:
    """One game in which the agent writes the texts and the environment replies."""
    agent, environment = ScriptedAgent(list(texts)), ScriptedEnvironment(list(replies))
    codec = Codec(tiny.tokenizer(), INSTRUCTIONS["short"])
    return asyncio.run(play(question, agent.generate, environment.ask, codec,
                            max_turns=4, max_tokens=10**6, max_new=10**6, seed="0"))  # fmt: skip


def group_of(question: Question, *, reply: str = "It is Anna.") -> list[Trajectory]:
    """Four games: right, wrong, without a thought in the last turn, and broken by the environment."""
    right, wrong = think("so", answer=question.answers[0]), think("so", answer="nobody")
    bare = f"<answer>{question.answers[0]}</answer>"
    ask = think("hm", prompt="Who?")
    games = [play_game(question, [ask, last], [reply]) for last in (right, wrong, bare)]
    return [*games, play_game(question, [ask], [EnvError("HTTP 500")])]


def write_run(folder: Path, groups_by_step: list[list[list[Trajectory]]]) -> Path:
    """A run folder as train.py leaves it, as far as a report reads it."""
    folder.mkdir(parents=True, exist_ok=True)
    write_yaml(TrainConfig(agent="mini", env="mini", rule="release"), folder / "config.yaml")
    if not (folder / "agent").exists():
        tiny.save_agent(folder / "agent")
    log = Log(folder, quiet=False)
    log.metrics({"step": 0, "val/n": 10, "val/em": 0.1, "time/validation": 0.5})
    for step, groups_PG in enumerate(groups_by_step, start=1):
        alive_PG = [[game for game in group if game.stop != "env_error"] for group in groups_PG]
        rewards_PG = [[score(game, rule=RULE) for game in group] for group in alive_PG]
        advantages_PG = group_advantages([[reward.total for reward in rewards] for rewards in rewards_PG])
        samples_PG = [
            list(map(ScoredGame, *columns))
            for columns in zip(alive_PG, rewards_PG, advantages_PG, strict=True)
        ]
        log.trajectories(f"step-{step:06d}-rank0", groups_PG, samples_PG)
        totals = [reward.total for rewards in rewards_PG for reward in rewards]
        log.metrics({
            "step": step, "reward/mean": sum(totals) / len(totals), "kl": float("nan"), "turns": 2.0,
            "stop/answered": 0.75, "stop/env_error": 0.25, "time/rollout": 1.0, "env/usd": 0.5,
        })  # fmt: skip
    return folder
