"""`prompt-r1 doctor`: versions, devices and memory."""

import argparse
import os
import platform
from collections.abc import Iterator

from prompt_r1.cli.command_line import command, program_name, run_program
from prompt_r1.cli.markdown import markdown_table
from prompt_r1.version import __version__, installed_version


def main(arguments: list[str]) -> None:
    """Print the table."""
    about = (
        f"Show versions, devices and memory. `{command('train', '--dry-run')}` estimates what a run needs."
    )
    parser = argparse.ArgumentParser(program_name("python -m prompt_r1.doctor"), description=about)
    parser.parse_args(arguments)
    print(markdown_table(["", "this machine"], list(rows()), left=2))


def rows() -> Iterator[tuple[str, str]]:
    """The names and values of the table."""
    import torch  # only here: `--help` does without

    yield "prompt-r1", __version__
    yield "Python", f"{platform.python_version()} on {platform.platform()}"
    for package in ("torch", "transformers"):
        yield package, installed_version(package) or "not installed"
    yield "CPU", f"{os.cpu_count()} cores"
    yield "memory", f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 1e9:.1f} GB"
    if not torch.cuda.is_available():
        yield "GPU", f"none that torch can use (built for CUDA: {torch.version.cuda or 'no'})"
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        yield f"GPU {index}", f"{name}, {total / 1e9:.1f} GB, {free / 1e9:.1f} GB free"


if __name__ == "__main__":
    run_program(main)
