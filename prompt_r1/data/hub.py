"""Load questions of a dataset on the Hugging Face Hub: `--data hf:ORG/NAME:SPLIT`."""

import re

from prompt_r1.data.files import all_questions, as_questions
from prompt_r1.data.rows import PARQUET_ROWS
from prompt_r1.errors import UsageError, first_line
from prompt_r1.hub import hub_is_reachable
from prompt_r1.tasks.packages import import_package
from prompt_r1.types import Question

HUB_DATA = "hf:"
NAME = re.compile(r"hf:(?P<repository>[\w.-]+/(?P<name>[\w.-]+))(/(?P<config>[\w.-]+))?:(?P<split>.+)")


def hub_questions(name: str, *, question_field: str = "question", answer_field: str = "") -> list[Question]:
    """The questions of `hf:ORG/NAME:SPLIT` or `hf:ORG/NAME/CONFIG:SPLIT`; columns as in a question file.

    SPLIT may be a part, such as train[:1000]. The dataset is downloaded once into the cache of `datasets`,
    which executes no code that comes with it. Raises UsageError.
    """
    found = NAME.fullmatch(name)
    if not found:
        raise UsageError(
            f"{name}: as questions, hf: names a dataset of the Hub, hf:ORG/NAME:SPLIT or "
            "hf:ORG/NAME/CONFIG:SPLIT; give those of this machine as a FILE"
        )
    datasets = import_package("datasets")
    if not hub_is_reachable(found["repository"]):
        raise UsageError(
            f"{name}: the Hub cannot be reached; HF_HUB_OFFLINE=1 reads what was loaded before from "
            "its cache; or give a FILE"
        )
    try:
        table = datasets.load_dataset(found["repository"], found["config"], split=found["split"])
    except Exception as error:  # of the dataset's files, of datasets, or of the Hub's HTTP client
        raise UsageError(
            f"{name} could not be loaded from the Hub ({first_line(error)}): check the name, and HF_TOKEN if "
            "it is private, or give a FILE"
        ) from error
    # As Arrow: images and sounds among the columns are not decoded.
    batches = table.with_format("arrow").iter(batch_size=PARQUET_ROWS)
    questions = as_questions(
        enumerate((row for batch in batches for row in batch.to_pylist()), start=1),
        found["name"],
        question_field=question_field,
        answer_field=answer_field,
        columnar=True,
    )
    return all_questions(name, questions)
