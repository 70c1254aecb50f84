"""A complete evaluation of the published files, killed half-way: `python -m pytest -m slow`.

The environment is a scripted endpoint that knows the answers to 60 % of the questions. The expected numbers
are computed from the files and from what the endpoint knows, without the project's own scoring.
"""

import asyncio
import hashlib
import json
import math
import re
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.support.mini_server import FaultyServer
from tests.support.paths import PUBLISHED
from tests.support.programs import command
from tests.support.providers import body_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PUBLISHED.exists(), reason="the published files are not here"),
]
REQUEST = re.compile(r"\nWrite the final answer, .*", re.DOTALL)
USAGE = {"prompt_tokens": 9, "completion_tokens": 9}
UNKNOWN = "qqxzy vvwzz"  # in no gold answer


def known(question: str) -> bool:
    """Whether the endpoint knows the answer. A text that occurs twice has two answers, so it does not."""
    if question in DUPLICATES:
        return False
    return hashlib.md5(question.encode()).digest()[0] < 0.6 * 256


def published(path: Path) -> list[tuple[str, list[str]]]:
    """The questions and gold answers in a file."""
    rows = pq.read_table(path).to_pylist()
    texts = [row["prompt"][0]["content"].removeprefix("Question: ") for row in rows]
    cuts = [text.rfind("\nFirst, provide a simple explanation of the question") for text in texts]
    golds = [row["reward_model"]["ground_truth"] for row in rows]
    return [(text[:cut], gold) for text, cut, gold in zip(texts, cuts, golds, strict=True)]


FILES = sorted(PUBLISHED.glob("*.parquet"))
COUNTS = Counter(text for path in FILES for text, _ in published(path))
DUPLICATES = {text for text, count in COUNTS.items() if count > 1}


class KnowingServer(FaultyServer):
    """Answers the questions that it knows with the first gold answer; hangs after `last` replies."""

    def __init__(self, *, last: int = 10**9) -> None:
        super().__init__()
        self.models = {
            "gpt-4o-mini": self.models["mini"]
        }  # the paper's numbers are shown beside this model's
        rows = [row for path in FILES for row in published(path)]
        self.replies = {text: golds[0] if known(text) else UNKNOWN for text, golds in rows}
        self.last, self.reached, self.released = last, asyncio.Event(), asyncio.Event()
        self.asked: Counter[str] = Counter()

    async def complete(self, body: bytes) -> tuple[int, dict[str, object]]:
        question = REQUEST.sub("", json.loads(body)["messages"][-1]["content"])
        if question == "Hi":  # Every start checks the endpoint, also if an earlier check is in the journal.
            return 200, body_of("Hello") | {"usage": USAGE}
        if self.asked.total() >= self.last:
            self.reached.set()
            await self.released.wait()
            return 500, {}  # the client has been killed
        self.asked[question] += 1
        return 200, body_of(f"I think it is <answer>{self.replies[question]}</answer>") | {"usage": USAGE}


async def evaluate(server: KnowingServer, folder: Path) -> asyncio.subprocess.Process:
    """Start evaluate.py on all files, in a process of its own."""
    line = command("evaluate.py", "--data", *FILES, "--method", "direct", "--tables", "--out", folder)
    line += ["--env", f"gpt-4o-mini@{server.base_url}"]
    return await asyncio.create_subprocess_exec(*line, stdout=asyncio.subprocess.DEVNULL)


def score(text: str, golds: list[str]) -> float:
    """1 for a gold answer, also for one of which normalisation leaves nothing, such as "A"."""
    return float(text in golds and bool(text.strip()))


def expected() -> dict[str, tuple[float, float, float, int]]:
    """For each file: the rate and the ends of Wilson's interval in percent, and n."""
    numbers = {}
    for path in FILES:
        rows = published(path)
        correct = sum(score(golds[0], golds) for text, golds in rows if known(text))
        n, z = len(rows), 1.959964
        p = correct / n
        centre, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        low, high = ((centre + sign * half) / (1 + z * z / n) for sign in (-1, 1))
        numbers[path.stem] = (100 * p, 100 * low, 100 * high, n)
    return numbers


NAMES = {
    "2WikiMultihopQA": "2WikiMultihopQA", "hotpot": "HotpotQA", "gsm8k": "GSM8K", "DAPO-Math": "DAPO-Math",
    "MusiQue": "MuSiQue", "PopQA": "PopQA", "BookSum": "BookSum", "WritingPrompts": "WritingPrompts",
    "MathQA_ood": "MathQA", "squad_v2_ood": "SQuAD v2", "triviaqa_ood": "TriviaQA", "Xsum_ood": "XSum",
}  # fmt: skip


async def run(server: KnowingServer, folder: Path, *, killed: bool) -> None:
    """A whole evaluation, or one that is killed when the server hangs, and then repeated."""
    await server.start()
    try:
        if killed:
            process = await evaluate(server, folder)
            await server.reached.wait()
            # The last replies are still on their way. The journal also has the reply to the check, "Hello".
            while (folder / "journal/rank0.jsonl").read_text().count("I think it is") < 700:
                await asyncio.sleep(0.1)
            process.kill()
            await process.wait()
            server.last = 10**9
            server.released.set()
        assert await (await evaluate(server, folder)).wait() == 0
    finally:
        await server.stop()


def test_a_killed_evaluation_continues_and_gives_independently_computed_numbers(tmp_path):
    assert sum(len(published(path)) for path in FILES) == 1536
    undisturbed, interrupted = KnowingServer(), KnowingServer(last=700)
    asyncio.run(run(undisturbed, tmp_path / "whole", killed=False))
    asyncio.run(run(interrupted, tmp_path / "parts", killed=True))
    # The endpoint samples, so a question that occurs twice gets two replies. None is paid for twice.
    assert interrupted.asked == undisturbed.asked == COUNTS
    texts = [(tmp_path / folder / "tables.md").read_text() for folder in ("whole", "parts")]
    texts = [re.sub(r"127.0.0.1.\d+", "here", text) for text in texts]  # the servers' ports differ
    assert texts[0] == texts[1] and len(texts[0]) > 500

    lines = (tmp_path / "whole/tables.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    for stem, (rate, low, high, n) in expected().items():
        label = [f"{NAMES[stem]} (n = {n})", "F1" if is_text(stem) else "EM"]
        [found] = [numbers_of(row[2]) for row in rows if row[:2] == label]
        assert found == pytest.approx([rate, low, high], abs=0.051), stem
    averages = [number for number, row in enumerate(rows) if re.match(r"Average.*\|EM", "|".join(row))]
    average = averages[0]  # of Table 2; the other is of Table 3
    trained = [stem for stem in NAMES if not stem.endswith("_ood") and not is_text(stem)]
    mean = sum(expected()[stem][0] for stem in trained) / len(trained)
    assert numbers_of(rows[average][2])[0] == pytest.approx(mean, abs=0.051)
    assert rows[average + 1][:3] == ["", "EM, paper", "34.89"]


def numbers_of(cell: str) -> list[float]:
    """The rate and its interval in a cell of a table."""
    return [float(number) for number in re.findall(r"\d+\.\d+", cell)]


def is_text(stem: str) -> bool:
    return stem in ("BookSum", "WritingPrompts", "Xsum_ood")
