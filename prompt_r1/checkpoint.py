"""Save, resume and export. A checkpoint is a folder that appears under its name only when it is complete.

`checkpoints/step-000040/` holds `agent/` (a Hugging Face folder), the optimiser's state and `state.json`.
`agent/` in the run folder is the best agent so far by validation.
"""

import json
import os
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import yaml
from torch.optim import Optimizer
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from prompt_r1.config import TrainConfig, write_yaml
from prompt_r1.policy import Policy
from prompt_r1.types import UsageError

KEEP = 2  # newest checkpoints that stay
GAME_FILE = "prompt_r1.yaml"  # lies in every exported agent: how it was trained to play

# A run may be resumed with more steps, on another machine, validated more often: not as another experiment.
LOAD_BEARING = (
    "agent", "env", "env_args", "route", "data", "seed", "instruction", "max_turns", "max_new", "max_tokens",
    "max_reply_tokens", "force_answer", "stop_tags", "rule", "questions", "group_size", "mini_batch",
    "lr", "beta1", "beta2", "weight_decay", "grad_clip", "clip", "kl_coef", "loss", "temperature",
)  # fmt: skip


@dataclass
class State:
    """What a run needs besides weights and optimiser to go on as if it had never stopped."""

    step: int = 0
    sampler: dict[str, int] = field(default_factory=dict)  # where QuestionSampler stands
    best_step: int = -1
    best_em: float = -1.0
    best_reward: float = 0.0


def export_agent(
    policy: Policy, tokenizer: PreTrainedTokenizerBase, config: TrainConfig, folder: Path
) -> None:
    """Write the agent as a Hugging Face folder that other stacks load, replacing an older one in one move."""
    temporary = _fresh(folder)
    policy.model.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    write_yaml(config, temporary / GAME_FILE)
    _commit(temporary, folder)


def save_checkpoint(
    run: Path,
    state: State,
    policy: Policy,
    optimizer: Optimizer,
    tokenizer: PreTrainedTokenizerBase,
    config: TrainConfig,
) -> Path:
    """Write checkpoints/step-NNNNNN and drop the oldest beyond KEEP."""
    folder = run / "checkpoints" / f"step-{state.step:06d}"
    temporary = _fresh(folder)
    export_agent(policy, tokenizer, config, temporary / "agent")
    torch.save(optimizer.state_dict(), temporary / "optimizer.pt")
    (temporary / "state.json").write_text(json.dumps(asdict(state)), "utf-8")
    _commit(temporary, folder)
    for old in _checkpoints(run)[:-KEEP]:
        shutil.rmtree(old)
    return folder


def open_run(config: TrainConfig, name: str) -> Path:
    """The folder that the run writes to: auto goes on in it, DIR elsewhere, never begins a new one.

    Raises UsageError rather than write into a folder that holds another run.
    """
    run = Path(config.out or f"runs/{name}-seed{config.seed}")
    if config.resume not in ("auto", "never"):
        run = Path(config.resume)
        if newest_checkpoint(run) is None:
            raise UsageError(f"--resume {run}: there is no checkpoint in it")
    elif config.resume == "never" and (run / "config.yaml").exists():
        if config.out:
            raise UsageError(f"--resume never: {run} holds a run already; choose another --out or delete it")
        taken = (f"{run}-{number}" for number in range(2, 10_000))
        run = next(path for path in map(Path, taken) if not path.exists())
    run.mkdir(parents=True, exist_ok=True)
    return run


def newest_checkpoint(run: Path) -> Path | None:
    """The newest complete checkpoint of a run folder."""
    found = _checkpoints(run)
    return found[-1] if found else None


def resume(folder: Path, policy: Policy, optimizer: Optimizer, config: TrainConfig) -> State:
    """Load a checkpoint into policy and optimiser. Raises UsageError when the experiment is another."""
    before = _load_yaml(folder / "agent" / GAME_FILE)
    for name in LOAD_BEARING:
        now = getattr(config, name)
        now = list(now) if isinstance(now, tuple) else now
        if before.get(name) != now:
            raise UsageError(
                f"{folder} was made with {name} = {before.get(name)!r}, not {now!r}: "
                "resume with the same value, or begin anew with another --out"
            )
    saved = AutoModelForCausalLM.from_pretrained(folder / "agent", dtype=policy.model.dtype)
    policy.model.load_state_dict(saved.state_dict())
    optimizer.load_state_dict(
        torch.load(folder / "optimizer.pt", map_location=policy.device, weights_only=True)
    )
    return State(**json.loads((folder / "state.json").read_text("utf-8")))


def trim_metrics(run: Path, step: int) -> None:
    """Drop the metric lines after `step`: the resumed run writes them again, and none stands twice."""
    path = run / "metrics.jsonl"
    if path.exists():
        lines = [line for line in path.read_text("utf-8").splitlines() if _step_of(line) <= step]
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(line + "\n" for line in lines), "utf-8")
        os.replace(temporary, path)


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError):
        return float("inf")  # a line that a kill cut short


def _load_yaml(path: Path) -> dict[str, object]:
    return yaml.safe_load(path.read_text("utf-8"))


def _checkpoints(run: Path) -> list[Path]:
    return sorted(path for path in (run / "checkpoints").glob("step-*") if (path / "state.json").exists())


def _fresh(folder: Path) -> Path:
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    return temporary


def _commit(temporary: Path, folder: Path) -> None:
    """Rename to the final name; an older folder of that name is moved aside first, then removed."""
    aside = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(aside, ignore_errors=True)
    if folder.exists():
        os.replace(folder, aside)
    os.replace(temporary, folder)
    shutil.rmtree(aside, ignore_errors=True)
