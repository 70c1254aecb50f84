"""Texts and files that others may have written."""

import pytest

from prompt_r1.foreign import json_object


@pytest.mark.parametrize("text", ["", "[1]", "null", '{"a": 1', "[" * 100_000, b"\xff", '{"a": ' * 5_000])
def test_a_text_that_holds_no_json_object_is_read_as_an_empty_one(text):
    assert json_object(text) == {}
    assert json_object('{"a": 1}') == {"a": 1}
