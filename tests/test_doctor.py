"""`prompt-r1 doctor`: what it prints, and that no key is in it."""

import pytest
import torch

from prompt_r1 import __version__
from prompt_r1.doctor import main, qwen3_4b
from prompt_r1.errors import FatalEnvError, UsageError
from prompt_r1.training.memory_estimate import shape_of
from tests import tiny
from tests.providers import KEY


def test_the_report_names_versions_hardware_and_which_keys_are_set_but_no_key(monkeypatch, capsys):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("OPENAI_BASE_URL", f"http://me:{KEY}@127.0.0.1:9/v1?key={KEY}")
    monkeypatch.delenv("AGENT_API_KEY", raising=False)
    main([])
    printed = capsys.readouterr().out
    assert KEY not in printed
    lines = {line[:14].strip(): line[14:] for line in printed.splitlines() if line[:14].strip()}
    assert lines["prompt-r1"] == __version__ and f"torch {torch.__version__}" in lines["packages"]
    assert lines["endpoint"] == "http://127.0.0.1:9/v1 (OPENAI_BASE_URL)"
    assert "OPENAI_API_KEY set (environments)" in printed and "AGENT_API_KEY not set" in printed
    assert " GB" in lines["memory"] and " GB free" in lines["disk"]


def test_the_memory_of_the_paper_preset_is_estimated_without_network(capsys):
    assert shape_of(qwen3_4b()) == shape_of(tiny.qwen3_4b_config())
    main([])
    printed = capsys.readouterr().out
    assert "Memory to train Qwen/Qwen3-4B, --config paper; calculated, not measured:" in printed
    table = printed.split("not measured:")[1]
    assert "GB of each GPU, sharded over" in table and "AdamW's moments" in table


def test_an_environment_is_checked_on_request(capsys, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    main(["--config", "mini", "--env", "mini"])
    printed = capsys.readouterr().out
    assert "environment   mini can be called" in printed and "the mini agent fits everywhere" in printed
    with pytest.raises((UsageError, FatalEnvError), match="needs a key: set OPENAI_API_KEY"):
        main(["--config", "mini", "--env", "gpt-4o-mini"])
