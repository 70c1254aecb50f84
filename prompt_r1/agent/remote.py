"""An agent behind an OpenAI-compatible completions endpoint (vLLM, say): `--agent MODEL@http://host:port/v1`.

It stands where the engine of an agent in this process does: tokens in, the tokens of its next turn out. The
prompt goes out as token ids, so that the server reads exactly what the game holds and no text from outside
can become a control token; servers that take only text get it as text. What comes back are token ids where
the server tells them (vLLM does), else its text, encoded again. The log-probabilities of what it sampled are
not asked for: such an agent plays, but cannot be trained.
"""

import hashlib
import os
import re
from collections.abc import Sequence
from typing import Literal

import httpx

from prompt_r1.endpoint.request import Request
from prompt_r1.environments.chat import USUAL_REPLY, ChatEnvironment
from prompt_r1.errors import FatalEnvError, Resumable
from prompt_r1.protocol import Codec, text_of
from prompt_r1.types import Completion

Prompts = Literal["tokens", "text"]
KEY = "AGENT_API_KEY"  # not the environment's key: it would be sent to another host


def parse_remote(name: str) -> tuple[str, str] | None:
    """Model and base URL of MODEL@URL; None for an agent that is somewhere else."""
    match = re.fullmatch(r"([^\s@]+)@(https?://\S+)", name)
    return (match[1], match[2]) if match else None


class RemoteEngine:
    """Generates through POST /completions. Failed requests are sent again as those of environments are."""

    def __init__(
        self,
        model: str,
        base_url: str,
        codec: Codec,
        *,
        prompts: Prompts = "tokens",
        concurrency: int = 64,
        attempt_timeout: float = 120.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.name = f"{model}@{base_url}"
        self._codec = codec
        self._prompts = prompts
        self._turn_end = text_of(codec.tokenizer, [codec.turn_end])
        # Fields that only vLLM knows: others pass over them, or refuse and get none.
        fields = {
            "return_token_ids": True,
            "stop_token_ids": sorted(codec.stop_ids),
            "skip_special_tokens": False,
        }
        self._endpoint = ChatEnvironment(
            model=model, base_url=base_url, api_key=os.environ.get(KEY, "").strip(), fields=fields,
            concurrency=concurrency, attempt_timeout=attempt_timeout, transport=transport,
        )  # fmt: skip

    async def generate(
        self,
        tokens: list[int],
        *,
        max_new: int,
        seed: str,
        temperature: float = 1.0,
        stop: tuple[str, ...] = (),
    ) -> Completion:
        """The next turn; its log-probabilities are unknown and stand as 0. Raises Resumable for an endpoint
        that does not answer, FatalEnvError for one that never will."""
        content: dict[str, object] = {
            "prompt": tokens if self._prompts == "tokens" else self._text(tokens),
            "max_tokens": max_new,
            "temperature": temperature,
            "seed": int.from_bytes(hashlib.sha256(seed.encode()).digest()[:4]),
        }
        outcome = await self._endpoint.send(Request("/completions", content, len(tokens) + max_new))
        if outcome.verdict == "fatal":
            raise FatalEnvError(f"the agent {self.name} refuses to work: {outcome.reason}")
        if outcome.verdict == "retry":
            raise Resumable(f"the agent {self.name} did not answer: {outcome.reason}; try again later")
        new = list(outcome.token_ids) or self._encode(outcome.text)
        finished = outcome.finish == "stop"
        if finished and (not new or new[-1] not in self._codec.stop_ids):
            new.append(self._codec.turn_end)  # the server took it for the end, and left it out
        end = self._first_end(new, stop)
        new, finished = (new[:end], True) if end else (new, finished)
        return Completion(new, [0.0] * len(new), finished)

    async def check(self) -> None:
        """Raise UsageError or FatalEnvError for an endpoint that plainly cannot play."""
        await self._endpoint.check(Request("/completions", {"prompt": "Hi", "max_tokens": 1}, USUAL_REPLY))

    async def close(self) -> None:
        await self._endpoint.close()

    def _text(self, tokens: Sequence[int]) -> str:
        return text_of(self._codec.tokenizer, tokens)

    def _encode(self, text: str) -> list[int]:
        text = text.partition(self._turn_end)[0]
        return self._codec.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _first_end(self, tokens: Sequence[int], stop: Sequence[str]) -> int:
        """How many tokens there are up to the end of the first stop string; 0: none is in them.

        Looked for here: servers differ in whether the text that they send holds the string that ended it.
        """
        reach = max(map(len, stop), default=0)  # every token has at least one character of the string
        for end in range(1, len(tokens) + 1) if stop else ():
            tail = self._codec.decode(tokens[max(0, end - reach) : end])
            if any(string in tail for string in stop):
                return end
        return 0
