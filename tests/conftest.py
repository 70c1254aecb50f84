"""Settings and fixtures of all tests."""

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # read by transformers when it is imported
os.environ["OMP_NUM_THREADS"] = "1"  # tests run side by side, so no run starts more ranks by itself
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the tests compare what a CPU computes, often bit by bit

import pytest

gc.disable()  # until the tests have been imported: imports make many objects and hardly any garbage


# hypothesis and torch are imported in functions: the process that only distributes the tests needs neither.
def pytest_configure(config: pytest.Config) -> None:
    """Let every run try the same examples, without a deadline: their time depends on the machine's load."""
    only_distributes = bool(config.getoption("numprocesses", None)) and not hasattr(config, "workerinput")
    if not only_distributes:
        import hypothesis

        hypothesis.settings.register_profile("suite", deadline=None, derandomize=True)
        hypothesis.settings.load_profile("suite")


@pytest.fixture(scope="session", autouse=True)
def quick_process() -> None:
    """Tiny models are faster on one thread. Garbage collections are rare, and skip what was imported."""
    import torch

    torch.set_num_threads(1)
    gc.freeze()
    gc.set_threshold(20_000)  # By default, one comes after 700 objects: the suite spent four seconds on them.
    gc.enable()


@pytest.fixture(scope="session")
def asking_agent(tmp_path_factory) -> Path:
    """The folder of a tiny agent that prompts its environment and answers."""
    from tests.support import tiny

    return tiny.save_asking_agent(tmp_path_factory.mktemp("asking_agent"))


@pytest.fixture
def call_here(monkeypatch, capfd) -> Callable[..., object]:
    """A function that runs an entry point in a folder in this process, which saves the imports."""
    from prompt_r1.programs.command_line import run_program
    from tests.support.programs import run_here

    def call(folder: Path, *line: str | Path) -> subprocess.CompletedProcess[str]:
        monkeypatch.chdir(folder)
        monkeypatch.setattr("sys.argv", list(map(str, line)))
        capfd.readouterr()
        with pytest.raises(SystemExit) as exit_:
            run_program(lambda arguments: run_here(str(line[0]), *arguments), sys.argv[1:])
        return subprocess.CompletedProcess(line, exit_.value.code, *capfd.readouterr())

    return call


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give the marked tests a longer timeout."""
    for item in items:
        if any(item.get_closest_marker(name) for name in ("learning", "slow", "faults")):
            item.add_marker(pytest.mark.timeout(900))
