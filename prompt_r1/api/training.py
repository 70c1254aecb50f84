"""Train from Python: `prompt_r1.train("mini", steps=20)`."""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from prompt_r1.cli.command_line import did_you_mean
from prompt_r1.config.fields import flag_of
from prompt_r1.config.functions import name_of
from prompt_r1.config.train import TrainConfig
from prompt_r1.config.train_settings import train_config
from prompt_r1.errors import UsageError
from prompt_r1.storage.run_log import OnMetrics
from prompt_r1.training.launch import start

PACKAGE = Path(__file__).parents[1]


def train(config: str | Path = "", *, on_step: OnMetrics | None = None, **settings: object) -> Path:
    """Train an agent and return its run folder.

    `config`: mini (the default), paper or a YAML file. `settings`: the flags of train.py, with underscores;
    `reward` and `answer_metric` may be functions of a module, also of the notebook that runs. `on_step` is
    called with each line of metrics.jsonl; an exception that it raises ends the run, which the next call with
    the same settings resumes from its newest checkpoint.

    Raises UsageError, FatalEnvError and Resumable, for which the command line has the exit codes 2, 2 and 75.
    """
    preset = ["--config", str(config)] if config else []
    values, name = train_config([*preset, *_flags(settings)])
    train_steps = _train_script().train
    return _outside_event_loop(lambda: start(values, name, train_steps, on_metrics=on_step))


def _flags(settings: Mapping[str, object]) -> list[str]:
    """Settings as a command line, which checks their types and ranges."""
    known = {f.name: f for f in fields(TrainConfig)}
    line: list[str] = []
    for name, value in settings.items():
        if name not in known:
            raise UsageError(f"train() has no setting {name!r}{did_you_mean(name, known)}")
        if callable(value):
            value = name_of(value, where=f"train({name}=…)")
        if isinstance(value, bool) and known[name].default is False:
            line += [flag_of(name)] if value else []
        elif isinstance(value, bool):
            line += [f"{flag_of(name)}={str(value).lower()}"]
        elif isinstance(value, list | tuple):
            line += [flag_of(name), *map(str, value)]
        else:
            line += [f"{flag_of(name)}={value}"]
    return line


def _train_script() -> ModuleType:
    """train.py: at the top of a checkout, in the folder `scripts` of an installed package."""
    path = PACKAGE / "scripts/train.py"
    spec = spec_from_file_location("train", path if path.exists() else PACKAGE.parent / "train.py")
    assert spec and spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _outside_event_loop(work: Callable[[], Path]) -> Path:
    """Call `work`; in a new thread if this one runs an event loop, as in a notebook: training has its own."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return work()
    with ThreadPoolExecutor(1, "prompt-r1-train") as thread:
        return thread.submit(work).result()
