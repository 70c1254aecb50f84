"""Agents by the names that a user writes, and the game that each plays."""

from dataclasses import dataclass, replace
from pathlib import Path

from prompt_r1.agent.remote import Prompts, parse_remote
from prompt_r1.config.train import PRESETS, TrainConfig
from prompt_r1.config.yaml_files import GAME_FILE, read_yaml
from prompt_r1.errors import UsageError

RUNS = Path("runs")
CACHE = RUNS / "cache"


def find_agent(name: str, seed: int) -> str | Path:
    """Where the model is that a user calls `name`: mini is built when it is not there yet."""
    if name == "mini":
        from prompt_r1.miniworld.agent import mini_agent

        return mini_agent(seed, CACHE)
    folder = Path(name)
    return folder / "agent" if (folder / "agent" / "config.json").exists() else name


def trained_config(path: str | Path) -> TrainConfig | None:
    """How an exported agent was trained to play; None for a model that was not trained here."""
    file = Path(path) / GAME_FILE
    return TrainConfig(**read_yaml(file, TrainConfig)) if file.exists() else None


def newest_mini_run() -> Path:
    """The run folder under runs/ whose mini agent was saved last, of those that have learnt to ask."""

    def asks(game: TrainConfig | None) -> bool:
        return game is not None and game.agent == "mini" and game.env != "none"

    found = [path for path in RUNS.glob(f"*/agent/{GAME_FILE}") if asks(trained_config(path.parent))]
    if not found:
        raise UsageError(
            f"no trained agent under {RUNS}/: run `python train.py` first, or give --agent and --env"
        )
    return max(found, key=lambda path: path.stat().st_mtime).parent.parent


@dataclass(frozen=True)
class AgentSpec:
    """An agent that a user named: where it lies, how it was trained, and what it was before training."""

    path: str | Path
    config: TrainConfig  # the run that trained it, else the preset whose game it plays
    start: str  # the agent before training; its own name if it was not trained here
    # For an agent behind an endpoint: whose tokenizer it has, and what is sent to it.
    tokenizer: str | Path = ""
    prompts: Prompts = "tokens"


def resolve_agent(name: str, *, kv_tokens: int, tokenizer: str = "", prompts: str = "tokens") -> AgentSpec:
    """The agent that a user names for infer and evaluate; "" is the newest mini run.

    An agent that was not trained here plays the paper's game, the warm-started mini agent the mini world's.
    For one behind an endpoint, `tokenizer` says whose tokenizer it has: a run folder or a model ("": the
    model that the server's name for it names).
    """
    remote = parse_remote(name)
    local = (tokenizer or remote[0]) if remote else name or str(newest_mini_run())
    path = find_agent(local, seed=0)
    trained = trained_config(path)
    config = trained or TrainConfig(**PRESETS["mini" if local == "mini" else "paper"])
    config = replace(config, kv_tokens=kv_tokens)
    start = trained.agent if trained else name
    if remote is None:
        return AgentSpec(path, config, start)
    return AgentSpec(name, config, start, path, "text" if prompts == "text" else "tokens")
