"""What a field of a config is, and the settings that the compared methods share."""

from dataclasses import dataclass, field
from typing import Any


def knob(default: Any, help: str, *, choices: tuple[str, ...] = (), group: str = "") -> Any:
    """A field of a config: its default, its line in the help, and its values where they are few.

    `group` is the heading, in --help-all, of this field and those that follow it.
    """
    return field(default=default, metadata={"help": help, "choices": choices, "group": group})


METHODS = ("direct", "untrained", "agent-only", "prompt-r1")


@dataclass(frozen=True)
class MethodConfig:
    """Settings of the methods that evaluate.py compares; the defaults are those of their authors."""

    answer_format: str = knob(
        "auto",
        'how an environment that is asked once marks its answer: <answer> tags, or "Answer only."; auto: '
        "tags, but not in the mini world",
        choices=("auto", "tags", "only"),
    )
