"""Serve a pair of agent and environment as one OpenAI-compatible model: `python -m prompt_r1.pair`."""

if __name__ == "__main__":  # before the imports below, which an old Python or an empty environment lacks
    from prompt_r1.programs.installation import check_installation

    check_installation()

import asyncio
import os
import signal
import socket
import sys
from importlib.util import find_spec
from ipaddress import ip_address

from prompt_r1.errors import UsageError
from prompt_r1.pair.settings import ServeConfig, check_pair
from prompt_r1.programs.command_line import run_program
from prompt_r1.programs.text import printable
from prompt_r1.settings.fields import parse_arguments

PACKAGES = ("starlette", "uvicorn")
KEY = "PROMPT_R1_API_KEY"


def main(arguments: list[str]) -> None:
    """Serve from a command line, until SIGTERM or Ctrl-C; requests that run are then answered."""
    config = parse_arguments(ServeConfig, arguments)
    if missing := [package for package in PACKAGES if find_spec(package) is None]:
        raise UsageError(f"the server needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    if config.request_usd and not config.env_price:
        raise UsageError("--request-usd needs --env-price IN,OUT: without a price, dollars are not counted")
    with _listen(config.host, config.port) as listener:  # before the agent is loaded
        _serve(config, listener)


def _listen(host: str, port: int) -> socket.socket:
    """Bind a socket. Raises UsageError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=1024)
    except (OSError, UnicodeError) as error:  # UnicodeError: a name that cannot be a host's
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot listen at {host}, port {port}: {reason}") from None


def _serve(config: ServeConfig, listener: socket.socket) -> None:
    address, port = listener.getsockname()[:2]
    local, key = ip_address(address).is_loopback, os.environ.get(KEY, "").strip()
    if not key and not local:
        raise UsageError(f"--host {config.host}: set a key in {KEY} to listen beyond this machine")
    check_pair(config)
    # Only here: torch takes seconds to import, and `--help` does without.
    import uvicorn

    from prompt_r1.pair.playing import Limits, open_pair
    from prompt_r1.pair.server import ChatServer

    pair = open_pair(config, asyncio.run)
    limits = Limits(usd=config.request_usd or None, seconds=config.request_seconds)  # the flag: 0 is no limit
    server = ChatServer(pair, config.model_name, limits, config.max_sessions, key)
    settings = uvicorn.Config(
        server.app(hosts=["127.0.0.1", "localhost"] if address == "127.0.0.1" else ["*"]),
        lifespan="off",
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=int(config.request_seconds) + 5,
    )
    # uvicorn drains, then sends itself the signal again, for the handler that was there before.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    print(printable(pair.about))
    host = f"[{address}]" if ":" in address else address
    print(f"{config.model_name} at http://{host}:{port}/v1", flush=True)
    asyncio.run(uvicorn.Server(settings).serve(sockets=[listener]))
    print(f"stopped; spent: {pair.environment.budget.spent}")


if __name__ == "__main__":
    run_program(main, sys.argv[1:])
