"""One row of each dataset's raw dump → question and golds, as the paper poses them.

`SOURCES` names them for `convert --from`. What a dataset marks as unusable is left out with a reason
(LeftOut); what is not as the dataset ships it is a BadRow.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from prompt_r1.data.fields import BadRow, bare_problem, gold_of, golds_of, name_of, text_of

Fields = Mapping[str, object]
NO_ANSWER = "no answer (a test split)"
WRITING_TAGS = re.compile(r"^(?:\s*\[\s*(?:WP|EU|CW|TT|PI|RF|MP|IP|PM|OT|FF|SP)\s*\])+", re.IGNORECASE)


class LeftOut(Exception):
    """Why the dataset itself does not want this row asked: counted, and reported."""


@dataclass(frozen=True)
class Draft:
    """A question in the making; `id` is the dataset's own, or ""."""

    text: str
    answers: tuple[str, ...]
    id: str = ""


@dataclass(frozen=True)
class Source:
    """A dataset: the paper's name, the columns that `convert` reads, and how."""

    dataset: str
    columns: tuple[str, ...]
    convert: Callable[[Fields], Draft]


def hotpotqa(row: Fields) -> Draft:
    """HotpotQA, and 2WikiMultihopQA, which ships in its format; their test splits have no answers."""
    return Draft(text_of(row, "question"), (_answer(row, "answer"),), _id(row, "_id", "id"))


def musique(row: Fields) -> Draft:
    """MuSiQue: the Full variant pairs each question with an unanswerable twin."""
    if row.get("answerable") is False:
        raise LeftOut("unanswerable")
    answer = _answer(row, "answer")
    aliases = _list(row.get("answer_aliases") or [], "answer_aliases")
    return Draft(text_of(row, "question"), _unique([answer, *aliases], "answer_aliases"), _id(row, "id"))


def popqa(row: Fields) -> Draft:
    """PopQA: `possible_answers` is a text that holds a JSON list."""
    value = row.get("possible_answers")
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise BadRow("the field possible_answers is no JSON list") from None
    golds = _unique(_list(value, "possible_answers"), "possible_answers")
    return Draft(text_of(row, "question"), golds, _id(row, "id"))


def gsm8k(row: Fields) -> Draft:
    """GSM8K: the gold is what follows the last "####" of the worked answer; no thousands, no dollars."""
    _, mark, number = text_of(row, "answer").rpartition("####")
    if not mark:
        raise BadRow("the field answer has no line that begins with ####")
    number = re.sub(r"[,$\s]", "", number)
    return Draft(text_of(row, "question"), (gold_of(number, "answer"),))


def dapo(row: Fields) -> Draft:
    """DAPO-Math-17k, and its processed form, where prompt and solution are texts; without the wrapper."""
    prompt = row.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], dict):
        prompt = prompt[0].get("content")
    reward_model = row.get("reward_model")
    gold = reward_model.get("ground_truth") if isinstance(reward_model, dict) else row.get("solution")
    return Draft(bare_problem(text_of({"prompt": prompt}, "prompt")), golds_of(gold, "ground_truth"))


def booksum(row: Fields) -> Draft:
    """BookSum, title → human summary: the nearest that the dump allows.

    The paper had a model write its titles and texts from the chapters, which nobody can repeat; its own rows
    are in its published files. Reads kmfoda/booksum (.csv) and ubaada/booksum-complete-cleaned.
    """
    if "book_title" in row:
        title = f"{text_of(row, 'book_title')}, {text_of(row, 'chapter_id')}"
        summaries = _list(row.get("summary"), "summary")
        texts = [part.get("text") for part in summaries if isinstance(part, dict)]
    else:
        title = text_of(row, "book_id").replace(".", ", ")
        texts = [row.get("summary_text")]
    golds = [text for text in texts if isinstance(text, str) and text.strip()]
    if not golds:
        raise LeftOut("no summary")
    return Draft(f"Please write a short article based on the given title: {title}.", tuple(golds))


def writingprompts(row: Fields) -> Draft:
    """WritingPrompts: prompt → story, both tokenised in the dump."""
    prompt, story = (
        detokenise(WRITING_TAGS.sub("", text_of(row, "prompt"))),
        detokenise(text_of(row, "story")),
    )
    if not prompt or not story:
        raise LeftOut("empty prompt or story")
    return Draft(f"Please write a short article based on the given title: '{prompt}'", (story,))


def mathqa(row: Fields) -> Draft:
    """MathQA: the gold is the text of the right option; the options are not shown."""
    options = text_of(row, "options")
    marks = list(re.finditer(r"(?<![^\s,\['\"])([a-e]) \) ", options))
    ends = [mark.start() for mark in marks[1:]] + [len(options)]
    texts = {
        mark[1]: options[mark.end() : end].strip(" ,[]'\"") for mark, end in zip(marks, ends, strict=True)
    }
    gold = texts.get(text_of(row, "correct").strip())
    if not gold:
        raise LeftOut("no text of the right option")
    return Draft(text_of(row, "Problem"), (gold,))


def squad(row: Fields, *, with_context: bool = False, unanswerable: str = "") -> Draft:
    """SQuAD v2: without contexts, as in the paper, unless `with_context`.

    A question without golds is unanswerable: left out, unless `unanswerable` says what would be right.
    """
    answers = row.get("answers")
    golds = _list(answers.get("text") if isinstance(answers, dict) else answers, "answers")
    golds = [text_of(gold, "text") if isinstance(gold, dict) else gold for gold in golds]
    if not golds and not unanswerable:
        raise LeftOut("unanswerable")
    text = text_of(row, "question")
    if with_context:
        text = f"{text_of(row, 'context')}\n\n{text}"
    return Draft(text, _unique(golds or [unanswerable], "answers"), _id(row, "id"))


def triviaqa(row: Fields) -> Draft:
    """TriviaQA: the answer and its aliases; capitals in the official JSON, small letters on the hub."""
    row = {key.lower(): part for key, part in row.items()}
    answer = row.get("answer")
    if not isinstance(answer, dict):
        raise LeftOut(NO_ANSWER)
    answer = {key.lower(): part for key, part in answer.items()}
    value = _answer(answer, "value")
    aliases = _list(answer.get("aliases") or [], "aliases")
    golds = _unique([value, *aliases], "aliases")
    return Draft(text_of(row, "question"), golds, _id(row, "question_id", "questionid"))


def xsum(row: Fields) -> Draft:
    """XSum upside down, as in the paper: summary → article."""
    document, summary = row.get("document"), text_of(row, "summary")
    if not isinstance(document, str) or not document.strip():
        raise LeftOut("no article")
    return Draft(f"Please write an article: {summary}", (document,), _id(row, "id"))


def narrativeqa(row: Fields) -> Draft:
    """NarrativeQA without its books; qaps.csv, or the hub's nested rows."""
    question = row.get("question")
    if isinstance(question, dict):
        golds = _list(row.get("answers"), "answers")
        golds = [text_of(gold, "text") if isinstance(gold, dict) else gold for gold in golds]
        return Draft(text_of(question, "text"), _unique(golds, "answers"))
    golds = [row[name] for name in ("answer1", "answer2") if name in row]
    return Draft(text_of(row, "question"), _unique(golds, "answer1"))


SOURCES = {
    "2wiki": Source("2WikiMultihopQA", ("_id", "id", "question", "answer", "answer_id"), hotpotqa),
    "booksum": Source("BookSum", ("book_id", "summary_text", "book_title", "chapter_id", "summary"), booksum),
    "dapo": Source("DAPO-Math", ("prompt", "reward_model", "solution"), dapo),
    "gsm8k": Source("GSM8K", ("question", "answer"), gsm8k),
    "hotpotqa": Source("HotpotQA", ("_id", "id", "question", "answer"), hotpotqa),
    "mathqa": Source("MathQA", ("Problem", "options", "correct"), mathqa),
    "musique": Source("MuSiQue", ("id", "question", "answer", "answer_aliases", "answerable"), musique),
    "narrativeqa": Source("NarrativeQA", ("question", "answers"), narrativeqa),
    "popqa": Source("PopQA", ("id", "question", "possible_answers"), popqa),
    "squad": Source("SQuAD v2", ("id", "question", "answers", "context"), squad),
    "triviaqa": Source("TriviaQA", ("question_id", "question", "answer"), triviaqa),
    "writingprompts": Source("WritingPrompts", ("prompt", "story"), writingprompts),
    "xsum": Source("XSum", ("id", "document", "summary"), xsum),
}


def detokenise(text: str) -> str:
    """Words and punctuation as people write them: `` were n't '' → "weren't", <newline> → a new line."""
    text = re.sub(r"\s*<newline>\s*", "\n", text)
    text = re.sub(r"`` ?", '"', re.sub(r" ?''", '"', text))
    text = re.sub(r"(?<=\w) (n't|'(?:s|m|d|ll|re|ve)\b)", r"\1", text, flags=re.IGNORECASE)
    text = re.sub(r"\b(gon|wan|got|can|gim|lem) (na|ta|not|me)\b", r"\1\2", text, flags=re.IGNORECASE)
    text = re.sub(r" +([.,;:!?%)\]])", r"\1", re.sub(r"([(\[$]) +", r"\1", text))
    return "\n".join(" ".join(line.split()) for line in text.split("\n")).strip()


def _list(value: object, field: str) -> list[object]:
    """The value, if it is a list. Raises BadRow."""
    if not isinstance(value, list):
        raise BadRow(f"the field {field} must be a list, not {name_of(value)}")
    return value


def _answer(row: Fields, field: str) -> str:
    if row.get(field) in (None, "", "<unk>"):
        raise LeftOut(NO_ANSWER)
    return gold_of(row[field], field)


def _unique(golds: list[object], field: str) -> tuple[str, ...]:
    """The golds without blanks and repeats, in their order."""
    texts = [gold_of(gold, field) for gold in golds if not (isinstance(gold, str) and not gold.strip())]
    if not texts:
        raise LeftOut(NO_ANSWER)
    return tuple(dict.fromkeys(texts))


def _id(row: Fields, *fields: str) -> str:
    value = next((row[field] for field in fields if row.get(field) is not None), "")
    return gold_of(value, fields[0]) if value != "" else ""
