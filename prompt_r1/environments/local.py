"""A Hugging Face model as an environment: `--env hf:DIR`.

It generates with our own engine and shares the event loop with the agent's: they take turns, one forward pass
at a time. The texts of the dialogue are encoded separately from the chat template, so that no prompt of the
agent can become a control token.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from prompt_r1.agent.engine import Engine
from prompt_r1.agent.gguf import gguf_file, gguf_folder
from prompt_r1.agent.loading import check_vocabulary, load_policy, load_tokenizer, longest_game
from prompt_r1.agent.policy import Policy
from prompt_r1.chat_template import PieceEncoder, opened_think, render
from prompt_r1.config.agent import SMOLLM2
from prompt_r1.environments.sources import Call, Outcome, Source
from prompt_r1.errors import UsageError
from prompt_r1.types import Message

MAX_TOKENS = 1024  # of a reply; --env-args '{"max_tokens": N}' changes it
LONGEST_DIALOGUE = 8192  # tokens; less if the model supports less
MOST_SLOTS = 16


@dataclass(frozen=True)
class ReplySettings:
    """What shapes the replies of a local model."""

    max_tokens: int = MAX_TOKENS
    temperature: float = 0.0
    seed: int = 0
    system: str = ""


class LocalEnvironment(Source):
    """Replies with greedy or sampled text of the model, and counts tokens as an endpoint does."""

    def __init__(
        self,
        policy: Policy,
        tokenizer: PreTrainedTokenizerBase,
        *,
        name: str,
        folder: str = "",
        slots: int = MOST_SLOTS,
        capacity: int = LONGEST_DIALOGUE,
        settings: ReplySettings | None = None,
    ) -> None:
        if not tokenizer.chat_template:
            raise UsageError(
                f"the environment {name}: its tokenizer has no chat template; use an instruct model"
            )
        self.name = name
        self._settings = settings or ReplySettings()
        self.parameters: Mapping[str, object] = {"folder": folder, **asdict(self._settings)}
        self.samples = self._settings.temperature > 0
        self._tokenizer = tokenizer
        system: list[Message] = [{"role": "system", "content": "\u2402"}, {"role": "user", "content": "b"}]
        try:
            self._accepts_system = "\u2402" in render(tokenizer, system)
        except UsageError:  # Gemma's template, for example, has no system role
            self._accepts_system = False
        self._opened = opened_think(render(tokenizer, [{"role": "user", "content": "b"}]))
        self._encoder = PieceEncoder(tokenizer)
        self._stop_ids = policy.end_ids | ({tokenizer.eos_token_id} - {None})
        self._engine = Engine(policy, stop_ids=self._stop_ids, max_tokens=capacity, max_games=slots)

    async def reply(self, call: Call) -> Outcome:
        """Generate the reply. A dialogue that is too long for the model is an "outcome" without text."""
        await call.begin()
        tokens = self.encode(call.messages)
        room = self._engine.max_tokens - len(tokens)
        if room < 1:
            reason = f"a dialogue of {len(tokens)} tokens"
            return Outcome("outcome", label="context_length", reason=reason, tokens_in=len(tokens))
        completion = await self._engine.generate(
            tokens,
            max_new=min(room, self._settings.max_tokens),
            seed=f"{self._settings.seed}/{call.sample}/{len(tokens)}/{call.messages[-1]['content']}",
            temperature=self._settings.temperature,
        )
        sampled = [token for token in completion.tokens if token not in self._stop_ids]
        written = self._tokenizer.decode(sampled, skip_special_tokens=True)
        assert isinstance(written, str), "several texts from one row of tokens"
        return Outcome(
            "ok",
            text=(self._opened + written).strip(),
            finish="stop" if completion.finished else "length",
            tokens_in=len(tokens),
            tokens_out=len(completion.tokens),
        )

    def encode(self, messages: list[Message]) -> list[int]:
        """The tokens of the dialogue in the model's chat template, up to the start of its reply."""
        if self._settings.system and not any(message["role"] == "system" for message in messages):
            messages = [{"role": "system", "content": self._settings.system}, *messages]
        if messages[0]["role"] == "system" and not self._accepts_system:
            system, first, *others = messages
            messages = [{**first, "content": f"{system['content']}\n\n{first['content']}"}, *others]
        # Render the template with placeholders, and encode each text separately where its placeholder is:
        # some templates write the system message before the last message of the user.
        marked: list[Message] = [
            {**message, "content": f"\u2402{number}\u2403"} for number, message in enumerate(messages)
        ]
        opening, *pieces = re.split("\u2402(\\d+)\u2403", render(self._tokenizer, marked))
        tokens = self._encoder.start(opening)
        for number, frame in zip(pieces[::2], pieces[1::2], strict=True):
            tokens += self._encoder.untrusted(messages[int(number)]["content"])
            tokens += self._encoder.trusted(frame)
        return tokens


def load_local(
    name: str, *, fields: Mapping[str, object], system: str, seed: int, slots: int, device: torch.device
) -> LocalEnvironment:
    """Load the model of hf:DIR, hf:FILE.gguf or smollm2.

    `fields`: max_tokens and temperature of --env-args. Raises UsageError.
    """
    given = name.removeprefix("hf:")
    file = gguf_file(given)
    folder = gguf_folder(file) if file else Path(given)
    short = name if name == SMOLLM2 else f"hf:{folder.resolve().name}"
    sent: dict[str, float] = {"max_tokens": MAX_TOKENS, "temperature": 0.0}
    for field, value in fields.items():
        if field not in sent or not isinstance(value, int | float) or value < 0:
            raise UsageError(f"--env-args for {name} takes max_tokens and temperature, not {dict(fields)}")
        sent[field] = value
    compute = torch.float32 if device.type == "cpu" else torch.bfloat16
    tokenizer = load_tokenizer(folder)
    policy = load_policy(folder, device=device, compute=compute, weights=compute)
    check_vocabulary(policy, tokenizer)
    model = policy.model.config
    longest = longest_game(model) or getattr(model, "max_position_embeddings", None) or LONGEST_DIALOGUE
    return LocalEnvironment(
        policy,
        tokenizer,
        name=short,
        folder=str(folder.resolve()),
        slots=min(slots, MOST_SLOTS),
        capacity=min(longest, LONGEST_DIALOGUE),
        settings=ReplySettings(int(sent["max_tokens"]), sent["temperature"], seed, system),
    )
