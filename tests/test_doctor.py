"""`prompt-r1 doctor`: the rows of its table."""

import os
import platform
from importlib import metadata

import torch
import transformers

from prompt_r1 import __version__
from prompt_r1.doctor import main, rows
from tests.providers import KEY


def test_the_table_names_versions_and_memory_but_no_key(monkeypatch, capsys):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    main([])
    printed = capsys.readouterr().out
    assert KEY not in printed
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for name, value in {
        "prompt-r1": __version__,
        "Python": f"{platform.python_version()} on {platform.platform()}",
        "torch": metadata.version("torch"),
        "transformers": transformers.__version__,
        "CPU": f"{os.cpu_count()} cores",
        "memory": f"{memory / 1e9:.1f} GB",
    }.items():
        assert f"| {name} | {value} |" in printed


def test_a_gpu_is_listed_with_its_memory_and_its_absence_with_the_build(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "H200")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: ((40 + index) * 10**9, 150 * 10**9))
    text = "H200, 150.0 GB, {} GB free"
    assert list(rows())[-2:] == [("GPU 0", text.format("40.0")), ("GPU 1", text.format("41.0"))]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for version, build in (("12.8", "12.8"), (None, "no")):
        monkeypatch.setattr(torch.version, "cuda", version)
        assert list(rows())[-1] == ("GPU", f"none that torch can use (built for CUDA: {build})")
