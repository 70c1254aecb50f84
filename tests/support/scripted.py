"""A scripted model for `test_parity.py`, without imports from this project: the originals' side has none."""

import hashlib
import re


def rewrite(request: str, prompts: int) -> str:
    """A new prompt "pN" in a fence, which depends on the old prompt and the questions in the request."""
    [old] = re.findall(r"```\n(p\d+)\n```", request)
    seen = re.findall(r"question (q\d+)", request)
    number = int(hashlib.sha256(f"{old} {seen}".encode()).hexdigest(), 16) % prompts
    return f"Here it is:\n```\np{number}\n```"


def criticise(system: str, request: str) -> str:
    """What the optimiser of TextGrad replies: criticism of a reply, then of the prompt, then a new prompt."""
    if "<IMPROVED_VARIABLE>" in system + request:
        digest = hashlib.sha256("".join(sorted(re.findall(r"why \w+", request))).encode()).hexdigest()
        words = int(digest, 16) % 60 + 1
        new = " ".join(f"w{digest[:4]}x{number}" for number in range(words))
        return f"Sure: <IMPROVED_VARIABLE>{new}</IMPROVED_VARIABLE>"
    if "<LM_SYSTEM_PROMPT>" in request:
        [asked] = re.findall(r"question (q\d+)", request)
        [earlier] = re.findall(r"reply seen r\d+", request)
        return f"why {asked}, after {earlier.split()[-1]}"
    return f"reply seen {re.findall(r'r[0-9]+', request)[0]}"
