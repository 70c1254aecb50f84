"""`prompt-r1 doctor`: what it prints, and that no key is in it."""

import os
import platform
import shutil
from types import SimpleNamespace

import pytest
import torch

from prompt_r1 import __version__
from prompt_r1.cli.command_line import train_config
from prompt_r1.doctor import KEYS, OPTIONAL, REQUIRED, access, hardware, main, needs, qwen3_4b, software
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


def test_every_package_is_listed_once_with_its_version():
    rows = list(software())
    listed = ", ".join(text for label, text in rows[2:4]).split(", ")
    assert [text.split()[0] for text in listed] == list(REQUIRED) and "MISSING" not in str(listed)
    assert [label for label, _ in rows] == ["prompt-r1", "Python", "packages", "", "optional", *[""] * 5]
    assert [text.split()[0] for _, text in rows[4:]] == list(OPTIONAL)
    assert rows[1][1] == f"{platform.python_version()} on {platform.platform()}"


def test_memory_and_disk_are_in_decimal_gigabytes():
    rows = dict(hardware())
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert rows["memory"] == f"{memory / 1e9:.1f} GB"
    assert abs(float(rows["disk"].split()[0]) - shutil.disk_usage(".").free / 1e9) < 5
    assert rows["CPU"] == f"{os.cpu_count()} cores; threads of torch: {torch.get_num_threads()}"


def test_a_gpu_is_listed_with_its_memory_and_its_absence_with_the_reason(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    device = SimpleNamespace(name="H200", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: device)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: ((40 + index) * 10**9, 150 * 10**9))
    gpus = [row for row in hardware() if row[0].startswith("GPU")]
    text = "H200, 150.0 GB, {} GB free, compute capability 9.0"
    assert gpus == [("GPU 0", text.format("40.0")), ("GPU 1", text.format("41.0"))]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for version, build in (("12.8", "the build for CUDA 12.8"), (None, "a build without CUDA")):
        monkeypatch.setattr(torch.version, "cuda", version)
        assert list(hardware())[-1] == ("GPU", f"none that torch can use (torch is {build})")


def test_a_key_counts_as_set_if_it_is_more_than_blanks(monkeypatch):
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    for name in KEYS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OPENAI_API_KEY", " ")
    monkeypatch.setenv("HF_TOKEN", KEY)
    rows = list(access())
    assert rows[0] == ("endpoint", "https://api.openai.com/v1 (default)")
    assert [label for label, _ in rows[1:]] == ["keys", "", "", "", ""]
    assert [text.rsplit(" (")[0] for _, text in rows[1:]] == [
        f"{name} {'set' if name == 'HF_TOKEN' else 'not set'}" for name in KEYS
    ]


def test_a_machine_without_a_gpu_is_pointed_to_the_mini_agent(monkeypatch):
    hint = "There is no GPU here: train the mini agent"
    mini, paper = (train_config(["--config", name, "--data", "mini"])[0] for name in ("mini", "paper"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert hint in needs(paper) and hint not in needs(mini)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert hint not in needs(paper)


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
