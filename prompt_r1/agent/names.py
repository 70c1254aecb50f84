"""Find the agent that a user names, and its game."""

from dataclasses import dataclass, replace
from pathlib import Path

from prompt_r1.agent.gguf import gguf_file, gguf_folder
from prompt_r1.cli.command_line import command
from prompt_r1.config.agent import GAME_FILE, MINI_AGENT, STEP_FILE, AgentConfig
from prompt_r1.config.fields import read_yaml
from prompt_r1.config.train import agent_preset, preset_of
from prompt_r1.errors import UsageError
from prompt_r1.foreign import LFS_ADVICE, LFS_POINTER, is_finite_number, json_object

RUNS = Path("runs")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


def find_agent(name: str, seed: int) -> str | Path:
    """The folder or hub id of the model that a user calls `name`.

    Mini agents are built, and GGUF files converted, if necessary.
    """
    if name == MINI_AGENT:
        import torch

        from prompt_r1.miniworld.agent import mini_agent

        torch.set_num_threads(1)  # fastest for a tiny model, and its weights depend on no number of cores
        return mini_agent(seed, RUNS / "cache")
    if file := gguf_file(name):
        return gguf_folder(file)
    if "@http" in name:
        raise UsageError(
            f"--agent {name}: an agent plays in this process: give the folder or hub id of its weights "
            "(a model behind an endpoint can be the environment: --env)"
        )
    folder = Path(name)
    if (folder / "agent" / "config.json").exists():
        folder /= "agent"
    elif not folder.exists():
        if name.count("/") > 1 or name.startswith((".", "/", "~")):
            raise UsageError(f"--agent {name}: there is no such folder, and it is no name of the Hub")
        return name
    _check_agent_folder(folder)
    return folder


def _check_agent_folder(folder: Path) -> None:
    """Raise UsageError for a folder that holds no model or no tokenizer."""
    if not folder.is_dir():
        raise UsageError(f"--agent {folder} is a file: give the folder of a model")
    if (folder / "predictions.jsonl").exists():
        raise UsageError(f"--agent {folder} is a folder of evaluate.py: give the agent that it evaluated")
    if (folder / "adapter_config.json").exists():
        raise UsageError(
            f"--agent {folder} holds an adapter of peft: merge it into its model (merge_and_unload), and "
            "give the folder of the merged model"
        )
    if (folder / "metrics.jsonl").exists() and not (folder / "config.json").exists():
        raise UsageError(f"--agent {folder}: this run has saved no agent yet")
    if not (folder / "config.json").exists():
        raise UsageError(f"--agent {folder} is no model: there is no config.json in it")
    for file in filter(Path.is_file, folder.iterdir()):
        with file.open("rb") as content:
            if content.read(len(LFS_POINTER)) == LFS_POINTER:
                raise UsageError(f"{file} is {LFS_ADVICE}")
    if not any((folder / name).exists() for name in TOKENIZER_FILES):
        raise UsageError(f"--agent {folder} has no tokenizer: there is no tokenizer.json in it")
    if not any(folder.glob("*.safetensors")):
        raise UsageError(f"--agent {folder} has no weights: there is no model.safetensors in it")


def trained_config(path: str | Path) -> AgentConfig | None:
    """How an exported agent plays and was trained; None for a model that was not trained here."""
    file = Path(path) / GAME_FILE
    if not file.is_file():
        return None
    # Its training, perhaps by another version, had settings that are no agent's.
    return AgentConfig(**read_yaml(file, AgentConfig, all_known=False))


def exported_step(folder: Path) -> int:
    """The step of the agent in a folder; -1 if it was not trained here, or if its file is damaged."""
    file = folder / STEP_FILE
    step = json_object(file.read_bytes()).get("step") if file.is_file() else None
    return int(step) if is_finite_number(step) else -1


def newest_mini_run() -> Path:
    """The run folder under runs/ with the newest mini agent that was trained with an environment."""
    saved = RUNS.glob(f"*/agent/{GAME_FILE}")
    for file in sorted(saved, key=lambda file: file.stat().st_mtime, reverse=True):
        config = trained_config(file.parent)
        if config is not None and config.agent == MINI_AGENT and config.env != "none":
            return file.parent.parent
    raise UsageError(
        f"no trained agent under {RUNS}/: run `{command('train')}` first, or give --agent and --env"
    )


@dataclass(frozen=True)
class AgentSpec:
    """An agent that a user named."""

    path: str | Path  # folder or hub id
    config: AgentConfig  # of the run that trained it, or the preset whose game it plays
    start: str  # the agent before training; its own name if it was not trained here
    is_newest: bool = False  # nobody named it: it is the newest mini run

    def describe(self, *, environment: str, seed: int) -> str:
        """One line: which agent of which step plays, with which environment and seed, and why this one."""
        step = exported_step(Path(self.path))
        run = Path(self.path).parent if Path(self.path).name == "agent" else self.path
        trained = f", step {step}" if step >= 0 else ""
        chosen = " (the newest mini run; --agent names another)" if self.is_newest else ""
        return f"agent {run}{trained}, environment {environment}, seed {seed}{chosen}"


def resolve_agent(name: str, *, max_turns: int = 0, max_new: int = 0) -> AgentSpec:
    """The agent that a user names for infer and evaluate. "" names the newest mini run.

    An agent that was not trained here plays the game of the paper preset; mini and smollm2 have their own.
    `max_turns` and `max_new` replace those of its game; 0: they do not.
    """
    local = name or str(newest_mini_run())
    path = find_agent(local, seed=0)
    trained = trained_config(path)
    config = trained or agent_preset(preset_of(local))
    config = replace(config, max_turns=max_turns or config.max_turns, max_new=max_new or config.max_new)
    start = trained.agent if trained else name
    return AgentSpec(path, config, start, is_newest=not name)
