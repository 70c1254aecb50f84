"""The numbers in the paper's Tables 2 to 5, in percent.

Each number is over 128 questions; the paper reports no intervals. Datasets have the names of
`prompt_r1/data`, metrics those of `aggregate.py`.
"""

import re
from collections.abc import Mapping, Sequence
from statistics import fmean

from prompt_r1.types import Kind

# The metrics that the paper reports of each kind of question; the first is the kind's main metric here.
REPORTED_METRICS: Mapping[Kind, tuple[str, str]] = {
    "qa": ("em", "f1"),
    "math": ("em", "f1"),
    "text": ("f1", "ssim"),
}
QWEN, MINI, OSS = "Qwen3-4B", "GPT-4o-mini", "GPT-OSS-20B"
ENVIRONMENTS = {"gpt-4o-mini": MINI, "gpt-oss-20b": OSS, "qwen3-4b": QWEN}  # a model → the paper's name

# Table 2 (trained datasets), Table 3 (out of distribution), and "w/o Env." and "w/o R.L." of Table 4. Column:
# the method, its environment and that of its agent's training ("": any).
COLUMNS = (
    ("direct", QWEN, QWEN), ("direct", MINI, MINI), ("sft", "", ""), ("cot", QWEN, QWEN), ("cot", MINI, MINI),
    ("grpo-only", "", ""), ("opro", MINI, MINI), ("textgrad", MINI, MINI), ("gepa", MINI, MINI),
    ("prompt-r1", MINI, MINI), ("agent-only", MINI, MINI), ("untrained", MINI, MINI),
)  # fmt: skip
MAIN_RESULTS = """\
2WikiMultihopQA em     28.13  33.59  41.41  21.88  43.75  34.38  25.00  18.75  41.41  48.44  41.41   1.56
2WikiMultihopQA f1     29.32  36.57  42.62  24.17  49.13  35.05  35.96  27.50  46.27  54.41  43.48   8.86
HotpotQA        em     21.09  33.59  23.44  18.75  42.97  27.34  34.38  27.34  38.28  44.53  21.88  20.31
HotpotQA        f1     24.25  40.07  31.09  22.98  49.70  32.27  46.83  37.10  47.03  52.31  25.96  27.42
GSM8K           em     84.38  83.59  32.03  82.81  84.38  92.97  63.28  70.31  87.50  97.66  95.31  84.38
GSM8K           f1     84.38  86.72  32.03  82.81  88.02  92.97  83.65  85.99  90.10  97.66  95.31  89.41
DAPO-Math       em      0.00  18.75   3.13   0.00  20.31   3.91   6.25  10.16  13.28  26.56  25.00  21.09
DAPO-Math       f1      0.00  18.76   3.13   0.00  20.32   3.91   6.39  10.27  14.06  26.56  25.00  22.22
MuSiQue         em      1.56  14.06   7.81   3.13  17.97   8.59  14.06  14.84  15.63  18.75   2.34   5.47
MuSiQue         f1      5.44  22.06  16.78   6.95  25.39  13.90  26.18  24.06  24.91  26.31  11.63  10.90
PopQA           em      7.03  25.78   7.81   7.03  28.13   7.81  23.44  19.53  27.34  28.13   8.59   3.91
PopQA           f1      9.97  30.75   9.53   9.58  32.66  12.27  30.14  28.28  31.18  33.77  10.85   9.28
BookSum         f1     19.99  20.45  25.47  16.68  11.58  25.88  16.18  25.79   0.00  26.50  23.34  19.38
BookSum         ssim   45.19  57.01  54.55  35.02  56.51  54.21  23.22  34.95   0.00  60.87  56.84  58.80
WritingPrompts  f1     13.06  19.48  15.12  10.20   9.93   8.40   7.81  22.07   0.21  22.11  18.67  17.11
WritingPrompts  ssim   20.59  35.31  30.86  12.15  30.86  10.41  13.73  20.28   0.34  38.54  37.83  36.65
TriviaQA        em     45.31  63.28  29.69  46.88  67.19  51.56  60.94  54.69  65.63  70.31  39.84  49.22
TriviaQA        f1     48.52  71.34  34.21  50.26  75.81  55.98  72.14  67.59  74.91  76.91  43.54  56.23
MathQA          em     28.91  46.09  17.97  27.34  49.22  46.88  43.75  44.53  40.63  52.34  49.22  48.44
MathQA          f1     32.29  54.04  22.66  30.60  57.03  54.43  60.08  61.46  61.59  61.59  57.94  58.07
SQuAD v2        em      6.25  13.28   5.47   6.25  14.06  10.16  10.94   6.25  13.28  19.53  10.16   5.47
SQuAD v2        f1     16.09  25.61  16.18  16.25  25.73  23.10  26.67  22.04  25.52  29.28  18.12  12.89
XSum            f1     16.75  24.35  21.13   8.33   8.92  21.98  17.87  24.88   0.21  25.76  21.41  23.61
XSum            ssim   31.73  60.56  55.65   6.81  53.94  52.09  29.47  28.45   0.37  63.02  59.87  61.83
"""

# Table 5, without the numbers of Table 3.
TRANSFER_COLUMNS = (
    ("direct", OSS, OSS),
    ("prompt-r1", OSS, OSS),
    ("prompt-r1", OSS, MINI),
    ("prompt-r1", MINI, OSS),
)
TRANSFER = """\
TriviaQA        em     50.78  50.78  51.56  67.19
TriviaQA        f1     59.37  59.60  60.05  73.11
MathQA          em     51.56  51.56  53.91  52.34
MathQA          f1     59.48  61.07  62.63  60.29
SQuAD v2        em      7.81  10.16   8.59  17.97
SQuAD v2        f1     18.75  21.28  20.13  27.96
XSum            f1     22.77  24.14  22.95  25.82
XSum            ssim   59.48  61.83  60.84  61.83
"""


def _read(table: str, columns: tuple[tuple[str, str, str], ...]) -> dict[tuple[str, ...], float]:
    """The numbers of a table by method, environment, environment of the training, dataset and metric."""
    found: dict[tuple[str, ...], float] = {}
    for line in table.splitlines():
        dataset, metric, *numbers = line.rsplit(maxsplit=len(columns) + 1)
        for column, number in zip(columns, numbers, strict=True):
            found[(*column, dataset, metric)] = float(number)
    return found


NUMBERS = _read(MAIN_RESULTS, COLUMNS) | _read(TRANSFER, TRANSFER_COLUMNS)


def paper_number(method: str, environment: str, home: str, datasets: Sequence[str], metric: str) -> str:
    """The paper's number, in percent: the mean over the datasets that report it; "" if there is none.

    `home` is the environment of the agent's training.
    """
    for where in ((paper_name(environment), paper_name(home)), ("", "")):
        keys = [(method, *where, dataset, metric) for dataset in datasets]
        if found := [NUMBERS[key] for key in keys if key in NUMBERS]:
            return f"{fmean(found) + 1e-9:.2f}"  # the paper rounds halves up
    return ""


def paper_name(environment: str) -> str:
    """The paper's name of an environment; other environments, also several at once, keep their names."""
    model = re.split("@https?://", environment)[0].lower()
    return ENVIRONMENTS.get(re.split("[:/]", model)[-1], environment)
