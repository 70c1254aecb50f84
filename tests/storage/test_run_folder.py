"""Which folder a run writes to."""

from pathlib import Path

from prompt_r1.storage.run_folder import LOCK, open_run


def test_a_new_run_beside_earlier_ones_takes_the_first_free_number(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    opened = []
    for _ in range(3):
        run = open_run("", "never", "mini-seed7")
        for name in (LOCK, "config.yaml"):
            (run / name).touch()
        opened.append(run)
    assert opened == [Path("runs/mini-seed7"), Path("runs/mini-seed7-2"), Path("runs/mini-seed7-3")]
