"""`response_format`: one more call of the environment, which writes the answer as JSON of a schema."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jsonschema import Draft202012Validator, SchemaError
from jsonschema.exceptions import best_match
from referencing import Registry
from referencing.exceptions import Unresolvable

from prompt_r1.api.asking import Answer
from prompt_r1.environments.pool import Pool
from prompt_r1.playing import Limits
from prompt_r1.serving.failures import NO_RETRY, BadRequest, Failure
from prompt_r1.types import Message

PROMPT = """Write the answer below as JSON. Change only its form: add no facts and do not correct it.

Question: {question}
Answer: {answer}

Reply with nothing but JSON that is valid under this JSON schema:
{schema}"""


def check_schema(schema: Mapping[str, Any]) -> None:
    """Raise BadRequest if it is not a JSON schema."""
    try:
        Draft202012Validator.check_schema(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
    except (SchemaError, RecursionError) as error:
        message = f"`response_format` has no valid JSON schema: {str(error).splitlines()[0][:200]}"
        raise BadRequest(message, "response_format") from None


async def as_json(answer: Answer, schema: Mapping[str, Any], environment: Pool, limits: Limits) -> Answer:
    """The answer as JSON of the schema, with the cost of the call.

    Raises LimitReached, what `Pool.call` raises, and Failure if the reply does not match the schema.
    """
    prompt = PROMPT.format(question=answer.question, answer=answer.text, schema=json.dumps(schema))
    messages: list[Message] = [{"role": "user", "content": prompt}]
    limits.check_usd(answer.usd, environment.most_usd(messages))
    async with limits.timed(answer.seconds):
        reply = await environment.call(messages, session=answer.question)
    return replace(
        answer,
        text=_matching(reply.text, schema),
        calls=answer.calls + reply.spent.calls,
        tokens_in=answer.tokens_in + reply.spent.tokens_in,
        tokens_out=answer.tokens_out + reply.spent.tokens_out,
        usd=answer.usd + reply.spent.usd,
    )


def _matching(reply: str, schema: Mapping[str, Any]) -> str:
    """The JSON in a reply. Raises Failure if it does not match the schema."""
    text = reply.strip()
    if text.startswith("```"):  # a block of Markdown, which models like to write
        text = text.partition("\n")[2].removesuffix("```")
    try:
        value = json.loads(text)
        # Without a registry of its own, the validator would fetch what a schema refers to.
        wrong = best_match(Draft202012Validator(schema, registry=Registry()).iter_errors(value))
        why = f"at {wrong.json_path}, {wrong.message[:200]}" if wrong else ""
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        why = f"it is not JSON: {error}"
    except (Unresolvable, RecursionError) as error:
        raise BadRequest(f"the JSON schema cannot be applied: {error}"[:200], "response_format") from None
    if why:
        message = f"the environment's reply does not match the JSON schema: {why}"
        raise Failure(502, "schema_mismatch", message, headers=NO_RETRY)
    return text
