"""The sentences of the mini environment's replies, in two styles."""

from collections.abc import Mapping

# By style and form. {value} is the answer; the other placeholders are fields of the request.
WORDINGS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    # Each form has several sentences, so that the agent has to read a reply instead of counting words.
    "A": {
        "fact": (
            "Sure, the {relation} of {subject} is {value}. I hope this helps.",
            "The {relation} of {subject} is {value}.",
            "I think {value} is the {relation} of {subject}.",
            "As far as I know, it is {value}.",
            "That would be {value}, I think.",
            "Let me look: {value}.",
        ),
        "year": (
            "{subject} was released in {value}.",
            "Sure, {subject} came out in {value}. I hope this helps.",
            "As far as I know, it was {value}.",
            "That would be {value}, I think.",
            "Let me look: {value}.",
        ),
        "hops": (
            "The {second} of the {first} of {film} is {value}.",
            "As far as I know, it is {value}.",
            "That would be {value}, I think.",
            "Let me look: {value}.",
        ),
        "sum": (
            "{left} {sign} {right} is {value}.",
            "That makes {value}.",
            "Sure, the result is {value}.",
            "Let me look: {left} {sign} {right} makes {value}, I think.",
        ),
        "problem": (
            "{owner} has {value} {things} now.",
            "That makes {value}.",
            "Sure, the result is {value}.",
        ),
        "summary": (
            "{film} is {value}.",
            "Sure, here it is: {value}.",
            "As far as I know, it is {value}.",
            "Let me look: {value}.",
        ),
        "yes": (
            "Yes, {film} was released before {other}.",
            "Yes, it was.",
            "Sure, the answer is yes.",
            "Let me look: yes.",
            "I think: Yes.",
        ),
        "no": (
            "No, {film} was not released before {other}.",
            "No, it was not.",
            "Sure, the answer is no.",
            "Let me look: no.",
            "I think: No.",
        ),
        "hedge": ("That is hard to say.", "They came out at about the same time."),
        "confused": ("I am not sure what you mean.", "Sorry, what do you mean?"),
    },
    # These are other sentences, but mostly of the words of style A: the agent has never seen other words.
    "B": {
        "fact": (
            "That is {value}, I hope.",
            "Good question! It is {value}.",
            "The {relation} would be {value}, I hope.",
            "The answer is {value}, I hope.",
        ),
        "year": (
            "I think it was in {value}.",
            "Let me look: {subject} came out in {value}.",
            "That would be {value}, I hope.",
        ),
        "hops": ("I think it is {value}.", "Good question! It is {value}.", "The answer is {value}, I hope."),
        "sum": (
            "I think that makes {value}.",
            "The result is {value}, I hope.",
            "Let me look, it makes {value}.",
        ),
        "problem": ("I think that makes {value}.", "The result is {value}, I hope."),
        "summary": (
            "I think {film} is {value}.",
            "Let me look: it is {value}.",
            "Here it is, I hope: {value}.",
        ),
        "yes": ("I think yes.", "Good question! Yes.", "The answer is yes, I hope."),
        "no": ("I think no.", "Good question! No.", "The answer is no, I hope."),
        "hedge": ("Good question! Hard to say.", "I am not sure."),
        "confused": ("Good question! What do you mean?", "I do not know what you mean."),
    },
}
