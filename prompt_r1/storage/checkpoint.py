"""Save and resume a run bit for bit.

`checkpoints/step-000040/` holds the weights that learn and Adam's states (`tensor_files.py`), `state.json`,
`config.yaml` and the manifest; a folder without a valid manifest is ignored. Nothing else needs to be saved:
sampling and the order of questions are seeded by (seed, step, number of the game), so there is no random
state; spending is in the journal; the watchdog's state follows from the metric lines.
"""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch.optim import Optimizer

from prompt_r1.agent.policy import Policy
from prompt_r1.config.agent import AgentConfig
from prompt_r1.config.fields import identifying_values
from prompt_r1.config.yaml_files import read_mapping, write_yaml
from prompt_r1.distributed import Ranks
from prompt_r1.errors import UsageError, first_line
from prompt_r1.foreign import is_finite_number, json_object
from prompt_r1.storage import atomic_folder, tensor_files
from prompt_r1.storage.atomic_folder import Checksums

KEPT = 2  # newest checkpoints, beside the best one
NAMES = r"step-\d{6,}"  # of the folders in checkpoints/


@dataclass
class State:
    """The state of a run besides weights and optimiser."""

    step: int = 0  # the last one whose update is in the weights
    line: dict[str, float] = field(default_factory=dict)  # metrics of `step` that are not logged yet
    best_step: int = -1
    best_em: float = -1.0
    best_reward: float = 0.0
    questions: str = ""  # digest of the training questions
    tensors: int = field(default=0, compare=False)  # in the checkpoint
    frozen: str = ""  # digest of the weights that do not learn and are not saved; "": all learn


class Checkpoints:
    """The checkpoints of a run. Every method is called by every rank or by none."""

    def __init__(
        self,
        run: Path,
        policy: Policy,
        optimizer: Optimizer,
        config: AgentConfig,
        ranks: Ranks,
        *,
        say: Callable[[str], None],
    ) -> None:
        self.folder = run / "checkpoints"
        self._policy, self._optimizer = policy, optimizer
        self._config, self._ranks = config, ranks
        self._say = say
        self._frozen = tensor_files.frozen_digest(policy)
        self._saved_state = ""  # state.json of the checkpoint that was written or loaded last
        self.failures = 0  # in a row

    def save(self, state: State) -> str:
        """Write the checkpoint of `state.step`, and remove old ones. Returns "", or why any rank failed."""
        folder = self.folder / f"step-{state.step:06d}"
        temporary = folder.with_name(f".{folder.name}.tmp")
        state.frozen = self._frozen
        tensors = tensor_files.tensors_of(self._policy, self._optimizer)
        state.tensors = len(tensors)
        text = json.dumps(asdict(state))
        if text == self._saved_state:
            return ""
        checksums: Checksums = {}
        failure = ""
        try:
            self._on_first(lambda: self._begin_folder(folder, text))
            tensor_files.write(temporary, tensors, ranks=self._ranks.count)
            checksums = self._checksums(temporary)
        except (OSError, RuntimeError, dcp.CheckpointException) as error:
            failure = _reason(error)
        failures = list(filter(None, self._ranks.gather(failure)))
        shares = self._ranks.gather(checksums)
        try:
            if not failures:
                whole = {name: checksum for share in shares for name, checksum in share.items()}
                self._on_first(lambda: atomic_folder.seal(temporary, folder, whole))
                self._on_first(lambda: self._remove_old(state.best_step))
        except RuntimeError as error:
            failures = [_reason(error)]
        if failures:
            self.failures += 1
            self._on_first(lambda: shutil.rmtree(temporary, ignore_errors=True))
            return f"{folder} could not be written: {failures[0]}"
        self.failures, self._saved_state = 0, text
        return ""

    def newest(self) -> Path | None:
        """The newest valid checkpoint, or None if there is no checkpoint at all.

        Reports each damaged checkpoint that it skips. Raises UsageError if all are damaged.
        """
        self._on_first(lambda: atomic_folder.remove_leftovers(self.folder, NAMES))
        found = self._ranks.from_first(lambda: checkpoints_of(self.folder.parent))
        for folder in reversed(found):
            damage = self.find_damage(folder)
            if not damage:
                return folder
            self._say(f"Skipping {folder}: {damage}")
        if found:
            raise UsageError(
                f"none of the {len(found)} checkpoints in {self.folder} is valid: repair them, or start a "
                "new run with another --out"
            )
        return None

    def find_damage(self, folder: Path) -> str:
        """Verify a checkpoint, each rank a share of its files. Returns what is wrong with it, or ""."""
        ranks = self._ranks
        damage = atomic_folder.find_damage(folder, share=ranks.rank, shares=ranks.count)
        return next(filter(None, ranks.gather(damage)), "")

    def load(self, folder: Path) -> State:
        """Load a checkpoint into policy and optimiser.

        Raises UsageError if a setting that identifies the run differs, or the weights beside adapters, and
        for a checkpoint of another version.
        """
        _check_settings(folder, self._config)
        text = (folder / "state.json").read_text("utf-8")
        values = json_object(text)
        if not values:
            raise _of_another_version(folder, "no state")
        defaults = asdict(State())
        for name, value in values.items():
            if name not in defaults or not _is_valid(value, defaults[name]):
                raise _of_another_version(folder, f"the state {name[:80]}")
        state = State(**values)
        if state.frozen != self._frozen:
            raise UsageError(
                f"{folder} holds adapters for other weights than those of {self._config.agent!r}: give the "
                "agent that the run started from, or start a new run with another --out"
            )
        tensor_files.read(
            folder, self._policy, self._optimizer, ranks=self._ranks.count, tensors=state.tensors
        )
        self._saved_state = text
        return state

    def drop_after(self, step: int) -> None:
        """Remove the checkpoints of later steps."""

        def remove() -> None:
            for folder in reversed(checkpoints_of(self.folder.parent)):
                if _step(folder) > step:
                    shutil.rmtree(folder)

        self._on_first(remove)

    def _begin_folder(self, folder: Path, state: str) -> None:
        temporary = atomic_folder.new_temporary(folder)
        (temporary / "state.json").write_text(state, "utf-8")
        write_yaml(self._config, temporary / "config.yaml")

    def _checksums(self, folder: Path) -> Checksums:
        """Sync and checksum this rank's shards; the first rank adds the files that belong to no rank."""
        shard = f"shard-{self._ranks.rank + 1:05d}-"
        names = []
        for path in folder.iterdir():
            common = not path.name.startswith("shard-")
            if path.name.startswith(shard) or (common and self._ranks.first):
                names.append(path.name)
        return atomic_folder.sync_and_checksum(folder, names)

    def _remove_old(self, best_step: int) -> None:
        """Keep the newest checkpoints and the best one."""
        for folder in checkpoints_of(self.folder.parent)[:-KEPT]:
            if _step(folder) != best_step:
                shutil.rmtree(folder)

    def _on_first(self, work: Callable[[], object]) -> None:
        """Do file operations on the first rank. Raises RuntimeError on all ranks if they fail there."""
        failed = self._ranks.try_on_first(work)
        if failed:
            raise RuntimeError(failed)


def checkpoints_of(run: Path) -> list[Path]:
    """The checkpoints of a run folder, valid or not, oldest first."""
    named = (path for path in (run / "checkpoints").glob("step-*") if re.fullmatch(NAMES, path.name))
    return sorted(named, key=_step)


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def _check_settings(folder: Path, config: AgentConfig) -> None:
    """Raise UsageError if a setting that identifies the run differs from the checkpoint's, or is gone.

    Other settings may differ: a run may be resumed with more steps or on another machine.
    """
    before = read_mapping(folder / "config.yaml")
    if gone := sorted(before.keys() - {f.name for f in fields(config)}):
        raise _of_another_version(folder, f"the setting {gone[0]}")
    for name, now in identifying_values(config).items():
        now = list(now) if isinstance(now, tuple) else now
        if name not in before:
            raise _of_another_version(folder, f"no setting {name}")
        if before[name] != now:
            raise UsageError(
                f"{folder} was made with {name} = {before[name]!r}, not {now!r}: "
                "resume with the same value, or start a new run with another --out"
            )


def _is_valid(value: object, default: object) -> bool:
    """Whether a value of state.json has the type of its default, and its numbers can be computed with."""
    if isinstance(value, dict) and isinstance(default, dict):  # a line of metrics, which may be nan
        finite = all(isinstance(number, float) or is_finite_number(number) for number in value.values())
        return not value or (finite and is_finite_number(value.get("step")))
    return type(value) is type(default) and (isinstance(value, str) or is_finite_number(value))


def _of_another_version(folder: Path, what: str) -> UsageError:
    return UsageError(
        f"{folder} was written by another version, with {what}: its agent can play, but its training cannot "
        "be resumed; start a new run with another --out"
    )


def _reason(error: BaseException) -> str:
    """Why writing failed, in one line. Of an error of DCP, take the one of the rank where it happened."""
    if isinstance(error, dcp.CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return getattr(error, "strerror", None) or first_line(error)
