"""The check of the environment on two ranks: the first one asks for both."""

import asyncio
import json
import os
from pathlib import Path

import httpx
import pytest
import torch
import torch.multiprocessing as mp

from prompt_r1.environments.budget import Budget, Price
from prompt_r1.environments.environment import Environment
from prompt_r1.errors import FatalEnvError
from prompt_r1.model.distributed import start_ranks, stop_ranks
from prompt_r1.training.signals import Interrupt
from prompt_r1.training.start import check_on_first_rank
from tests.support.games import CPU
from tests.support.json_server import free_ports
from tests.support.providers import HELLO, OK, Provider, endpoint, error_of

TIMEOUT = 60.0  # seconds that a rank waits for another


def no_field(name: str) -> httpx.Response:
    return httpx.Response(400, json=error_of("no", param=name, code="unsupported_parameter"))


def check_and_ask(rank: int, script: list[httpx.Response], port: int, folder: Path) -> None:
    """Check an endpoint that answers each rank with the script. Then make a call."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = start_ranks(CPU, "ddp", timeout=TIMEOUT)
    provider = Provider(*script)
    source = endpoint(provider, fields={"max_tokens": 9, "temperature": 0})
    environment = Environment([source], budget=Budget(max_usd=1.0), prices=[Price(1.0, 1.0)])
    found: dict[str, object] = {}
    try:
        with asyncio.Runner() as runner:
            check_on_first_rank(environment, ranks, runner, Interrupt())
            found["checks"] = len(provider.requests)
            runner.run(environment.ask(HELLO))
            found["sent"] = sorted(provider.requests[-1])
    except FatalEnvError as error:
        found["error"], found["requests"] = str(error), len(provider.requests)
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    stop_ranks(ranks)
    os._exit(0)


def on_two_ranks(*script: httpx.Response, folder: Path) -> list[dict[str, object]]:
    """What each of two ranks has found."""
    [port] = free_ports(1)
    mp.start_processes(check_and_ask, (list(script), port, folder), nprocs=2, start_method="fork")
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.timeout(120)
def test_the_first_rank_checks_and_another_finds_the_rejected_fields_in_its_first_call(tmp_path):
    """A defect: each rank paid for a check of its own."""
    rejections = [no_field("max_tokens"), no_field("temperature")]
    first, second = on_two_ranks(*rejections, OK, folder=tmp_path)
    assert (first.pop("checks"), second.pop("checks")) == (3, 0)
    sent = ["max_completion_tokens", "messages", "model"]
    assert first == second == {"sent": sent}


@pytest.mark.timeout(120)
def test_a_check_that_fails_ends_every_rank_with_the_same_sentence(tmp_path):
    first, second = on_two_ranks(httpx.Response(401, json=error_of("expired")), folder=tmp_path)
    assert (first.pop("requests"), second.pop("requests")) == (1, 0)
    assert first == second and "HTTP 401: expired (check OPENAI_API_KEY" in first["error"]
