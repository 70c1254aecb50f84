"""The check at the start of a run: one request to each server, before a large model is loaded."""

import asyncio
import logging

from prompt_r1.environments.budget import Bill, OutOfBudget
from prompt_r1.environments.environment import NO_GAME, Call, Client, Environment
from prompt_r1.environments.sources import Busy, NoServer, NoText, Refused
from prompt_r1.errors import FatalEnvError, UsageError
from prompt_r1.types import Message

logger = logging.getLogger(__name__)

CHECK_SECONDS = 5.0  # The check waits this long for a reply.


async def check_servers(environment: Environment) -> None:
    """Find a wrong URL, key, model or setting within a few seconds. A slow or busy server passes.

    Raises UsageError if no call can succeed.
    """
    for client in environment.clients:
        if client.source.needs_check:
            try:
                await _check(environment, client)
            finally:
                # A server may close an idle connection while the model is loaded.
                await client.source.close()
            client.counts.clear()  # The metrics count the calls of games.


async def _check(environment: Environment, client: Client) -> None:
    """Send a request, and charge it. Every start sends it anew, because a key may have expired."""
    source = client.source
    call = Call(client, [Message(role="user", content="Hi")], NO_GAME, Bill())
    try:
        async with asyncio.timeout(CHECK_SECONDS) as limit:
            reply = await environment.request(call)
    except OutOfBudget:
        return  # A run that plays from its journal may need no more calls.
    except TimeoutError:
        # The journal may be on a network disk that does not answer, which is a TimeoutError, too.
        if not limit.expired():
            raise
        logger.warning("%s takes over %g s to reply", source, CHECK_SECONDS)
        return
    except (NoText, NoServer) as problem:
        raise FatalEnvError(f"{source} cannot be used: {problem.reason}") from None
    except Busy as busy:
        logger.warning("%s is busy: %s", source, busy.reason)
        return
    except Refused as refused:
        advice = ""
        if refused.status in (400, 422) and source.parameters.get("system"):
            advice = ' (if the model takes no system message, give --env-system "")'
        raise FatalEnvError(f"{source} cannot be used: {refused.reason}{advice}") from None
    if not reply.text.strip():
        said = reply.reason or reply.label
        raise UsageError(
            f'{source} replied to "Hi" without any text ({said}): check max_tokens and the other fields of '
            "--env-args, or choose another model"
        )
