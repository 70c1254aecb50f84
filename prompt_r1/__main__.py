"""The console command `prompt-r1 PROGRAM …`, or `python -m prompt_r1 PROGRAM …`.

Each program is a script of this repository under another name: `prompt-r1 ask …` is `python infer.py …`.
"""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import prompt_r1
from prompt_r1.programs.command_line import CONSOLE_COMMAND

PACKAGE = Path(__file__).parent
# The scripts are at the top of a checkout, and in this folder of an installed package.
SCRIPTS = PACKAGE / "scripts" if (PACKAGE / "scripts").is_dir() else PACKAGE.parent
PROGRAMS = {
    "train": (SCRIPTS / "train.py", "train an agent to question an environment (train.py)"),
    "ask": (SCRIPTS / "infer.py", "ask the trained agent a question (infer.py)"),
    "evaluate": (SCRIPTS / "evaluate.py", "score methods on questions (evaluate.py)"),
    "serve": (PACKAGE / "pair/__main__.py", "serve agent and environment as one OpenAI model"),
    "report": (PACKAGE / "training/report.py", "write the HTML report of a run"),
    "data": (PACKAGE / "data/__main__.py", "convert and mix question files"),
}
PROGRAM_LINES = "\n".join(f"  {name:<10}{about}" for name, (_, about) in PROGRAMS.items())
USAGE = f"""\
usage: {CONSOLE_COMMAND} PROGRAM [--FLAG VALUE ...]

A small agent learns to question a large language model.

programs:
{PROGRAM_LINES}

`{CONSOLE_COMMAND} PROGRAM --help` lists the flags of a program.
`{CONSOLE_COMMAND} --version` prints the version."""


def main() -> None:
    """Run the program that the first argument names."""
    first, *rest = sys.argv[1:] or ["--help"]
    if first in ("-h", "--help"):
        print(USAGE)
    elif first == "--version":
        print(CONSOLE_COMMAND, prompt_r1.__version__)
    elif first in PROGRAMS:
        sys.argv = [f"{CONSOLE_COMMAND} {first}", *rest]
        run_script(PROGRAMS[first][0])
    else:
        hint = f"`{CONSOLE_COMMAND} --help` lists them"
        print(f"{CONSOLE_COMMAND}: there is no program {first!r}; {hint}", file=sys.stderr)
        sys.exit(2)


def run_script(path: Path) -> None:
    """Run a file as `python FILE` does, but keep `sys.argv`: error messages begin with its first word."""
    spec = spec_from_file_location("__main__", path)
    assert spec and spec.loader
    sys.modules["__main__"] = module = module_from_spec(spec)
    spec.loader.exec_module(module)


if __name__ == "__main__":
    main()
