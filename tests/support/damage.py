"""Damage a file, give it values that an attacker would, or run out of memory."""

import json
import random
from pathlib import Path

import torch
import yaml

WRONG = [None, True, -1, 2.5, 10**400, "", "x" * 100_000, "\ud800\x1b[2J", [], [[]], {}, {"a": None}]
WRONG += [float("nan"), float("inf")]


class Attack:
    """Writes a file when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self):
        return Path.write_text, (self.target, "executed")


def flip_a_bit(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes() or b"\0")
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def cut_off(path: Path, rng: random.Random) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: rng.randrange(len(content) + 1)])


def overwrite_with_noise(path: Path, rng: random.Random) -> None:
    path.write_bytes(rng.randbytes(rng.choice([0, 1, 1000])))


def nest_deeply(path: Path, rng: random.Random) -> None:
    # PyYAML takes seconds if they are in one line.
    path.write_text(("[\n" if path.suffix == ".yaml" else "[") * 100_000)


def replace_a_value(path: Path, rng: random.Random) -> None:
    """Give a value in a JSON, YAML or JSON lines file another type. Other files become noise."""
    text = path.read_bytes().decode("utf-8", "replace")
    try:
        if path.suffix == ".jsonl":
            lines = text.splitlines()
            number = rng.randrange(len(lines))
            lines[number] = json.dumps(_with_wrong_value(json.loads(lines[number]), rng))
            path.write_text("\n".join(lines) + "\n")
        elif path.suffix == ".yaml":
            path.write_text(yaml.safe_dump(_with_wrong_value(yaml.safe_load(text), rng)))
        else:
            path.write_text(json.dumps(_with_wrong_value(json.loads(text), rng)))
    except (ValueError, yaml.YAMLError):
        overwrite_with_noise(path, rng)


def _with_wrong_value(value: object, rng: random.Random) -> object:
    """Replace the value, or a random value somewhere inside it, by a wrong value, or remove it."""
    places: list = []
    if isinstance(value, dict):
        places = list(value)
    elif isinstance(value, list):
        places = list(range(len(value)))
    if not places or rng.random() < 0.1:
        return rng.choice(WRONG)
    place = rng.choice(places)
    if rng.random() < 0.2:
        del value[place]
    else:
        value[place] = _with_wrong_value(value[place], rng)
    return value


def put_a_folder_there(path: Path, rng: random.Random) -> None:
    path.unlink()
    path.mkdir()


RANDOM = (flip_a_bit, cut_off, overwrite_with_noise, replace_a_value)
FIXED = (nest_deeply, put_a_folder_there)


def out_of_memory(*_: object, **__: object) -> None:
    """Fail as torch does on a CPU whose memory runs out."""
    torch.empty(1 << 60)
