"""Save and resume: after a kill at any moment a run goes on as if it had never stopped.

`checkpoints/step-000040/` holds weights and Adam's states (`tensor_files.py`), `state.json`, `config.yaml`
and the manifest without which it does not count. Everything else follows: sampling and the order of the
questions from texts (seed, step, number of the game), so no random state is kept; what was spent from the
journal; the watchdog's memory from the metric lines.
"""

import json
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch.distributed.checkpoint as dcp
import yaml
from torch.optim import Optimizer

from prompt_r1.agent.policy import Policy
from prompt_r1.config.fields import identifying_values
from prompt_r1.config.train import TrainConfig
from prompt_r1.config.yaml_files import write_yaml
from prompt_r1.distributed.ranks import Ranks, cpu_group, try_first
from prompt_r1.errors import UsageError
from prompt_r1.storage import atomic_folder, tensor_files


@dataclass
class State:
    """What a run needs besides weights and optimiser to go on as if it had never stopped."""

    step: int = 0  # the last one whose update is in the weights
    sampler: dict[str, int] = field(default_factory=dict)  # where QuestionSampler stands
    line: dict[str, float] = field(default_factory=dict)  # metrics of `step`, while they are not yet logged
    best_step: int = -1
    best_em: float = -1.0
    best_reward: float = 0.0
    rollbacks: int = 0  # each has halved the learning rate


@dataclass(frozen=True)
class Pending:
    """A checkpoint that is being written."""

    folder: Path
    temporary: Path
    state: str
    best_step: int
    sums: "Future[atomic_folder.Sums]"  # of this rank's files, when they are on the disk


class Checkpoints:
    """The checkpoints of a run. Every method is called by every rank or by none."""

    def __init__(
        self,
        run: Path,
        policy: Policy,
        optimizer: Optimizer,
        config: TrainConfig,
        ranks: Ranks,
        *,
        say: Callable[[str], None],
        background: bool,
    ) -> None:
        """`background`: `save` returns when the tensors are copied, and they are written beside training."""
        self.folder = run / "checkpoints"
        self._policy, self._optimizer = policy, optimizer
        self._config, self._ranks, self._say = config, ranks, say
        self._thread = ThreadPoolExecutor(1) if background else None
        self._group = cpu_group(ranks) if background else None
        self._pending: Pending | None = None
        self._whole = ""  # the state whose checkpoint this process has written or loaded
        self.failures = 0  # in a row

    def save(self, state: State) -> str:
        """Write the checkpoint of `state.step`. Returns why this one, or the one before, failed, or ""."""
        failed = self.finish(wait=True)
        folder = self.folder / f"step-{state.step:06d}"
        temporary = folder.with_name(f".{folder.name}.tmp")
        text = json.dumps(asdict(state))
        if text == self._whole:
            return failed
        written: Future[atomic_folder.Sums] = Future()
        try:
            self._on_first(lambda: self._describe(atomic_folder.fresh(folder), text))
            written = self._write(temporary)
        except (OSError, RuntimeError, dcp.CheckpointException) as error:
            written.set_exception(error)
        self._pending = Pending(folder, temporary, text, state.best_step, written)
        return failed or self.finish(wait=self._thread is None)

    def finish(self, *, wait: bool) -> str:
        """Give the checkpoint under way its name if every rank has written its share; "" or why it failed."""
        pending = self._pending
        if pending is None:
            return ""
        if not wait and any(self._ranks.max([not pending.sums.done()])):
            return ""
        self._pending, mine, failed = None, {}, ""
        try:
            mine = pending.sums.result()
        except (OSError, RuntimeError, dcp.CheckpointException) as error:
            failed = _reason(error)
        shares = self._ranks.gather((mine, failed))
        failed = next((reason for _, reason in shares if reason), "")
        try:
            if not failed:
                listed = {name: entry for share, _ in shares for name, entry in share.items()}
                self._on_first(lambda: atomic_folder.seal(pending.temporary, pending.folder, listed))
                self._on_first(lambda: self._purge(pending.best_step))
        except RuntimeError as error:
            failed = _reason(error)
        self.failures = self.failures + 1 if failed else 0
        if not failed:
            self._whole = pending.state
            return ""
        self._on_first(lambda: shutil.rmtree(pending.temporary, ignore_errors=True))
        return f"{pending.folder} could not be written: {failed}"

    def newest(self) -> Path | None:
        """The newest checkpoint whose manifest verifies, or None where there is none at all; says what it
        passed over. Raises UsageError when none verifies.
        """
        self._on_first(lambda: atomic_folder.sweep(self.folder))
        found = self._ranks.from_first(lambda: checkpoints_of(self.folder.parent))
        for folder in reversed(found):
            fault = self.fault(folder)
            if not fault:
                return folder
            self._say(f"Passed over {folder}: {fault}")
        if found:
            raise UsageError(f"none of the {len(found)} checkpoints in {self.folder} is whole: mend them, "
                             "or begin anew with another --out")  # fmt: skip
        return None

    def fault(self, folder: Path) -> str:
        """What is wrong with a checkpoint, "" if nothing is. Each rank reads its share of the files."""
        ranks = self._ranks
        faults = ranks.gather(atomic_folder.fault(folder, share=ranks.rank, shares=ranks.count))
        return next(filter(None, faults), "")

    def load(self, folder: Path, *, rollbacks: int = 0) -> State:
        """Load a checkpoint into policy and optimiser, whose learning rate is halved for each rollback.

        Raises UsageError when the experiment is another.
        """
        _check_settings(folder, self._config)
        tensor_files.read(folder, self._policy, self._optimizer, ranks=self._ranks.count)
        self._whole = (folder / "state.json").read_text("utf-8")
        state = State(**json.loads(self._whole))
        state.rollbacks = max(state.rollbacks, rollbacks)
        for group in self._optimizer.param_groups:
            group["lr"] = self._config.lr * 0.5**state.rollbacks
        return state

    def drop_after(self, step: int) -> None:
        """Remove the checkpoints of later steps."""
        self.finish(wait=True)
        later = [folder for folder in checkpoints_of(self.folder.parent) if _step(folder) > step]

        def remove() -> None:
            for folder in reversed(later):
                shutil.rmtree(folder)

        self._on_first(remove)

    def _write(self, temporary: Path) -> "Future[atomic_folder.Sums]":
        if self._thread is not None:
            saved = tensor_files.write_later(temporary, self._policy, self._optimizer, group=self._group)
            return self._thread.submit(lambda: (saved.result(), self._sums(temporary))[1])
        tensor_files.write(temporary, self._policy, self._optimizer, ranks=self._ranks.count)
        written: Future[atomic_folder.Sums] = Future()
        written.set_result(self._sums(temporary))
        return written

    def _sums(self, folder: Path) -> atomic_folder.Sums:
        """Of this rank's files; the first rank also has those that are nobody's shard."""
        names = [path.name for path in folder.iterdir()]
        mine = [name for name in names if name.startswith(f"shard-{self._ranks.rank + 1:05d}-")]
        common = [name for name in names if not name.startswith("shard-")]
        return atomic_folder.sums(folder, mine + common * self._ranks.first)

    def _describe(self, folder: Path, state: str) -> None:
        (folder / "state.json").write_text(state, "utf-8")
        write_yaml(self._config, folder / "config.yaml")

    def _purge(self, best_step: int) -> None:
        """Keep the newest ones and the best."""
        for folder in checkpoints_of(self.folder.parent)[: -self._config.keep]:
            if _step(folder) != best_step:
                shutil.rmtree(folder)

    def _on_first(self, work: Callable[[], object]) -> None:
        """Do something with files on the first rank. Raises RuntimeError on all ranks when it fails there."""
        failed = try_first(self._ranks, work)
        if failed:
            raise RuntimeError(failed)


def checkpoints_of(run: Path) -> list[Path]:
    """The checkpoints of a run folder, oldest first, whole or not."""
    return sorted((run / "checkpoints").glob("step-[0-9]*"), key=_step)


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def _check_settings(folder: Path, config: TrainConfig) -> None:
    before = yaml.safe_load((folder / "config.yaml").read_text("utf-8"))
    # A run may be resumed with more steps or on another machine, but not as another experiment.
    for name, now in identifying_values(config).items():
        now = list(now) if isinstance(now, tuple) else now
        if before.get(name) != now:
            raise UsageError(
                f"{folder} was made with {name} = {before.get(name)!r}, not {now!r}: "
                "resume with the same value, or begin anew with another --out"
            )


def _reason(error: BaseException) -> str:
    """Why writing failed, in a few words. DCP hides the error of the rank where it happened."""
    if isinstance(error, dcp.CheckpointException):
        error = next(iter(error.failures.values()))[0]
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error).strip() or type(error).__name__).splitlines()[0]
