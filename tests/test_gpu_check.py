"""The checks of a new GPU, on a CPU: the same code, without the kernels that need a GPU."""

import pytest

from benchmarks import gpu_check


@pytest.mark.slow
def test_every_check_passes_on_a_cpu(capsys):
    with pytest.raises(SystemExit) as ended:
        gpu_check.main()
    lines = capsys.readouterr().out.splitlines()[1:]
    assert ended.value.code == 0, lines
    assert [line.split()[:2] for line in lines] == [
        ["PASS", "model"],
        ["PASS", "engine"],
        ["PASS", "decode"],
        ["PASS", "update"],
    ]
