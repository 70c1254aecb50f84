"""The command line of the entry points: flags from the fields of a config, kind errors, exit codes."""

import argparse
import errno
import sys
from collections.abc import Callable
from dataclasses import Field, fields, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_args, get_origin

import torch
from transformers.utils import logging as transformers_logging

from prompt_r1.config.train import PRESETS, TrainConfig, check
from prompt_r1.config.yaml_files import read_yaml, type_name
from prompt_r1.errors import FatalEnvError, Resumable, UsageError
from prompt_r1.terminal import printable, speak_any_language

Config = TypeVar("Config")


def run_program(main: Callable[[list[str]], None]) -> NoReturn:
    """Run an entry point and exit: 0 done, 2 wrong usage or no memory, 75 stopped but resumable, 130 Ctrl-C.

    What the user can mend is told in one sentence, without a traceback.
    """
    transformers_logging.disable_progress_bar()
    speak_any_language()
    try:
        main(sys.argv[1:])
    except (UsageError, FatalEnvError) as error:
        _leave(2, error)
    except Resumable as error:
        _leave(75, error)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        _leave(75, f"{error}: make room; the same command goes on from the last checkpoint")
    except torch.OutOfMemoryError as error:
        told = str(error).split(". ")[0].strip()
        _leave(2, f"{told}: in training give --tokens-per-batch less, --offload, or more GPUs (--dry-run "
                  "counts what they need) and go on from the last checkpoint; else take a smaller agent or "
                  "--device cpu")  # fmt: skip
    except KeyboardInterrupt:
        _leave(130, "interrupted; the same command goes on from the last checkpoint")
    sys.exit(0)


def _leave(code: int, reason: object) -> NoReturn:
    program = Path(sys.argv[0])
    name = program.parent.name if program.name == "__main__.py" else program.name
    print(printable(f"{name}: {reason}"), file=sys.stderr)
    sys.exit(code)


def train_config(arguments: list[str]) -> tuple[TrainConfig, str]:
    """The config of train.py from its command line, and the name of the preset or file that it began with.

    Later wins: defaults, then the preset or YAML file of --config, then flags.
    """
    about = "Train an agent to question an environment. Without --config the preset mini is used."
    parser = _new_parser("train.py", about)
    parser.add_argument("--config", default="mini", metavar="mini|paper|FILE", help="preset or YAML file")
    _add_flags(parser, TrainConfig, arguments, preset=PRESETS["mini"])
    given = vars(parser.parse_args(arguments))
    source = given.pop("config")
    values = PRESETS[source] if source in PRESETS else read_yaml(Path(source), TrainConfig)
    config = TrainConfig(**{**values, **given})
    # The mini world brings its own questions.
    if config.env in ("mini", "mini-b", "mini-mute") and not config.data:
        config = replace(config, data=("mini",), val_data=("mini",), test_data=("mini",))
    if "none" in config.val_data:
        config = replace(config, val_data=())
    if "none" in config.test_data:
        config = replace(config, test_data=())
    name = Path(source).stem
    if config.env == "none":
        config, name = _alone(config, given), f"{name}-alone"
    check(config)
    return config, name


def _alone(config: TrainConfig, given: dict[str, Any]) -> TrainConfig:
    """The game without an environment: one turn, with a rule of its own. In place of the paper's instruction
    to ask there is one to answer, and the turn may be as long as a game.
    """
    game: dict[str, Any] = {"max_turns": 1, "rule": "alone"}
    if config.instruction.startswith("paper"):
        game |= {"instruction": "alone", "max_new": config.max_tokens}
    return replace(config, **{name: value for name, value in game.items() if name not in given})


def parse_arguments(kind: type[Config], program: str, description: str, arguments: list[str]) -> Config:
    """A config from its command line alone."""
    parser = _new_parser(program, description)
    _add_flags(parser, kind, arguments)
    return kind(**vars(parser.parse_args(arguments)))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; `{self.prog} --help` lists the flags\n")


def _new_parser(program: str, description: str) -> _Parser:
    return _Parser(
        program,
        f"{program} [--FLAG VALUE ...]",
        description,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,  # what is not given stays open for presets and files
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=32, width=100),
    )


def _add_flags(
    parser: _Parser, kind: type[Any], arguments: list[str], preset: dict[str, Any] | None = None
) -> None:
    """A flag for each field. --help shows the everyday ones, --help-all every one, under its heading."""
    everyday = getattr(kind, "EVERYDAY", None)
    everything = everyday is None or "--help-all" in arguments
    section: argparse._ActionsContainer = parser
    # A config's own fields first, then those that it shares with others.
    for f in sorted(fields(kind), key=lambda f: f.name not in kind.__annotations__):
        if everything and f.metadata["group"]:
            section = parser.add_argument_group(f.metadata["group"])
        options = _options(f, preset or {})
        if everyday is not None and not everything and f.name not in everyday:
            options["help"] = argparse.SUPPRESS
        section.add_argument("--" + f.name.replace("_", "-"), dest=f.name, **options)
    if everyday is not None:
        parser.add_argument("--help-all", action="help", help=f"show all {len(fields(kind))} flags")


def _options(f: Field[Any], preset: dict[str, Any]) -> dict[str, Any]:
    """What argparse wants to know of a field. The help ends with its default, and the one of `preset`."""
    choices = f.metadata["choices"] if f.type is not bool else ()
    help_line = f.metadata["help"]
    if not all(choice in help_line for choice in choices):
        help_line += f": {', '.join(choices)}"
    defaults = [_shown(f.default)] if "default:" not in help_line else []
    if f.name in preset:
        defaults.append(f"mini: {_shown(preset[f.name])}")
    help_line = f"{help_line} ({', '.join(filter(None, defaults))})".removesuffix(" ()")
    options: dict[str, Any] = {"help": help_line, "metavar": type_name(f), "type": f.type}
    if f.type is bool:
        options["type"] = _boolean
    elif get_origin(f.type) is tuple:
        # Given several times it goes on: --agent A --agent B.
        options |= {"nargs": "+", "type": get_args(f.type)[0], "action": "extend"}
    if choices:
        options["choices"] = choices
    if f.type is bool and not f.default:
        return {"help": f.metadata["help"], "action": "store_true"}
    return options


def _boolean(text: str) -> bool:
    if text not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"true or false is wanted, not {text!r}")
    return text == "true"


def _shown(default: Any) -> str:
    return " ".join(default) if isinstance(default, tuple) else str(default)
