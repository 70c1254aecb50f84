"""Model folders whose tokenizer or chat template is missing or broken are refused with the true cause."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from prompt_r1.agent.agent import load_codec
from prompt_r1.config.train import PRESETS, TrainConfig
from prompt_r1.errors import UsageError
from tests.support import tiny

CONFIG = TrainConfig(**PRESETS["mini"])


def remove(folder: Path, *patterns: str) -> None:
    for pattern in patterns:
        for path in folder.glob(pattern):
            path.unlink()


def sentencepiece_only(folder: Path) -> None:
    remove(folder, "tokenizer*")
    (folder / "tokenizer.model").write_bytes(b"\n\1")
    settings = {"tokenizer_class": "LlamaTokenizer", "chat_template": tiny.QWEN3_LIKE_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def foreign_code(folder: Path) -> None:
    (folder / "mine.py").write_text(f"open({str(folder / 'executed')!r}, 'w')\nclass Mine: pass\n")
    settings = {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Mine", None]}}
    for name in ("config.json", "tokenizer_config.json"):
        (folder / name).write_text(json.dumps({"model_type": "mine", **settings}))


def cut(folder: Path) -> None:
    file = folder / "tokenizer.json"
    file.write_text(file.read_text()[:500])


def template(text: bytes) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "chat_template.jinja").write_bytes(text)

    return write


DAMAGES = [
    (lambda folder: remove(folder, "tokenizer*", "chat_template*"), "there is no tokenizer.json"),
    (sentencepiece_only, "there is no tokenizer.json .sentencepiece reads a tokenizer.model"),
    (cut, "no tokenizer at .*Unterminated string"),
    (lambda folder: (folder / "tokenizer_config.json").write_text("[]"), "no tokenizer at"),
    (foreign_code, "no tokenizer at .*custom code"),
    (template(b""), "has no chat template: give it one"),
    (template(b"\xff\xfe"), "no tokenizer at .*utf-8"),
]


@pytest.mark.parametrize(("damage", "sentence"), DAMAGES)
def test_a_tokenizer_that_cannot_be_used_is_refused_in_one_sentence(damage, sentence, tmp_path):
    """A bug: these came as tracebacks with exit code 1."""
    tiny.tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    load_codec(tmp_path, CONFIG)
    damage(tmp_path)
    with pytest.raises(UsageError, match=sentence) as error:
        load_codec(tmp_path, CONFIG)
    assert "\n" not in str(error.value) and not (tmp_path / "executed").exists()
