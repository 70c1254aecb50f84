"""From the name of an agent to its folder, and to the settings by which it plays.

A name is a folder (of a model, or of a run that saved one), a GGUF file, a hub id, `mini` or `smollm2`.

    resolve_agent      finds and checks the agent, and makes nothing
    NamedAgent.make    gives its folder: it builds `mini`, and converts a GGUF file
"""

from dataclasses import dataclass, replace
from pathlib import Path

from prompt_r1.errors import UsageError
from prompt_r1.model.gguf import gguf_file, gguf_folder, is_gguf
from prompt_r1.programs.command_line import command
from prompt_r1.programs.reading import is_finite_number, json_object
from prompt_r1.settings.agent import MINI, AgentConfig
from prompt_r1.settings.fields import read_yaml, settings_of
from prompt_r1.settings.train import PRESETS, preset_of

RUNS = Path("runs")
# The folder of an agent that was trained here has these two files beside the files of the model.
STEP_FILE = "training.json"  # the metrics of its step
SETTINGS_FILE = "prompt_r1.yaml"  # the settings of its training
LFS_POINTER = b"version https://git-lfs"  # the first bytes of a file that Git LFS has not fetched


@dataclass(frozen=True)
class NamedAgent:
    """An agent that a user named."""

    name: str
    config: AgentConfig  # how it was trained, or the preset whose game it plays
    start: str  # the name of the model from which the training started; the agent's own if it was not trained
    folder: Path | None = None  # None for a hub id, and for a name that `make` builds or converts
    trained: bool = False  # whether `config` was read from its folder, because it was trained here

    def before_training(self) -> "NamedAgent":
        """The model from which the training started. It plays by the settings of the training.

        Raises UsageError if it is no longer there.
        """
        return replace(self, name=self.start, folder=_find(self.start), trained=False)

    def make(self, seed: int) -> str | Path:
        """Its folder or hub id. `mini` is built and a GGUF file converted, if necessary.

        `seed` is the seed of a training: each has its own `mini`.
        """
        if self.folder is not None:
            return self.folder
        if self.name == MINI:
            from prompt_r1.miniworld.agent import mini_agent  # It imports torch.

            return mini_agent(seed, RUNS / "cache")
        return gguf_folder(self.name) if is_gguf(self.name) else self.name

    def describe(self, *, environment: str, seed: int) -> str:
        """One line: which agent of which step plays, and with which environment and seed."""
        line = f"agent {run_of(self.folder or self.name)}"
        step = exported_step(self.folder) if self.folder else -1
        if step >= 0:
            line += f", step {step}"
        if step == 0:  # No later agent of the run was better in validation.
            line += " (as it was before training)"
        return f"{line}, environment {environment}, seed {seed}"


def run_of(agent: str | Path) -> str:
    """The run folder if an agent is the folder `agent` of a run, and otherwise the agent itself."""
    path = Path(agent)
    # A relative path `agent` has no run folder in it.
    return str(path.parent) if path.name == "agent" and path.parent.name else str(agent)


def resolve_agent(name: str, *, max_turns: int = 0, max_new: int = 0) -> NamedAgent:
    """Find the agent that a user names, without torch; it makes nothing. "" names the newest mini run.

    `max_turns` and `max_new`, if not 0, replace the limits of its game. Raises UsageError if there is no such
    agent.
    """
    known_as = name or str(newest_mini_run())
    folder = _find(known_as)
    trained = _trained_config(folder) if folder else None
    config = trained or preset_config(known_as)
    config = replace(config, max_turns=max_turns or config.max_turns, max_new=max_new or config.max_new)
    start = trained.agent if trained else known_as
    return NamedAgent(known_as, config, start, folder, trained=trained is not None)


def _find(name: str) -> Path | None:
    """The folder of a NamedAgent. Raises UsageError if there is no such agent."""
    if name == MINI:
        return None
    if is_gguf(name):
        gguf_file(name)  # This raises UsageError if the file cannot be used.
        return None
    if "@http" in name:
        raise UsageError(
            f"--agent {name}: an agent plays in this process: give the folder or hub id of its weights "
            "(a model behind an endpoint can be the environment: --env)"
        )
    folder = Path(name)
    if (folder / "agent" / "config.json").exists():
        folder /= "agent"
    if not folder.exists():
        # A hub id is NAME or ORGANISATION/NAME. The loading of the model asks the Hub whether it exists.
        if name.startswith((".", "/", "~", f"{RUNS}/")) or name.count("/") > 1:
            runs = [str(file.parent.parent) for file in _newest_first("*/agent/config.json")]
            agents = f"; there are agents in {', '.join(runs[:5])}" if runs else ""
            raise UsageError(f"--agent {name}: there is no such folder{agents}")
        return None
    if problem := _problem_of(folder):
        raise UsageError(f"--agent {folder} {problem}")
    return folder


def newest_mini_run() -> Path:
    """The run folder under runs/ with the newest mini agent that was trained with an environment."""
    for file in _newest_first(f"*/agent/{SETTINGS_FILE}"):
        config = _trained_config(file.parent)
        if config is not None and config.agent == MINI and not config.without_environment:
            return file.parent.parent
    raise UsageError(
        f"no trained agent under {RUNS}/: run `{command('train.py')}` first, or give --agent and --env"
    )


def _trained_config(folder: Path) -> AgentConfig | None:
    """The settings by which an exported agent plays and was trained; None if it was not trained here."""
    file = folder / SETTINGS_FILE
    if not file.is_file():
        return None
    # The file has all settings of a training, perhaps by another version. Only an agent's settings are read.
    return AgentConfig(**read_yaml(file, AgentConfig, all_known=False))


def preset_config(name: str, *, default: str = "paper") -> AgentConfig:
    """How an agent plays that was not trained here: by the preset of its name, or else by `default`."""
    preset = PRESETS[preset_of(name, default=default)]
    known = {entry.name for entry in settings_of(AgentConfig)}
    return AgentConfig(**{key: value for key, value in preset.items() if key in known})


def teaching_command(agent: str) -> str:
    """The command that teaches an agent the format of the game."""
    return command("-m prompt_r1.training.warm_start", "--agent", agent, "--games", "mini")


def exported_step(folder: Path) -> int:
    """The step of the agent in a folder; -1 if it was not trained here, or if STEP_FILE is damaged."""
    file = folder / STEP_FILE
    step = json_object(file.read_bytes()).get("step") if file.is_file() else None
    return int(step) if is_finite_number(step) else -1


def _newest_first(pattern: str) -> list[Path]:
    """The files under runs/ that match a pattern."""
    return sorted(RUNS.glob(pattern), key=lambda file: file.stat().st_mtime, reverse=True)


def _problem_of(folder: Path) -> str:
    """Why a folder holds no agent, as the end of a sentence; "" if it has a model."""
    if (folder / "adapter_config.json").exists():
        return "holds an adapter of peft: merge it (merge_and_unload), and give the merged model's folder"
    weights = list(folder.glob("*.safetensors"))
    if not weights or not (folder / "config.json").exists():
        return "holds no model (config.json and *.safetensors), and no agent that a run has saved"
    if any(_is_lfs_pointer(file) for file in weights):
        return "holds weights that Git LFS has not fetched: run `git lfs pull` in it"
    return ""


def _is_lfs_pointer(file: Path) -> bool:
    with file.open("rb") as content:
        return content.read(len(LFS_POINTER)) == LFS_POINTER
