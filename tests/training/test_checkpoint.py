"""Checkpoints and the run folder: exact resume, damage, full disks, kills, locks."""

import errno
import json
import os
import pickle
import re
import shutil
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from prompt_r1.errors import Resumable, UsageError
from prompt_r1.model.distributed import Ranks
from prompt_r1.programs import folders
from prompt_r1.settings.fields import experiment_values, write_yaml
from prompt_r1.settings.train import TrainConfig
from prompt_r1.training import checkpoint
from prompt_r1.training.best import Candidate
from prompt_r1.training.checkpoint import State, begin_states, load_tensors, read_state, save_checkpoint
from prompt_r1.training.report import write_report
from prompt_r1.training.run_folder import (
    LOCK,
    check_same_settings,
    checkpoints_of,
    newest_checkpoint,
    open_run,
)
from tests.support import tiny
from tests.support.damage import Attack
from tests.support.exports import file_size_limit, locked
from tests.support.games import CPU, ONE_RANK

CONFIG = TrainConfig(agent="tiny", data=("own.jsonl",), lr=1e-2)
BEST = Candidate(step=1, em=0.5, reward=0.25)
MOVED = f".step-000001{folders.REPLACED}"  # where the checkpoint is before it is replaced


class TinyRun:
    """A tiny policy that learns, and the checkpoints of its run folder."""

    def __init__(self, folder: Path, *, config: TrainConfig = CONFIG, seed: int = 0, **model) -> None:
        self.policy = tiny.policy(seed=seed, **model)
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=config.lr)
        begin_states(self.optimizer)
        self.config = config
        self.folder = folder
        self.said: list[str] = []

    def learn(self) -> None:
        tokens = torch.tensor([tiny.random_tokens(20, seed=1)])
        with tiny.own_attention(self.policy.model):
            self.policy.model(input_ids=tokens, labels=tokens).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, step: int, **values) -> None:
        state = State({"step": step}, **values)
        save_checkpoint(self.folder, state, self.policy, self.optimizer, self.config, ONE_RANK)

    def newest(self) -> Path | None:
        return newest_checkpoint(self.folder, say=self.said.append)

    def load(self, checkpoint: Path) -> State:
        check_same_settings(checkpoint, self.config)
        state = read_state(checkpoint)
        load_tensors(checkpoint, self.policy, self.optimizer)
        return state

    def weights(self) -> list[torch.Tensor]:
        return [weight.detach().clone() for weight in self.policy.parameters()]


def equal_weights(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(one, other, strict=True))


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory) -> Path:
    run = TinyRun(tmp_path_factory.mktemp("run"))
    for step in (1, 2):
        run.learn()
        run.save(step)
    return run.folder / "checkpoints"


@pytest.fixture
def saved(two_checkpoints, tmp_path) -> TinyRun:
    """A run with checkpoints of steps 1 and 2."""
    shutil.copytree(two_checkpoints, tmp_path / "checkpoints")
    return TinyRun(tmp_path)


def test_a_resumed_run_learns_bit_for_bit_as_if_it_had_not_stopped(tmp_path):
    whole = TinyRun(tmp_path)
    whole.learn()
    whole.save(1, questions="digest", best=BEST)
    whole.learn()
    loaded = TinyRun(tmp_path, seed=1)
    state = loaded.load(loaded.newest())
    assert state == State({"step": 1}, questions="digest", best=BEST)
    loaded.learn()
    assert equal_weights(loaded.weights(), whole.weights())


@pytest.mark.slow
def test_saving_takes_no_more_memory_than_a_few_files(tmp_path):
    """DCP builds a whole file in memory, so its files are small."""
    assert checkpoint.FILE_BYTES <= 2**27
    with ProcessPoolExecutor(1, get_context("spawn")) as processes:  # without freed memory to use again
        assert 0.5 < processes.submit(files_of_memory, tmp_path).result() < 3


def files_of_memory(folder: Path) -> float:
    """By how many files the resident set grows at most while six files of 20 MB are written."""
    checkpoint.FILE_BYTES = file = 20 * 2**20
    policy = torch.nn.ParameterList(torch.ones(file // 4) for _ in range(6))
    optimizer = torch.optim.SGD(policy.parameters())
    begin_states(optimizer)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = peak_memory()
    save_checkpoint(folder, State({"step": 1}), policy, optimizer, CONFIG, ONE_RANK)
    return (peak_memory() - before) / file


def peak_memory() -> int:
    """The largest resident set of this process since the last reset, in bytes (Linux)."""
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024


def test_ranks_that_share_tensors_write_few_files_of_full_size():
    """Each of 64 ranks wrote a part of 2 MB for each of 360 files: 23,040 files of one checkpoint."""
    tensors = {str(number): torch.empty(2**25, device="meta") for number in range(100)}  # 13 GB
    sharded = Ranks(0, 64, ONE_RANK.device, mesh=Mock())
    assert len(set(checkpoint._file_numbers(tensors, ONE_RANK).values())) == 100
    files_of_a_rank = len(set(checkpoint._file_numbers(tensors, sharded).values()))
    assert files_of_a_rank == 2  # 64 ranks × 2 files of up to 128 MB


def test_saving_changes_nothing_before_the_first_step_and_after_it(tmp_path):
    """PyTorch's get_optimizer_state_dict adds states by an empty step, which changes Adam's bias."""
    saved = TinyRun(tmp_path)
    never = TinyRun(tmp_path / "other")
    never.optimizer.state.clear()  # its first step begins the states
    for step in (0, 1):
        saved.save(step)
        for run in (saved, never):
            run.learn()
        assert equal_weights(saved.weights(), never.weights())
    saved.load(saved.newest())
    saved.learn()
    assert equal_weights(saved.weights(), never.weights())


def test_the_newest_and_the_best_checkpoints_are_kept(tmp_path):
    run = TinyRun(tmp_path)
    for step in range(1, 8):
        run.save(step, best=replace(BEST, step=min(step, 3)))
    assert [folder.name for folder in checkpoints_of(tmp_path)] == [f"step-{step:06d}" for step in (3, 6, 7)]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


SHARD = "shard-00001-model-00001-of-00001.safetensors"
BROKEN = [
    (cut, SHARD),
    (Path.unlink, SHARD),
    (cut, "state.json"),
    (Path.unlink, "manifest.json"),
    (cut, "manifest.json"),
    (Path.touch, "shard-00009.safetensors"),
]


def test_where_the_newest_checkpoints_are_damaged_the_best_one_is_resumed(tmp_path):
    run = TinyRun(tmp_path)
    for step in range(1, 5):
        run.save(step, best=BEST)
    for step in (3, 4):
        cut(tmp_path / "checkpoints" / f"step-00000{step}" / "state.json")
    assert run.newest().name == "step-000001"


@pytest.mark.parametrize(("damage", "name"), BROKEN)
def test_a_damaged_checkpoint_is_skipped_for_the_one_before(saved, damage, name):
    damage(saved.folder / "checkpoints" / "step-000002" / name)
    assert saved.newest().name == "step-000001"
    [said] = saved.said
    assert said.startswith(f"Skipping {saved.folder}/checkpoints/step-000002: ")


def test_a_damaged_checkpoint_is_written_again(saved):
    """Its state.json may be equal, but that does not make the checkpoint valid."""
    cut(saved.folder / "checkpoints" / "step-000002" / SHARD)
    again = TinyRun(saved.folder)
    again.load(again.newest())
    again.learn()
    again.save(2)
    assert again.newest().name == "step-000002"


def test_a_run_whose_checkpoints_are_all_damaged_is_refused(saved):
    for step in (1, 2):
        cut(saved.folder / "checkpoints" / f"step-00000{step}" / SHARD)
    with pytest.raises(UsageError, match="none of the 2 checkpoints"):
        saved.newest()


def test_a_kill_while_a_checkpoint_or_agent_is_written_or_replaced_loses_no_older_one(saved):
    """Kills between write and rename, and between the two renames of a folder that is replaced."""
    folder = saved.folder / "checkpoints"
    (folder / "step-000002").rename(folder / folders.TEMPORARY)
    shutil.copytree(folder / "step-000001", folder / MOVED)
    with locked(saved.folder):
        assert saved.newest().name == "step-000001"
    (folder / "step-000001").rename(folder / MOVED)
    (saved.folder / f".agent{folders.REPLACED}").mkdir()
    with locked(saved.folder):
        assert saved.newest().name == "step-000001"
    assert [path.name for path in folder.iterdir()] == ["step-000001"]
    assert (saved.folder / "agent").exists()


def test_a_run_folder_and_its_copy_without_the_lock_are_opened_again(saved, tmp_path):
    out = str(tmp_path)
    assert open_run(out) == tmp_path  # it holds checkpoints
    shutil.rmtree(saved.folder / "checkpoints")
    (tmp_path / "config.yaml").write_text("of another program: true\n")
    with pytest.raises(UsageError, match="not of a run"):
        open_run(out)
    with locked(tmp_path):
        assert open_run(out) == tmp_path


def test_a_run_whose_checkpoints_were_deleted_is_not_replaced(saved, tmp_path):
    """A bug: whoever had deleted them to free space lost the trained agent, its games and metrics."""
    (tmp_path / "agent").mkdir(exist_ok=True)
    shutil.rmtree(saved.folder / "checkpoints")
    with locked(tmp_path), pytest.raises(UsageError, match="its checkpoints are gone"):
        open_run(str(tmp_path))


def test_a_report_that_was_made_before_the_first_checkpoint_hinders_no_start(tmp_path):
    """A bug: after a kill and a report by hand, the next start said that its checkpoints were gone."""
    with locked(tmp_path):
        write_yaml(CONFIG, tmp_path / "config.yaml")
        (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
        write_report(tmp_path)
        assert open_run(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("step", [0, 3])
def test_a_full_disk_keeps_the_older_checkpoint_and_the_next_save_tries_again(saved, tmp_path, step):
    run = saved if step else TinyRun(tmp_path / "new")
    run.folder.mkdir(exist_ok=True)
    with file_size_limit(100_000), pytest.raises(Resumable, match=f"step-00000{step} .*File too large"):
        run.save(step)
    left = sorted(path.name for path in (run.folder / "checkpoints").iterdir())
    assert left == (["step-000001", "step-000002"] if step else [])
    run.save(step)
    assert run.newest().name == f"step-00000{step}"


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_first_rank_removes_what_a_failed_save_has_written(rank, tmp_path):
    """When another rank removes it, the first one may already be writing the next checkpoint there."""
    folder = tmp_path / "checkpoints" / "step-000001"
    temporary = folders.begin_folder(folder)
    ranks = Ranks(rank, 2, CPU)
    with pytest.raises(Resumable, match="full disk"), checkpoint.resumable_writes(folder, ranks):
        raise OSError(errno.ENOSPC, "full disk")
    assert temporary.exists() == (rank == 1)


def another(value: object) -> object:
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return f"{value}-2"
    return (*value, "b") if isinstance(value, tuple) else value + 1


def test_a_resume_with_another_identifying_setting_is_refused(saved):
    for setting in experiment_values(CONFIG):
        value = getattr(CONFIG, setting)
        now = another(value)
        other = TinyRun(saved.folder, config=replace(CONFIG, **{setting: now}))
        values = [list(one) if isinstance(one, tuple) else one for one in (value, now)]
        sentence = "was made with {} = {!r}, not {!r}: ".format(setting, *values)
        with pytest.raises(UsageError, match=re.escape(sentence)):
            other.load(saved.folder / "checkpoints" / "step-000002")


def test_a_run_can_be_resumed_for_more_steps_and_on_another_machine(saved):
    changeable = vars(CONFIG).keys() - experiment_values(CONFIG).keys()
    changes = {setting: another(getattr(CONFIG, setting)) for setting in changeable}
    other = TinyRun(saved.folder, config=replace(CONFIG, **changes))
    assert other.load(saved.folder / "checkpoints" / "step-000002").trained_step == 2


def edit_state(checkpoint: Path, **values: object) -> None:
    """Change values in state.json."""
    file = checkpoint / "state.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_a_checkpoint_of_an_older_version_is_refused_in_one_sentence(saved):
    """Its list of files had digests, so that it would pass for damaged."""
    for folder in checkpoints_of(saved.folder):
        edit_state(folder, format=3)
        listed = json.loads((folder / folders.MANIFEST).read_text())
        with_digests = {name: [size, "digest"] for name, size in listed.items()}
        (folder / folders.MANIFEST).write_text(json.dumps(with_digests))
    with pytest.raises(UsageError, match=r"another version.*another --out$"):
        saved.newest()
    assert saved.said == []


def test_weights_of_another_shape_are_refused(saved):
    run = TinyRun(saved.folder)
    run.policy.model.resize_token_embeddings(300)
    begin_states(run.optimizer)
    with pytest.raises(UsageError, match=r"cannot be loaded .*Size mismatch .*261, 32.*300, 32"):
        run.load(run.newest())


def test_a_checkpoint_with_other_tensors_than_were_saved_is_refused(saved):
    folder = saved.folder / "checkpoints" / "step-000002"
    tensors = load_file(folder / SHARD)
    save_file({n: v for n, v in tensors.items() if not n.endswith("norm.weight/exp_avg")}, folder / SHARD)
    with pytest.raises(UsageError, match=r"step-000002 cannot be loaded .*: remove this checkpoint"):
        TinyRun(saved.folder).load(folder)


@pytest.mark.parametrize("name", [SHARD, ".metadata"])
def test_a_malicious_pickle_in_a_checkpoint_is_not_executed(saved, tmp_path, name):
    folder, mark = saved.folder / "checkpoints" / "step-000002", tmp_path / "executed"
    (folder / name).write_bytes(pickle.dumps(Attack(mark)))
    try:
        saved.load(folder)
    except UsageError as error:
        assert name == SHARD and "cannot be loaded" in str(error)
    assert not mark.exists()


def test_a_second_run_in_the_same_folder_is_refused(tmp_path):
    second = locked(tmp_path)
    with locked(tmp_path), pytest.raises(UsageError, match="in use by process"), second:
        pass
    with locked(tmp_path):  # released
        pass


def test_the_lock_of_a_folder_names_the_process_that_holds_it_at_once(tmp_path):
    """It names no earlier process, whose text may have been longer."""
    (tmp_path / LOCK).write_text("process 123456789 on " + "x" * 80)
    with locked(tmp_path):
        assert (tmp_path / LOCK).read_text() == f"process {os.getpid()} on {os.uname().nodename}"
