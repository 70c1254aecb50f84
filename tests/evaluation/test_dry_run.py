"""What --dry-run estimates, beside what a server counts in the same training and the same evaluation."""

import asyncio
import json
import random
import re

import pytest

from prompt_r1.evaluation.dry_run import estimate
from prompt_r1.evaluation.preflight import read_evaluation
from tests.support.mini_server import FaultyServer, with_server
from tests.support.paths import ROOT
from tests.support.shell import runner_in

PRICE_IN, PRICE_OUT = 0.15, 0.60
QUESTIONS = "--data mini:validation --val-data mini:bridge"
CALLS = "--env-price 0.15,0.60 --env-args '{\"max_tokens\": 300}' --device cpu"


class CountingServer(FaultyServer):
    """Replies with 100 to 400 tokens, cut at max_tokens, and counts what a provider would bill.

    Each reply has a new prompt in the form of each search, so that searches make all calls of their limit.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lengths = random.Random(0)

    async def complete(self, body: bytes) -> tuple[int, object]:
        request = json.loads(body)
        sent = sum(4 + len(message["content"]) // 4 for message in request["messages"])
        length = min(self.lengths.randint(100, 400), request.get("max_tokens", 400))
        new = f"Rule {self.counts['replies']}"
        text = (
            f"{'word ' * length}<INS>{new}</INS><IMPROVED_VARIABLE>{new}</IMPROVED_VARIABLE>\n```\n{new}\n```"
        )
        choice = {"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        return 200, {"choices": [choice], "usage": {"prompt_tokens": sent, "completion_tokens": length}}

    @property
    def counted(self) -> dict[str, float]:
        tokens_in, tokens_out = self.counts["prompt_tokens"], self.counts["completion_tokens"]
        usd = (tokens_in * PRICE_IN + tokens_out * PRICE_OUT) / 1e6
        return {"calls": self.counts["replies"], "in": tokens_in, "out": tokens_out, "usd": usd}


def estimated(text: str) -> dict[str, dict[str, float]]:
    """The rows likely and high of all parts together."""
    rows = re.findall(r"^  (likely|high) +(.*)$", text.split("together")[1], re.MULTILINE)
    found = {}
    for name, numbers in rows:
        values = [float(number) for number in numbers.replace(",", "").split()]
        found[name] = dict(zip(("calls", "in", "out", "usd"), values, strict=True))
    return found


def compare(tmp_path, command: str) -> None:
    """Estimate a command, run it, and compare the estimate with the server's count."""
    server = CountingServer()
    for name in ("train.py", "evaluate.py", "prompt_r1"):
        (tmp_path / name).symlink_to(ROOT / name)

    def both() -> str:
        run = runner_in(tmp_path, HF_HUB_OFFLINE="1")
        line = f"{command} --env large@{server.base_url} {CALLS}"
        estimate = run(f"{line} --dry-run").stdout
        assert not server.counts, "an estimate makes no call"
        run(line)
        return estimate

    text = with_server(asyncio.to_thread(both), server)
    print(f"{command}\n{text}\ncounted by the server: {server.counted}")
    cases = estimated(text)
    for name, count in server.counted.items():
        slack = 0.005 if name == "usd" else 0  # Dollars are printed with two digits.
        assert count <= cases["high"][name] + slack, name
        assert 0.5 * count - slack <= cases["likely"][name] <= 2 * count + slack, name


@pytest.mark.slow
def test_the_estimate_of_a_training_holds_what_a_server_counts(tmp_path):
    """With max_tokens, high is an upper bound; the likely value is within a factor of two.

    The mini agent asks in nearly every game, once or twice.
    """
    sizes = "--questions 8 --group-size 4 --mini-batch 16 --steps 3 --val-limit 40 --save-every 2 --lr 1e-4"
    game = "--max-tokens 900 --max-turns 3 --max-reply-tokens 64 --test-data mini:pop"
    compare(tmp_path, f"python train.py {QUESTIONS} {sizes} {game} --out run")


@pytest.mark.slow
def test_the_estimate_of_an_evaluation_holds_what_a_server_counts(tmp_path):
    methods = "--method direct cot opro textgrad gepa --optimize-calls 400 --optimize-examples 12"
    train = "--train-data mini:validation --limit 60 --env-concurrency 16"
    compare(tmp_path, f"python evaluate.py {methods} {QUESTIONS} {train} --out results")


@pytest.mark.parametrize("names", ["cheap,dear", "dear,cheap"])
def test_every_optimizer_counts_in_the_estimate_of_a_search(names):
    """A bug: of several names in --optimizer-env only the first one's price counted, so high was too low.

    The searches of these names ask the same environment, which is free. Only the optimisers cost something.
    """

    def dollars(optimizer: str, prices: str) -> dict[str, float]:
        search = "--dry-run --method opro --data mini:pop --limit 5 --env free --optimize-calls 400000"
        line = f"{search} --env-price 0,0 {prices} --optimizer-env {optimizer}"
        rows = estimated(estimate(read_evaluation(line.split())))
        return {name: row["usd"] for name, row in rows.items()}

    cheap, dear = dollars("cheap", "1,1"), dollars("dear", "3,9")
    both = dollars(names, "1,1 3,9" if names == "cheap,dear" else "3,9 1,1")
    assert both["high"] == dear["high"] > cheap["high"]
    assert both["likely"] == pytest.approx((cheap["likely"] + dear["likely"]) / 2, abs=0.01)
