"""The environments: what can be questioned, by the name that a user writes."""

import os
import random
import re
from collections.abc import Mapping

from prompt_r1.types import Environment, UsageError

OPENAI_URL = "https://api.openai.com/v1"
MINI_SPECS = ("mini", "mini-b", "mini-mute")


def make_environment(
    spec: str,
    *,
    seed: int = 0,
    concurrency: int = 64,
    attempt_timeout: float = 120.0,
    call_deadline: float = 600.0,
    max_attempts: int = 6,
    fields: Mapping[str, object] | None = None,
) -> Environment:
    """The environment called `spec`: mini, mini-b, mini-mute, MODEL@http://host:port/v1, or MODEL.

    A MODEL without URL is at OPENAI_BASE_URL (default: OpenAI). The key is read from OPENAI_API_KEY; an
    endpoint that is given by its URL may do without. `seed` is that of the mini world, or of the jitter of
    the waits between attempts. Raises UsageError.
    """
    if spec in MINI_SPECS:
        return _mini(spec, seed)
    if spec.startswith("mini-"):
        raise UsageError(f"there is no environment {spec!r}: the mini world has {', '.join(MINI_SPECS)}")
    if spec.startswith("hf:"):
        raise UsageError(f"the environment {spec!r} is not supported yet: serve the model (for instance with "
                         "`vllm serve`) and give MODEL@http://host:port/v1")  # fmt: skip
    match = re.fullmatch(r"(?!https?:)([^\s,@]+)(?:@(https?://[^\s,]+))?", spec)
    if match is None:
        raise UsageError(f"there is no environment {spec!r}: give mini, MODEL or MODEL@http://host:port/v1")
    model, url = match.groups()

    from prompt_r1.environments.chat import ChatEnvironment, checked_base_url, is_loopback
    from prompt_r1.protocol import ENVIRONMENT_SYSTEM

    base_url = checked_base_url(url or os.environ.get("OPENAI_BASE_URL") or OPENAI_URL)
    api_key = os.environ.get("OPENAI_API_KEY", "").strip()
    if not api_key and not url and not is_loopback(base_url):
        raise UsageError(f"the environment {spec!r} at {base_url} needs a key: set OPENAI_API_KEY, "
                         "or give --env mini or MODEL@http://host:port/v1")  # fmt: skip
    return ChatEnvironment(
        model=model,
        base_url=base_url,
        api_key=api_key,
        concurrency=concurrency,
        attempt_timeout=attempt_timeout,
        call_deadline=call_deadline,
        max_attempts=max_attempts,
        fields=fields,
        system=ENVIRONMENT_SYSTEM,
        rng=random.Random(seed),
    )


def _mini(spec: str, seed: int) -> Environment:
    from prompt_r1.miniworld.environment import MiniEnvironment, MuteEnvironment
    from prompt_r1.miniworld.world import make_world

    if spec == "mini-mute":
        return MuteEnvironment()
    return MiniEnvironment(make_world(seed), style="B" if spec == "mini-b" else "A", seed=seed)
