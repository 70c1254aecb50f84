"""Any Hugging Face causal model in this process as a frozen environment, through our own engine.

It shares the event loop with the agent's engine: both advance by one forward at a time. Texts of the dialogue
are encoded apart from the chat template's frame, so no prompt of the agent can become a control token.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from prompt_r1.agent.engine import Engine
from prompt_r1.agent.policy import Policy, load_policy, load_tokenizer
from prompt_r1.distributed.ranks import pick_device
from prompt_r1.endpoint.responses import Outcome, reply_of
from prompt_r1.errors import UsageError
from prompt_r1.protocol import ENVIRONMENT_SYSTEM, UntrustedEncoder, render
from prompt_r1.types import Message

MAX_TOKENS = 1024  # of a reply, unless --env-args '{"max_tokens": N}' says otherwise
LONGEST_DIALOGUE = 8192  # tokens, if the model takes so many
MOST_SLOTS = 16


class LocalEnvironment:
    """Replies with the model's greedy or sampled text. Counts tokens as an endpoint would."""

    def __init__(
        self,
        policy: Policy,
        tokenizer: PreTrainedTokenizerBase,
        *,
        name: str,
        slots: int = MOST_SLOTS,
        capacity: int = LONGEST_DIALOGUE,
        max_tokens: int = MAX_TOKENS,
        temperature: float = 0.0,
        seed: int = 0,
        system: str = "",
    ) -> None:
        if not tokenizer.chat_template:
            raise UsageError(
                f"the environment {name}: its tokenizer has no chat template; use an instruct model"
            )
        self.name = name
        self.parameters: Mapping[str, object] = {
            "max_tokens": max_tokens, "temperature": temperature, "seed": seed, "system": system,
        }  # fmt: skip
        self._tokenizer = tokenizer
        self._takes_system = self._renders(
            [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
        )
        self._encode_untrusted = UntrustedEncoder(tokenizer)
        self._stop_ids = stop_ids(policy, tokenizer)
        self._engine = Engine(policy, stop_ids=self._stop_ids, max_tokens=capacity, max_games=slots)
        self._max_tokens, self._temperature, self._seed, self._system = max_tokens, temperature, seed, system

    async def ask(self, messages: list[Message], *, sample: int = 0, session: str = "") -> str:
        return reply_of(await self.call(messages, sample=sample), self.name)

    async def call(self, messages: list[Message], *, sample: int = 0) -> Outcome:
        """The reply; a dialogue that is too long for the model is an outcome, as with an endpoint."""
        tokens = self.render(messages)
        room = self._engine.max_tokens - len(tokens)
        if room < 1:
            reason = f"a dialogue of {len(tokens)} tokens"
            return Outcome("outcome", label="context_length", reason=reason, tokens_in=len(tokens))
        completion = await self._engine.generate(
            tokens,
            max_new=min(room, self._max_tokens),
            seed=f"{self._seed}/{sample}/{len(tokens)}/{messages[-1]['content']}",
            temperature=self._temperature,
        )
        sampled = [token for token in completion.tokens if token not in self._stop_ids]
        written = self._tokenizer.decode(sampled, skip_special_tokens=True)
        assert isinstance(written, str), "several texts from one row of tokens"
        reasoning, text = divided(written)
        return Outcome(
            "ok" if text else "outcome",
            text=text,
            label="" if text else "length" if not completion.finished else "empty",
            finish="stop" if completion.finished else "length",
            reasoning=reasoning,
            tokens_in=len(tokens),
            tokens_out=len(completion.tokens),
        )

    def render(self, messages: list[Message]) -> list[int]:
        """The dialogue in the model's chat template, up to where it begins to write."""
        if self._system and not any(message["role"] == "system" for message in messages):
            messages = [{"role": "system", "content": self._system}, *messages]
        if messages[0]["role"] == "system" and not self._takes_system:
            system, first, *others = messages
            messages = [{**first, "content": f"{system['content']}\n\n{first['content']}"}, *others]
        marks = [f"\u2402{number}\u2403" for number in range(len(messages))]
        rest = self._template([{**m, "content": mark} for m, mark in zip(messages, marks, strict=True)])
        tokens: list[int] = []
        for message, mark in zip(messages, marks, strict=True):
            frame, _, rest = rest.partition(mark)
            tokens += self._encode(frame) + self._encode_untrusted(message["content"])
        return tokens + self._encode(rest)

    async def check(self) -> None:
        pass

    async def close(self) -> None:
        pass

    def _template(self, messages: list[Message]) -> str:
        return render(self._tokenizer, messages)

    def _renders(self, messages: list[Message]) -> bool:
        try:
            text = self._template(messages)
        except TemplateError:  # Gemma, say, has no system role
            return False
        return all(message["content"] in text for message in messages)

    def _encode(self, frame: str) -> list[int]:
        return self._tokenizer(frame, add_special_tokens=False)["input_ids"] if frame else []


def divided(written: str) -> tuple[str, str]:
    """What a model thought, and what it said: thinking that was cut off is no reply."""
    thought, closed, said = written.rpartition("</think>")
    if not closed and said.lstrip().startswith("<think>"):
        thought, said = said, ""
    return thought.strip().removeprefix("<think>").strip(), said.strip()


def load_local(
    folder: Path, *, fields: Mapping[str, object], seed: int, slots: int, device: str
) -> LocalEnvironment:
    """The model in a folder. `fields`: max_tokens and temperature, as --env-args gives them. Raises
    UsageError.
    """
    unknown = sorted(set(fields) - {"max_tokens", "temperature"})
    numbers = all(isinstance(value, int | float) and value >= 0 for value in fields.values())
    if unknown or not numbers:
        raise UsageError(f"--env-args for hf:{folder} takes max_tokens and temperature, not {dict(fields)}")
    place = pick_device(device)
    compute = torch.float32 if place.type == "cpu" else torch.bfloat16
    tokenizer = load_tokenizer(folder)
    policy = load_policy(folder, device=place, compute=compute, weights=compute)
    policy.requires_grad_(False)
    longest = getattr(policy.model.config, "max_position_embeddings", None) or LONGEST_DIALOGUE
    return LocalEnvironment(
        policy,
        tokenizer,
        name=f"hf:{folder.resolve().name}",
        slots=min(slots, MOST_SLOTS),
        capacity=min(longest, LONGEST_DIALOGUE),
        max_tokens=int(fields.get("max_tokens", MAX_TOKENS)),  # type: ignore[call-overload]
        temperature=float(fields.get("temperature", 0.0)),  # type: ignore[arg-type]
        seed=seed,
        system=ENVIRONMENT_SYSTEM,
    )


def stop_ids(policy: Policy, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """What ends a reply: the tokenizer's end token and those of the model's generation config."""
    configured = getattr(policy.model.generation_config, "eos_token_id", None)
    ends = configured if isinstance(configured, list) else [configured]
    return frozenset({*ends, tokenizer.eos_token_id} - {None})
