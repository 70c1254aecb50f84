"""Checks that need no model: settings, files, folders and keys, before torch is imported."""

import fcntl
import os
import sys
from collections.abc import Iterable
from io import BufferedReader
from pathlib import Path

from prompt_r1.agent.names import find_agent, newest_mini_run
from prompt_r1.cli.question_input import given_questions
from prompt_r1.config.environment import HELD_OUT, MINI_AGENT, EnvironmentConfig, is_mini_data
from prompt_r1.config.evaluate import evaluate_config
from prompt_r1.config.infer import infer_config
from prompt_r1.config.train_settings import train_config
from prompt_r1.data.files import load_questions
from prompt_r1.environments.specs import Environments
from prompt_r1.errors import UsageError

LOCK = ".lock"  # of a run folder


def check_train(arguments: list[str]) -> None:
    """Raise UsageError for a training that cannot start."""
    config, name = train_config(arguments)
    _check_agents([config.agent])
    _check_environments(config, [] if config.dry_run else [config.env])  # an estimate needs no key
    _check_data([*config.data, *config.val_data, *config.test_data])
    if os.environ.get("RANK", "0") == "0" and not config.dry_run:
        _check_unused(Path(config.out or f"runs/{name}-seed{config.seed}"))


def check_infer(arguments: list[str]) -> None:
    """Raise UsageError for a question that cannot be asked."""
    config = infer_config(arguments)
    if config.questions not in ("", "-") or config.question.strip() not in ("", "-"):
        given_questions(question=config.question.strip(), file=config.questions)
    elif not sys.stdin.isatty() and _is_empty(sys.stdin.buffer):
        given_questions(question="", file="-")  # raises: there is none
    check_pair(config.agent, config.env, config)


def check_pair(agent: str, env: str, calls: EnvironmentConfig) -> None:
    """Raise UsageError for an agent or environment that cannot be opened; "" as for infer."""
    _check_agents([agent or str(newest_mini_run())])
    _check_environments(calls, [env])


def check_evaluate(arguments: list[str]) -> None:
    """Raise UsageError for an evaluation that cannot start."""
    config = evaluate_config(arguments)
    _check_agents([*config.agent, *filter(None, [config.grpo_agent])])
    begun = bool(config.out) and (Path(config.out) / "predictions.jsonl").exists()
    # An evaluation that is complete asks nothing, and needs no key.
    _check_environments(config, [] if begun else [*config.env, config.optimizer_env])
    _check_data([*config.data, *config.train_data, *config.val_data])


def _is_empty(stream: object) -> bool:
    """Whether standard input has ended. Looks ahead, and leaves the input to the program."""
    return isinstance(stream, BufferedReader) and not stream.peek(1)


def _check_agents(names: Iterable[str]) -> None:
    for name in names:
        if name != MINI_AGENT:  # building the mini agent imports torch
            find_agent(name, seed=0)


def _check_environments(calls: EnvironmentConfig, specs: Iterable[str]) -> None:
    environments = Environments(calls)
    for spec in filter(None, specs):
        environments.check(spec)


def _check_data(names: Iterable[str]) -> None:
    for name in names:
        if not is_mini_data(name) and ":" not in name and name not in (HELD_OUT, "none"):
            load_questions(name)


def _check_unused(run: Path) -> None:
    """Raise UsageError if a process holds the lock of a run folder."""
    lock = run / LOCK
    if not lock.is_file():
        return
    with lock.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = file.read() or "another process"
            raise UsageError(
                f"{run} is in use by {holder}: wait until it has ended, or choose another --out"
            ) from None
