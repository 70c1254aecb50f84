"""Texts and files that others may have written."""

import pytest

from prompt_r1.foreign import json_object, replace_file


@pytest.mark.parametrize("text", ["", "[1]", "null", '{"a": 1', "[" * 100_000, b"\xff", '{"a": ' * 5_000])
def test_a_text_that_holds_no_json_object_is_read_as_an_empty_one(text):
    assert json_object(text) == {}
    assert json_object('{"a": 1}') == {"a": 1}


def test_a_file_that_cannot_be_written_is_called_by_its_own_name(tmp_path):
    with pytest.raises(FileNotFoundError) as error:
        replace_file(tmp_path / "none/report.html", b"")
    assert error.value.filename == str(tmp_path / "none/report.html")
