"""The programs' command line: flags, error messages, exit codes."""

import argparse
import gc
import os
import re
import shlex
import signal
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import Field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, get_args, get_origin

from prompt_r1.cli.crash_report import DISK_ADVICE, crash_report_in
from prompt_r1.config.environment import HELD_OUT, MINI_AGENT, MINI_ENVIRONMENTS
from prompt_r1.config.fields import check_ranges, flag_of, type_name
from prompt_r1.config.functions import OBJECT_PREFIX
from prompt_r1.config.removed import removed_sentence
from prompt_r1.config.train import PRESETS, TrainConfig, check, has_own_questions
from prompt_r1.config.yaml_files import read_yaml
from prompt_r1.errors import (
    NO_CPU_MEMORY,
    FatalEnvError,
    InternalError,
    Interrupted,
    Resumable,
    UsageError,
    out_of_memory,
)
from prompt_r1.tasks.packages import is_task
from prompt_r1.terminal import escape_unprintable_output, printable
from prompt_r1.version import __version__

if TYPE_CHECKING:  # a program imports the settings of no other one
    from prompt_r1.config.evaluate import EvaluateConfig
    from prompt_r1.config.infer import InferConfig

Config = TypeVar("Config")
CONSOLE_COMMAND = "prompt-r1"
SCRIPTS = {"train": "train.py", "ask": "infer.py", "evaluate": "evaluate.py"}  # `prompt-r1 NAME` runs them
LONGEST_SENTENCE = 2000  # characters of an error message
MORE_CPU_MEMORY = (
    "start fewer processes on this machine, give a smaller --tokens-per-batch or less --offload, and resume "
    "from the last checkpoint; otherwise take a smaller agent"
)
MORE_GPU_MEMORY = (
    "give a smaller --tokens-per-batch or --kv-tokens, --parallel fsdp --offload all, or more GPUs, "
    "and resume from the last checkpoint; otherwise take a smaller agent or "
    "--device cpu"
)


def run_program(main: Callable[[list[str]], None]) -> NoReturn:
    """Run an entry point and exit.

    Exit codes: 0 done, 1 a bug of ours, 2 wrong usage or out of memory, 75 stopped but resumable, 130 Ctrl-C.
    Every error is printed as one sentence on stderr; the traceback of a bug is in a file that it names.
    """
    escape_unprintable_output()
    if main.__module__ == "__main__":  # a program of its own, not a call inside another process
        gc.freeze()  # full collections then skip what was imported, a quarter of a second each time
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with crash_report_in():
            main(sys.argv[1:])
            sys.stdout.flush()
    except (UsageError, FatalEnvError) as error:
        _exit(2, error)
    except Resumable as error:
        _exit(130 if isinstance(error, Interrupted) else 75, error)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it again at the end
        _exit(75, "nobody reads the output any more; the same command resumes from the last checkpoint")
    except OSError as error:
        if repair := DISK_ADVICE.get(error.errno or 0):
            _exit(75, f"{error}: {repair}; the same command resumes from the last checkpoint")
        path = error.filename2 or error.filename
        _exit(2, f"{path}: {error.strerror}; check the path and its permissions")
    except InternalError as error:
        _exit(1, error)
    except (RuntimeError, MemoryError) as error:
        sentence = out_of_memory(error)
        if not sentence:
            raise
        advice = MORE_CPU_MEMORY if NO_CPU_MEMORY in sentence else MORE_GPU_MEMORY
        _exit(2, f"{sentence}: in training, {advice}")
    except KeyboardInterrupt:
        _exit(130, "interrupted; the same command resumes from the last checkpoint")
    sys.exit(0)


def check_usage(read: Callable[[list[str]], object]) -> None:
    """Read the flags of this process, for --help and usage errors. `read` returns them, or raises UsageError.

    A script calls it before its imports of torch and transformers, which take seconds.
    """
    escape_unprintable_output()
    try:
        read(sys.argv[1:])
    except UsageError as error:
        _exit(2, error)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # until `run_program`, Ctrl-C ends the imports silently
    if sys.stderr.isatty():  # in a log it would mean nothing
        print("Loading …", file=sys.stderr, flush=True)


def program_name(default: str) -> str:
    """How this program was called: `prompt-r1 NAME` by the console command, else `default`."""
    return sys.argv[0] if sys.argv[0].startswith(f"{CONSOLE_COMMAND} ") else default


def command(program: str, *arguments: object) -> str:
    """A command to type next, in the form in which this process was started, with arguments quoted.

    `program` is one of SCRIPTS. An installed package has no scripts of its own to name.
    """
    installed = (Path(__file__).parents[1] / "scripts").is_dir()
    by_name = installed or sys.argv[0].startswith(f"{CONSOLE_COMMAND} ")
    start = [CONSOLE_COMMAND, program] if by_name else ["python", SCRIPTS[program]]
    return shlex.join([*start, *map(str, arguments)])


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of an error message about an unknown name: a known name that resembles it, if there is one."""
    similar = get_close_matches(name, list(known), n=1)
    return f" (did you mean {similar[0]}?)" if similar else ""


def _exit(code: int, reason: object) -> NoReturn:
    program = Path(sys.argv[0])
    name = program.parent.name if program.name == "__main__.py" else program.name
    sentence = printable(f"{name}: {reason}")
    if code == 2:  # one line, whatever is in the name of a file
        sentence = sentence.replace("\n", "\\n")
    if len(sentence) > LONGEST_SENTENCE:  # it repeats a value of the command line or of a file
        sentence = f"{sentence[: LONGEST_SENTENCE // 2]} … {sentence[-LONGEST_SENTENCE // 2 :]}"
    print(sentence, file=sys.stderr, flush=True)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        # At once: the end of an interpreter waits for its threads, and for NCCL, which may wait for ranks
        # that do not know yet that this one leaves.
        with suppress(OSError):
            sys.stdout.flush()
        os._exit(code)
    sys.exit(code)


def train_config(arguments: list[str]) -> tuple[TrainConfig, str]:
    """Read the settings of train.py; also returns the name of the preset or file they start from.

    Flags override the preset or YAML file of --config, which overrides the defaults.
    """
    about = "Train an agent to question an environment."
    parser = _new_parser("train.py", about)
    parser.add_argument("--config", default="", metavar="mini|paper|FILE", help="preset or YAML file (mini)")
    _add_flags(parser, TrainConfig, arguments, preset=PRESETS["mini"])
    given = vars(parser.parse_args(arguments))
    chosen = given.pop("config")
    source = chosen or "mini"
    values = PRESETS[source] if source in PRESETS else _read_settings(Path(source), given)
    config = TrainConfig(**{**values, **given})
    if set(config.env.split(",")) <= set(MINI_ENVIRONMENTS) and (not config.data or source in PRESETS):
        own = ("mini",)  # the mini world brings its own questions
        asked = {name: given.get(name, own) for name in ("data", "val_data", "test_data")}
        config = replace(config, **asked)
    if has_own_questions(config):
        if config.agent != MINI_AGENT and not chosen:
            raise UsageError(
                f"--agent {config.agent} with {config.data[0]}: say how it learns and plays: --config paper "
                "(for real models), --config mini (the settings of the toy agent) or a YAML file"
            )
        asked = given if source in PRESETS else {**values, **given}
        tasks = config.data if all(map(is_task, config.data)) else ()  # they bring their own questions
        # The mini world's questions say nothing about one's own.
        config = replace(
            config,
            val_data=config.val_data if "val_data" in asked else tasks or (HELD_OUT,),
            test_data=config.test_data if "test_data" in asked else tasks,
        )
    if "none" in config.val_data:
        config = replace(config, val_data=())
    if "none" in config.test_data:
        config = replace(config, test_data=())
    if config.env == "none":
        config = _without_environment(config, given)
    check(config)
    return config, run_name(Path(source).stem, config, values, given)


def run_name(start: str, config: TrainConfig, preset: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    """The name of a run without --out: its preset or file, then agent, environment and data if they differ.

    So a run on one's own data does not meet the folder of a run in the mini world.
    """
    agent, env, data = config.agent, config.env, config.data[0] if has_own_questions(config) else ""
    chosen = {"agent": agent, "env": env if env != "none" else "alone", "data": data}
    differing = [value for name, value in chosen.items() if name in given and given[name] != preset.get(name)]
    names = [re.sub(r"\.(jsonl|parquet)$", "", Path(value.split("@")[0]).name) for value in differing]
    return re.sub(r"[^\w.-]+", "-", "-".join(filter(None, [start, *names])))[:80]


def _read_settings(path: Path, given: Mapping[str, object]) -> dict[str, Any]:
    """The settings in a YAML file, except those in `given`.

    The file may come from a stranger. Raises UsageError if it names code to import.
    """
    values = {name: value for name, value in read_yaml(path, TrainConfig).items() if name not in given}
    code = [name for name in ("answer_metric", "reward") if values.get(name)]
    if any(spec.strip().startswith(OBJECT_PREFIX) for spec in values.get("env", "").split(",")):
        code.append("env")
    for name in code:
        raise UsageError(
            f"{path}: {name} names code, which is imported only if the command line names it: give "
            f"{flag_of(name)} {values[name]}"
        )
    return values


def infer_config(arguments: list[str]) -> "InferConfig":
    """Read the settings of infer.py."""
    from prompt_r1.config.infer import InferConfig

    about = "Ask a question: the agent questions the environment, and answers."
    return parse_arguments(InferConfig, "infer.py", about, arguments)


def evaluate_config(arguments: list[str]) -> "EvaluateConfig":
    """Read the settings of evaluate.py."""
    from prompt_r1.config.evaluate import EvaluateConfig, with_protocol

    config = parse_arguments(EvaluateConfig, "evaluate.py", "Score methods on questions.", arguments)
    return with_protocol(config)


def _without_environment(config: TrainConfig, given: dict[str, Any]) -> TrainConfig:
    """Set up the game of --env none, except for the flags in `given`.

    The game has one turn and its own reward rule. The instruction to answer replaces the paper's instruction
    to ask, and the turn may be as long as a game.
    """
    game: dict[str, Any] = {"max_turns": 1, "rule": "alone"}
    if config.instruction.startswith("paper"):
        game |= {"instruction": "alone", "max_new": config.max_tokens}
    return replace(config, **{name: value for name, value in game.items() if name not in given})


def parse_arguments(kind: type[Config], program: str, description: str, arguments: list[str]) -> Config:
    """Read a config from its flags alone. Raises UsageError for a value outside its range."""
    parser = _new_parser(program, description)
    _add_flags(parser, kind, arguments)
    config = kind(**vars(parser.parse_args(arguments)))
    check_ranges(config)
    return config


class Parser(argparse.ArgumentParser):
    """Explains a wrong command line in one sentence, also one with a flag of an older version."""

    def parse_args(self, arguments: list[str]) -> argparse.Namespace:  # type: ignore[override]
        """The values of the flags. Raises UsageError."""
        if "_ARGCOMPLETE" in os.environ:  # the shell asks for completions
            from argcomplete import autocomplete

            autocomplete(self, print_suppressed=True)
        given, unknown = self.parse_known_args(arguments)
        if unknown:
            flag = unknown[0].partition("=")[0]
            if sentence := removed_sentence(flag):
                raise UsageError(sentence)
            self.error(f"unknown argument {flag}{did_you_mean(flag, self._option_string_actions)}")
        return given

    def error(self, message: str) -> NoReturn:
        """Raise UsageError."""
        raise UsageError(f"{message}; `{self.prog} --help` lists the flags")


def _new_parser(program: str, description: str) -> Parser:
    program = program_name(program)
    parser = Parser(
        program,
        f"{program} [--FLAG VALUE ...]",
        description,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,  # so that flags which are not given do not override a preset
        formatter_class=lambda prog: _HelpFormatter(prog, max_help_position=24, width=80),
    )
    version = f"{CONSOLE_COMMAND} {__version__}"
    parser.add_argument("--version", action="version", version=version, help=argparse.SUPPRESS)
    return parser


class _HelpFormatter(argparse.HelpFormatter):
    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        """Shorten "NAME [NAME ...]" to "NAME ..."."""
        if action.nargs == "+":
            return f"{action.metavar} ..."
        return super()._format_args(action, default_metavar)

    def _split_lines(self, text: str, width: int) -> list[str]:
        """Break lines between words only: names such as self-consistency and --env-price stay whole."""
        return textwrap.wrap(text, width, break_on_hyphens=False)


def _add_flags(
    parser: Parser, kind: type[Any], arguments: list[str], preset: dict[str, Any] | None = None
) -> None:
    """Add a flag for each field; --help-all shows all of them by groups, --help only the everyday ones.

    A config without everyday fields has only --help, which shows every flag.
    """
    # A config's own fields first, then those that it shares with others.
    order = [name for base in kind.__mro__[:-1] for name in base.__annotations__]
    flags = sorted(fields(kind), key=lambda f: order.index(f.name))
    has_everyday = any(f.metadata["everyday"] for f in flags)
    show_all = not has_everyday or "--help-all" in arguments
    section: argparse._ActionsContainer = parser
    sections: dict[str, argparse._ActionsContainer] = {}
    for f in flags:
        if show_all and (group := f.metadata["group"]):
            section = sections.get(group) or parser.add_argument_group(group)
            sections[group] = section
        options = _options(f, preset or {})
        if not show_all and not f.metadata["everyday"]:
            options["help"] = argparse.SUPPRESS
        section.add_argument(flag_of(f.name), dest=f.name, **options)
    if has_everyday:
        parser.add_argument("--help-all", action="help", help=f"show all {len(flags)} flags")


def _options(f: Field[Any], preset: dict[str, Any]) -> dict[str, Any]:
    """The options of a field's argparse argument."""
    if f.type is bool and not f.default:
        return {"help": f.metadata["help"], "action": "store_true"}
    options: dict[str, Any] = {"help": _help_line(f, preset), "metavar": type_name(f), "type": f.type}
    if f.type is bool:
        options["type"] = _boolean
    elif get_origin(f.type) is tuple:
        options |= {"nargs": "+", "type": get_args(f.type)[0], "action": _Collect}
    if f.metadata["choices"]:
        options["choices"] = f.metadata["choices"]
        if get_origin(f.type) is not tuple:  # a list of methods is too long for {A,B}
            del options["metavar"]
    return options


class _Collect(argparse.Action):
    """Collect the values of a flag that is given several times: --agent A --agent B.

    In --val-data and --test-data, `none` and `held-out` replace what comes before, and files replace them.
    """

    def __call__(self, parser: object, given: object, values: Any, option_string: str | None = None) -> None:
        """Add these values to those before."""
        collected = list(getattr(given, self.dest, ()))
        for value in values:
            if self.dest in ("val_data", "test_data") and {"none", HELD_OUT} & {value, *collected}:
                collected.clear()
            collected.append(value)
        setattr(given, self.dest, tuple(collected))


def _help_line(f: Field[Any], preset: dict[str, Any]) -> str:
    """The help of a field with its default, here and in the mini preset."""
    help_line, choices = f.metadata["help"], f.metadata["choices"]
    if get_origin(f.type) is tuple and not all(choice in help_line for choice in choices):
        help_line += f": {', '.join(choices)}"
    defaults = []
    if "default:" not in help_line:
        defaults.append(_shown(f.default))
    if f.name in preset:
        defaults.append(f"mini: {_shown(preset[f.name])}")
    shown = ", ".join(filter(None, defaults))
    return f"{help_line} ({shown})" if shown else help_line


def _boolean(text: str) -> bool:
    if text not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"expected true or false, not {text!r}")
    return text == "true"


def _shown(default: Any) -> str:
    if isinstance(default, tuple):
        return " ".join(default)
    return f"{default:g}" if isinstance(default, float) else str(default)
