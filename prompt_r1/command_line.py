"""The command line of the entry points: flags from the fields of a config, kind errors, exit codes."""

import argparse
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_args, get_origin

from transformers.utils import logging as transformers_logging

from prompt_r1.config import PRESETS, TrainConfig, check, read_yaml, type_name
from prompt_r1.types import FatalEnvError, Resumable, UsageError

Config = TypeVar("Config")


def run(main: Callable[[list[str]], None]) -> NoReturn:
    """Run an entry point; end with 0 done, 2 wrong usage, 75 stopped but resumable, 130 interrupted.

    What the user can mend is told in one sentence, without a traceback.
    """
    transformers_logging.disable_progress_bar()
    try:
        main(sys.argv[1:])
    except (UsageError, FatalEnvError) as error:
        _leave(2, error)
    except Resumable as error:
        _leave(75, error)
    except KeyboardInterrupt:
        _leave(130, "interrupted; the same command goes on from the last checkpoint")
    sys.exit(0)


def _leave(code: int, reason: object) -> NoReturn:
    print(f"{Path(sys.argv[0]).name}: {reason}", file=sys.stderr)
    sys.exit(code)


def train_config(arguments: list[str]) -> tuple[TrainConfig, str]:
    """The config of train.py from its command line, and the name of the preset or file that it began with.

    Later wins: defaults, then the preset or YAML file of --config, then flags.
    """
    parser = _parser(TrainConfig, "train.py", "Train an agent to question an environment (Prompt-R1).")
    parser.add_argument(
        "--config", default="mini", metavar="mini|paper|FILE.yaml", help="preset or file (mini)"
    )
    given = vars(parser.parse_args(arguments))
    source = given.pop("config")
    values = PRESETS[source] if source in PRESETS else read_yaml(Path(source), TrainConfig)
    config = TrainConfig(**{**values, **given})
    if config.env.startswith("mini") and not config.data:  # its world brings its own questions
        config = replace(config, data=("mini",), val_data=("mini",), test_data=("mini",))
    check(config)
    return config, Path(source).stem


def parse_arguments(kind: type[Config], program: str, description: str, arguments: list[str]) -> Config:
    """A config from its command line alone."""
    return kind(**vars(_parser(kind, program, description).parse_args(arguments)))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; `{self.prog} --help` lists the flags\n")


def _parser(kind: type[Any], program: str, description: str) -> argparse.ArgumentParser:
    parser = _Parser(
        program,
        f"{program} [--FLAG VALUE ...]",
        description,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=30, width=110),
    )
    for f in fields(kind):
        options: dict[str, Any] = {
            "help": f"{f.metadata['help']} ({_shown(f.default)})",
            "metavar": type_name(f),
        }
        if f.type is bool and not f.default:
            options = {"help": f.metadata["help"], "action": "store_true"}
        elif f.type is bool:
            options["type"] = lambda text: {"true": True, "false": False}[text]
        elif get_origin(f.type) is tuple:
            options |= {"nargs": "+", "type": get_args(f.type)[0]}
        else:
            options["type"] = f.type
        if f.metadata["choices"] and f.type is not bool:
            options["choices"] = f.metadata["choices"]
        parser.add_argument("--" + f.name.replace("_", "-"), dest=f.name, **options)
    return parser


def _shown(default: Any) -> str:
    return " ".join(default) if isinstance(default, tuple) else str(default)
