"""An environment behind an OpenAI-compatible chat-completions endpoint."""

import logging
import math
import os
import random
import re
from collections.abc import Mapping
from dataclasses import replace

from prompt_r1.endpoint.client import ClientLimits, EndpointClient
from prompt_r1.endpoint.request import ApiKey, checked_base_url, is_loopback
from prompt_r1.endpoint.responses import Outcome
from prompt_r1.environments.budget import BILLED_CHARACTERS_PER_TOKEN
from prompt_r1.errors import UsageError
from prompt_r1.types import Message

logger = logging.getLogger(__name__)

OPENAI_URL = "https://api.openai.com/v1"
PATH = "/chat/completions"
MOST_CHARACTERS_PER_TOKEN = 20  # on average over a text; a count that means more is too low


def open_chat(
    name: str,
    *,
    key: ApiKey,
    fields: Mapping[str, object],
    system: str,
    limits: ClientLimits,
    rng: random.Random,
) -> "ChatEnvironment":
    """Open a SPEC: MODEL@URL, or MODEL at OPENAI_BASE_URL (default: OpenAI). Raises UsageError."""
    match = re.fullmatch(r"(?!https?:)([^\s,@]+)(?:@(https?://[^\s,]+))?", name)
    if match is None:
        raise UsageError(
            f"there is no environment {name!r}: give mini, MODEL, MODEL@http://host:port/v1 or hf:DIR"
        )
    model, url = match.groups()
    base_url = checked_base_url(url or os.environ.get("OPENAI_BASE_URL") or OPENAI_URL)
    if not key.text and not url and not is_loopback(base_url):
        raise UsageError(
            f"the environment {name!r} at {base_url} needs a key: set OPENAI_API_KEY, or give --env mini "
            "or MODEL@http://host:port/v1"
        )
    client = EndpointClient(model, base_url, key=key, fields=fields, limits=limits, rng=rng)
    return ChatEnvironment(client, system=system)


class ChatEnvironment:
    """Asks the model of a client. `system` opens every dialogue that has no system message."""

    def __init__(self, client: EndpointClient, *, system: str = "") -> None:
        self.name = client.model
        self.parameters: Mapping[str, object] = {"system": system, **client.fields}
        self._client = client
        self._system = system
        self._warned = False

    async def call(self, messages: list[Message], *, sample: int = 0, session: str = "") -> Outcome:
        """Return the outcome, after retries. `sample` is not sent: the provider draws its own samples."""
        if self._system and not any(message["role"] == "system" for message in messages):
            messages = [{"role": "system", "content": self._system}, *messages]
        characters = sum(len(message["content"]) for message in messages)
        outcome = await self._client.send(PATH, {"messages": messages})
        return self._with_checked_usage(outcome, characters)

    async def check(self) -> None:
        await self._client.check(PATH, {"messages": [{"role": "user", "content": "Hi"}]})

    def _with_checked_usage(self, outcome: Outcome, characters: int) -> Outcome:
        """Replace token counts that are missing, or too low for the texts, by estimates for the budget.

        `characters` is the length of the prompt. Counts may be higher than the texts explain: providers also
        bill reasoning that they do not return, and text that they add to the prompt. A request that was
        rejected (it has a reason) costs nothing.
        """
        if outcome.verdict in ("retry", "fatal") or outcome.reason:
            return outcome
        checked = replace(
            outcome,
            tokens_in=_plausible_count(outcome.tokens_in, characters),
            tokens_out=_plausible_count(outcome.tokens_out, outcome.written),
        )
        if checked != outcome and (outcome.tokens_in or outcome.tokens_out) and not self._warned:
            self._warned = True
            counts = f"{outcome.tokens_in} and {outcome.tokens_out} tokens"
            lengths = f"a prompt of {characters} and a reply of {outcome.written} characters"
            logger.warning("%s counts %s for %s; using estimates instead", self.name, counts, lengths)
        return checked


def _plausible_count(tokens: int, characters: int) -> int:
    """The provider's count for a text of this length; if it is too low, an estimate from above."""
    if tokens * MOST_CHARACTERS_PER_TOKEN >= characters:
        return tokens
    return math.ceil(characters / BILLED_CHARACTERS_PER_TOKEN)
