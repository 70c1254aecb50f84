"""Serve an agent and its environment as one OpenAI-compatible model: `python -m prompt_r1.pair`."""

if __name__ == "__main__":  # Check before the imports below, which fail where a package is missing.
    from prompt_r1.programs.installation import check_installation

    check_installation()

import asyncio
import logging
import os
import socket
import sys
from importlib.util import find_spec
from ipaddress import ip_address

from prompt_r1.errors import UsageError
from prompt_r1.pair.settings import ChosenPair, ServeConfig, read_pair
from prompt_r1.programs.command_line import run_program
from prompt_r1.programs.text import printable

PACKAGES = ("starlette", "uvicorn")
KEY = "PROMPT_R1_API_KEY"


def main(arguments: list[str]) -> None:
    """Serve until SIGTERM or Ctrl-C. The requests that run at that time are still answered."""
    chosen = read_pair(ServeConfig, arguments)
    config = chosen.config
    if config.request_usd:
        chosen.environment.check_usd_limit("--request-usd")
    missing = [package for package in PACKAGES if find_spec(package) is None]
    if missing:
        raise UsageError(f"the server needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    # A port in use is reported before the agent is loaded.
    with _listen(config.host, config.port) as listener:
        asyncio.run(_serve(chosen, listener))


def _listen(host: str, port: int) -> socket.socket:
    """Bind a socket."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        raise UsageError(f"cannot listen at {host}, port {port}: {error.strerror}") from None


async def _serve(chosen: ChosenPair[ServeConfig], listener: socket.socket) -> None:
    """Open the pair and answer requests at the socket. Raises UsageError."""
    config = chosen.config
    address, port = listener.getsockname()[:2]
    host = f"[{address}]" if ":" in address else address
    is_local = ip_address(address).is_loopback
    key = os.environ.get(KEY, "").strip()
    if not key and not is_local:
        raise UsageError(f"--host {config.host}: set a key in {KEY} to listen beyond this machine")
    # These import torch, which `--help` does not need.
    from prompt_r1.pair.api import Limits, open_pair
    from prompt_r1.pair.server import ChatServer, uvicorn_server

    pair = await open_pair(chosen)
    chat = ChatServer(
        pair=pair,
        model_name=config.model_name,
        limits=Limits(usd=config.request_usd or None, seconds=config.request_seconds),
        key=key,
        hosts=["localhost", host] if is_local else ["*"],
    )
    logging.basicConfig(format="%(asctime)s %(message)s")
    logging.getLogger("prompt_r1.pair.server").setLevel(logging.INFO)
    print(printable(pair.about))
    print(f"{config.model_name} at http://{host}:{port}/v1")
    print(f"a page to chat with at http://{host}:{port}", flush=True)
    await uvicorn_server(chat).serve(sockets=[listener])


if __name__ == "__main__":
    run_program(main, sys.argv[1:])
