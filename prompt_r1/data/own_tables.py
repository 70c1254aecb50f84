"""Questions from a table of the user's own: .csv, .tsv, .json, .jsonl or .parquet, with any column names."""

from pathlib import Path

from prompt_r1.data.fields import BadRow, gold_answers, id_from_text, text_field
from prompt_r1.data.raw import raw_rows
from prompt_r1.errors import UsageError
from prompt_r1.types import Question


def read_own_table(path: Path, *, question_field: str, answer_field: str) -> list[Question]:
    """The questions in these two columns; the file's name is their dataset, and a repeated row counts once.

    Raises UsageError with the row and the reason, and for a missing column with those that there are.
    """
    questions: dict[tuple[str, tuple[str, ...]], Question] = {}
    ids: set[str] = set()
    for number, row in raw_rows(path, [question_field, answer_field]):
        for field, flag in ((question_field, "--question-field"), (answer_field, "--answer-field")):
            if field not in row:
                columns = ", ".join(map(repr, row)) or "none"
                raise UsageError(
                    f"{path}, row {number}: there is no column {field!r}; name one of {columns} by {flag}"
                )
        try:
            text, answers = text_field(row, question_field), gold_answers(row[answer_field], answer_field)
        except BadRow as reason:
            raise UsageError(f"{path}, row {number}: {reason}") from None
        if (text, answers) in questions:
            continue
        name = id_from_text(text)
        name = f"{name}-{number}" if name in ids else name
        ids.add(name)
        questions[text, answers] = Question(name, path.stem, text, answers)
    if not questions:
        raise UsageError(f"{path}: the file contains no questions")
    return list(questions.values())
