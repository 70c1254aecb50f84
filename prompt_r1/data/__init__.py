"""Rows of files → questions, and the order in which training sees them.

`python -m prompt_r1.data convert|mix|audit` makes such files from the datasets' raw dumps, mixes them for
training, and looks for what is wrong with them.
"""

from prompt_r1.data.files import load_questions
from prompt_r1.data.sampler import QuestionSampler

__all__ = ["QuestionSampler", "load_questions"]
