"""The environment as a choice of the agent: `--route agent`, the learned form of the paper's eq. 19.

The instruction names the environments and their prices. The agent begins each prompt with the name of the
environment that it asks, and may ask another one in each turn:

    <interaction_prompt>@gpt-4o-mini: When was Silver River released?</interaction_prompt>

No environment sees the names. A prompt without the name of an environment goes to the first one.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from prompt_r1.errors import UsageError
from prompt_r1.types import Message

AGENT_ROUTE = "agent"  # of --route


@dataclass(frozen=True)
class Addressed:
    """A dialogue without names, and the number of the environment that its last prompt names (None: none)."""

    messages: list[Message]
    environment: int | None


def names_in(spec: str) -> tuple[str, ...]:
    """The names that an agent writes for the environments of a SPEC: without provider, folder and URL.

    Raises UsageError for names that cannot be told apart, or written.
    """
    names = []
    for part in spec.split(","):
        model = part.strip().partition("@http")[0]
        separator = ":" if model.startswith("py:") else "/"
        names.append(model.removeprefix("hf:").rstrip("/").rpartition(separator)[2])
    for name in names:
        if not re.fullmatch(r"[\w.:+-]+", name):
            raise UsageError(
                f"--route {AGENT_ROUTE}: the agent cannot write the name of {name!r} in {spec!r}"
            )
    if len({name.lower() for name in names}) < len(names):
        raise UsageError(
            f"--route agent: two environments of {spec!r} have the same name ({', '.join(names)}), so the "
            "agent cannot tell them apart"
        )
    return tuple(names)


def route_instruction(spec: str, prices: Sequence[str]) -> str:
    """What the instruction says about the environments of a SPEC, with the prices of --env-price if any."""
    names = names_in(spec)
    shown = [f"@{name}" for name in names]
    heading = "Assistants"
    if prices:
        of_each = list(prices) * len(names) if len(prices) == 1 else prices
        shown = [f"{name} ({price})" for name, price in zip(shown, of_each, strict=False)]
        heading += " (dollars per million tokens sent, received)"
    return f"{heading}: {', '.join(shown)}. Begin each prompt with the name of the one you ask, as @NAME: ..."


def address(messages: Sequence[Message], names: Sequence[str]) -> Addressed:
    """Remove the name in front of each prompt of a dialogue, and find the environment of the last one.

    `@NAME`, with or without a colon, is a name of `names`, in any letter case; `@WORD:` is an unknown name. A
    prompt of nothing but a name is sent as it is.
    """
    environment, plain = None, list[Message]()
    for message in messages:
        if message["role"] != "user":
            plain.append(message)
            continue
        match = _name_pattern(tuple(names)).match(message["content"])
        rest = message["content"][match.end() :] if match else ""
        plain.append({"role": "user", "content": rest or message["content"]})
        known = match["known"] if match else None
        environment = [name.lower() for name in names].index(known.lower()) if known else None
    return Addressed(plain, environment)


@cache
def _name_pattern(names: tuple[str, ...]) -> re.Pattern[str]:
    longest_first = sorted(names, key=len, reverse=True)  # "llama3:8b" before "llama3"
    known = "|".join(map(re.escape, longest_first))
    return re.compile(rf"\s*@(?:(?P<known>{known})(?=[\s:,]|$)[:,]?|[^\s:]+:(?=\s))\s*", re.IGNORECASE)
