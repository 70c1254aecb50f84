"""Build the paper's data from raw dumps: the training mix, its validation set, and the test files.

`RAW/NAME/` has the dump of each dataset (`sources.py`), `RAW/eval_data/` may have the twelve published test
files. Without them, 128 test questions of each dataset are drawn, and never used for training.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from prompt_r1.cli.markdown import markdown_table
from prompt_r1.data.audit import audit_file, audit_report
from prompt_r1.data.convert import convert, sha256, write_conversion
from prompt_r1.data.datasets import DATASETS
from prompt_r1.data.files import load_questions, write_questions
from prompt_r1.data.mixture import PAPER_DATASETS, mix, mix_report
from prompt_r1.data.sources import RELEASE, SOURCES, TEST_FILES, Source
from prompt_r1.errors import UsageError
from prompt_r1.types import Question

TEST_QUESTIONS = 128  # of each dataset
ONLY_CONVERTED = ("NarrativeQA",)  # named in the paper's appendix, but neither trained nor tested on


@dataclass
class PaperData:
    """What was built: a report to print, and the names of the datasets whose dumps are missing."""

    report: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


def build_paper_data(raw: Path, out: Path, *, sizes: Sequence[int], seed: int, examples: int) -> PaperData:
    """Convert the dumps in `raw` and write train.jsonl, validation.jsonl and test files to `out`.

    `sizes` are the questions of each dataset for training and for validation. Raises UsageError.
    """
    if not raw.is_dir():
        raise UsageError(f"--raw {raw}: there is no such folder; make it, with a folder for each dataset")
    data = PaperData()
    rows, questions = [], dict[str, list[Question]]()
    for source in SOURCES:
        missing = [name for name in source.files if not (raw / source.name / name).is_file()]
        if missing:
            data.missing.append(source.name)
            rows.append(_source_row(raw, source, f"missing: {source.name}/{', '.join(missing)}"))
            continue
        rows.append(_source_row(raw, source, _state(raw, source)))
        path = out / "converted" / f"{source.name}.jsonl"
        found = convert(
            source.name,
            DATASETS[source.name],
            [raw / source.name / source.files[0]],
            where=dict([source.where] if source.where else []),
            aliases={},
            one_gold=False,
        )
        if not found.questions:
            raise UsageError(f"{raw / source.name}: no question could be converted")
        data.report.append(write_conversion(path, found, [raw / source.name / name for name in source.files]))
        questions[found.questions[0].dataset] = found.questions
    tests = _test_files(raw, out, questions, seed)
    rows.append(_test_row(raw, tests))
    header = ["dataset", "state", "address", "bytes", "sha256", "licence"]
    data.report.insert(0, markdown_table(header, rows, left=6))
    data.report += _mix(out, questions, tests, sizes=sizes, seed=seed, examples=examples)
    return data


def _source_row(raw: Path, source: Source, state: str) -> list[str]:
    size = f"{source.bytes:,}" if source.bytes else "not known"
    return [source.name, state, source.address, size, source.sha256 or "not known", source.licence]


def _state(raw: Path, source: Source) -> str:
    """Whether a file that is published as it is has the published sum."""
    path = raw / source.name / source.files[0]
    if not source.sha256 or not source.address.endswith(path.name):
        return "found"
    return "found, sum as published" if sha256(path) == source.sha256 else "found, but with another sum"


def _test_row(raw: Path, tests: Sequence[Path]) -> list[str]:
    if not tests or tests[0].parent != raw / "eval_data":
        state = f"missing: {len(tests)} test files were drawn instead"
    else:
        same = sum(sha256(path) == TEST_FILES[path.name] for path in tests)
        state = f"found, {same} of {len(tests)} sums as published"
    return ["eval_data", state, f"{RELEASE} (dataset/eval_data)", "928,571", "in sources.py", "MIT"]


def _test_files(raw: Path, out: Path, questions: dict[str, list[Question]], seed: int) -> list[Path]:
    """The published test files, or drawn ones, whose questions are removed from `questions`."""
    published = [raw / "eval_data" / name for name in TEST_FILES]
    absent = [path.name for path in published if not path.is_file()]
    if not absent:
        return published
    if len(absent) < len(published):
        raise UsageError(f"{raw / 'eval_data'}: {', '.join(absent)} is missing; give all files or none")
    paths = []
    for dataset, found in questions.items():
        if dataset in ONLY_CONVERTED:
            continue
        order = random.Random(f"test {seed} {dataset}").sample(found, len(found))
        paths.append(out / "test" / f"{dataset.replace(' ', '-')}.jsonl")
        write_questions(paths[-1], order[:TEST_QUESTIONS])
        questions[dataset] = order[TEST_QUESTIONS:]
    return paths


def _mix(
    out: Path,
    questions: dict[str, list[Question]],
    tests: Sequence[Path],
    *,
    sizes: Sequence[int],
    seed: int,
    examples: int,
) -> list[str]:
    """Draw the mix of the datasets that are there, without test questions, and audit all files."""
    candidates = [question for name in PAPER_DATASETS for question in questions.get(name, [])]
    if not candidates:
        return ["No dataset of the training mix was found."]
    excluded = [question for path in tests for question in load_questions(path)]
    result = mix(candidates, sizes, seed=seed, exclude=excluded)
    paths = [out / "train.jsonl", out / "validation.jsonl"]
    for path, part in zip(paths, result.parts, strict=True):
        write_questions(path, part)
    counts = ", ".join(f"{path}: {len(part):,}" for path, part in zip(paths, result.parts, strict=True))
    audits = [audit_file(path) for path in [*paths, *tests]]
    return [
        f"questions: {counts} (seed {seed})",
        mix_report(result, sizes),
        audit_report(audits, examples=examples),
    ]
