"""The bodies of POST /v1/chat/completions and of POST /v1/responses, as one question for the pair."""

import json
import reprlib
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, AliasPath, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from prompt_r1.playing import Limits
from prompt_r1.serving.failures import BadRequest

# Fields that would change what is answered, and why. Others that we do not know are ignored, as elsewhere.
ONLY_TOOL = "the agent's only tool is its environment"
NOT_KEPT = "the server keeps no conversations, so send the earlier messages"
TEXT_ONLY = "the pair answers with text"
UNSUPPORTED = {
    **dict.fromkeys(("tools", "functions"), ONLY_TOOL),
    **dict.fromkeys(("previous_response_id", "conversation", "background"), NOT_KEPT),
    **dict.fromkeys(("logprobs", "audio"), TEXT_ONLY),
}
IGNORED_LIMITS = {"max_tokens", "max_completion_tokens", "max_output_tokens"}  # clients send them by default
SYSTEM_ROLES = ("system", "developer")


def _as_parts(content: object) -> object:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content or []


def _as_messages(given: object) -> object:
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


def _as_list(given: object) -> object:
    return [given] if isinstance(given, str) else given


Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]
NotEmpty = Annotated[str, Field(min_length=1)]


class _Fields(BaseModel):
    model_config = ConfigDict(strict=True)


class TextPart(_Fields):
    """A part of a message."""

    type: Literal["text", "input_text", "output_text", "refusal"]
    text: str = Field(validation_alias=AliasChoices("text", "refusal"))


class SentMessage(_Fields):
    """A message of a request."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[list[TextPart], BeforeValidator(_as_parts)] = []

    @property
    def text(self) -> str:
        return "\n".join(part.text for part in self.content)


class StreamOptions(_Fields):
    """`stream_options`."""

    include_usage: bool = False  # in a last chunk


class ResponseFormat(_Fields):
    """`response_format`, or `text.format` of /v1/responses."""

    type: Literal["text", "json_schema"] = "text"
    json_schema: Annotated[
        dict[str, Any], Field(validation_alias=AliasChoices(AliasPath("json_schema", "schema"), "schema"))
    ] = {}


class AskedRequest(_Fields):
    """What a request asks for. /v1/responses has other names for `messages` and `response_format`."""

    model: str
    messages: Annotated[
        list[SentMessage],
        BeforeValidator(_as_messages),
        Field(min_length=1, validation_alias=AliasChoices("messages", "input")),
    ]
    instructions: str = ""  # of /v1/responses: a system message
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    include_reasoning: bool = False  # the dialogue of agent and environment
    response_format: Annotated[
        ResponseFormat, Field(validation_alias=AliasChoices("response_format", AliasPath("text", "format")))
    ] = ResponseFormat()
    temperature: Amount | None = None
    seed: int | str = 0
    stop: Annotated[list[NotEmpty], BeforeValidator(_as_list)] = []  # texts at which the answer is cut
    n: Literal[1] = 1
    modalities: list[Literal["text"]] = []
    max_turns: Count | None = None
    max_calls: Count | None = None
    max_usd: Amount | None = None
    max_seconds: Amount | None = None

    def lower(self, limits: Limits) -> Limits:
        """The stricter of these limits and those of the request."""

        def stricter(name: str) -> Any:
            ours, theirs = getattr(limits, name), getattr(self, f"max_{name}")
            return min((limit for limit in (ours, theirs) if limit is not None), default=None)

        return Limits(*map(stricter, ("turns", "calls", "usd", "seconds")))

    def question(self, *, system: str, history: str) -> tuple[str, str]:
        """The system messages as one text ("": none), and the question: the last of the messages.

        With `history` "join", earlier messages of user and assistant stand above the question; with "last",
        they are left out. With `system` "agent", system messages stand above the question too. Raises
        BadRequest.
        """
        *before, last = self.messages
        question = last.text.strip()
        if last.role != "user" or not question:
            raise BadRequest("the last of `messages` must be a question of the user", "messages")
        ruling = [self.instructions, *(message.text for message in before if message.role in SYSTEM_ROLES)]
        instructions = "\n".join(text for text in ruling if text.strip())
        if instructions and system == "refuse":
            raise BadRequest("system messages are refused by this server: see --system", "messages")
        earlier = [f"{sent.role}: {sent.text}" for sent in before if sent.role not in SYSTEM_ROLES]
        if earlier and history == "join":
            question = "\n".join(["Earlier messages:", *earlier, "", f"The question now: {question}"])
        if instructions and system == "agent":
            question = f"{instructions}\n\n{question}"
        return instructions, question


def read_request(content: bytes) -> AskedRequest:
    """Read the body of a request. Raises BadRequest."""
    try:
        body = json.loads(content)
        if not isinstance(body, dict):
            raise BadRequest("the body is not a JSON object")
        given = {field: value for field, value in body.items() if value is not None}
        # A client can send half a character, which has no UTF-8: a question mark takes its place.
        readable = json.dumps(given, ensure_ascii=False).encode("utf-8", "replace")
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    for field, reason in UNSUPPORTED.items():
        if given.get(field):
            raise BadRequest(f"`{field}` is not supported: {reason}", field)
    limits = {field for field in AskedRequest.model_fields if field.startswith("max_")}
    for field in sorted(given.keys() - limits - IGNORED_LIMITS):
        if field.startswith("max_"):
            known = ", ".join(sorted(limits))
            raise BadRequest(f"there is no limit {reprlib.repr(field)}: there are {known}", field[:40])
    try:
        return AskedRequest.model_validate_json(readable)
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, wrong["loc"]))[:80]
        raise BadRequest(f"`{place}`: {wrong['msg'][:200]}", place) from None
