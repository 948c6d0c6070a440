"""Slices, and bad lines with their number."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.rollout.tasks.jsonl_files import rows, task, texts, write

from miles_k3.errors import ConfigError, DataError
from miles_k3.rollout.tasks.jsonl_rows import read_rows, split_source


@pytest.fixture
def file(tmp_path):
    return write(tmp_path / "data.jsonl", rows(10))


bound = st.none() | st.integers(-15, 15)


@settings(deadline=None)
@given(start=bound, stop=bound, n=st.integers(1, 10))
def test_slices_are_pythons(tmp_path_factory, start, stop, n):
    file = write(tmp_path_factory.mktemp("slices") / "d@home.jsonl", rows(n))
    spec = f"{file}@[{'' if start is None else start}:{'' if stop is None else stop}]"
    assert split_source(spec) == (file, slice(start, stop))
    expected = [row["prompt"] for row in rows(n)[start:stop]]

    def read():
        columns = {"prompt_column": "prompt", "answer_column": "answer"}
        return read_rows(spec, **columns, skip_bad=False, skipped=Counter())

    if expected:
        assert [row.question for row in read()] == expected
    else:
        with pytest.raises(DataError, match="has no usable row"):
            read()


def test_a_negative_slice_makes_a_task(file):
    assert sorted(texts(task(f"{file}@[-3:]").next(3))) == ["7 + 1", "8 + 1", "9 + 1"]


@pytest.mark.parametrize("bad", ["@[3]", "@[a:b]", "@[1:2:3]", "@[1:2", "@[1.0:]"])
def test_malformed_slices(file, bad):
    with pytest.raises(ConfigError, match=r"expected @\[a:b\] with whole numbers"):
        task(f"{file}{bad}")


BAD_LINES = {
    b"{'prompt': 1}": "not JSON .*column 2.*, expected one JSON object",
    b'{"prompt": "a", "answer": "b"': "not JSON",
    b"[1, 2]": "a list, expected a JSON object",
    b'"text"': "a str, expected a JSON object",
    b'{"prompt": "a"}': "no 'answer' among 'prompt', expected the column of task.params.answer_column",
    b'{"question": "a", "answer": "b"}': "no 'prompt' among 'question', 'answer', .*task.params.prompt_column",
    b"{}": "no 'prompt' among no columns",
    b'{"prompt": 5, "answer": "b"}': "'prompt' is 5, expected text",
    b'{"prompt": "  ", "answer": "b"}': "'prompt' is \"  \", expected text that isn't blank",
    b'{"prompt": "a", "answer": null}': "'answer' is null, expected text that isn't blank or a number",
    b'{"prompt": "a", "answer": true}': "'answer' is true",
    b'{"prompt": "a", "answer": ["b"]}': "'answer' is \\[\"b\"\\]",
    b'{"prompt": "a", "answer": ""}': "'answer' is \"\"",
    b'{"prompt": "a", "answer": NaN}': "'answer' is NaN",
    b'{"prompt": "a", "answer": 1e999}': "'answer' is Infinity",
    b'{"prompt": "\xff", "answer": "b"}': "byte 12 is not UTF-8",
    b"[" * 100_000: "nested too deeply",
    b'{"prompt": "a", "answer": ' + b"9" * 5000 + b"}": "Exceeds the limit",
}


@pytest.mark.parametrize("line", BAD_LINES, ids=range(len(BAD_LINES)))
def test_malformed_lines_name_file_and_line(file, line):
    good = file.read_bytes()
    file.write_bytes(good + b"\n" + line + b"\n" + good)
    message = f"data.jsonl:12: .*{BAD_LINES[line]}.*; correct the line or set task.on_bad_prompt: skip"
    with pytest.raises(DataError, match=message):
        task(file)
    source = task(file, on_bad_prompt="skip")
    assert source.skipped == {"malformed": 1}
    assert source.state_dict()["rows"] == 20


def test_blank_lines_byte_order_marks_and_crlf_are_harmless(file):
    lines = file.read_bytes().splitlines()
    file.write_bytes(b"\xef\xbb\xbf" + b"\r\n\r\n".join(lines))
    source = task(file, params={"shuffle": False})
    assert texts(source.next(10)) == [row["prompt"] for row in rows(10)]
    assert source.skipped == {}


@pytest.mark.parametrize("content", ["", "\n\n  \n"])
def test_empty_files(tmp_path, content):
    file = tmp_path / "empty.jsonl"
    file.write_text(content)
    with pytest.raises(DataError, match=r"empty.jsonl has no usable row .*expected one JSON object a line"):
        task(file)


def test_a_file_of_bad_lines_shows_the_first(tmp_path):
    file = tmp_path / "bad.jsonl"
    file.write_text("one\ntwo\n")
    with pytest.raises(DataError, match=r"no usable row .*first problem: .*bad.jsonl:1: not JSON"):
        task(file, on_bad_prompt="skip")


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(DataError, match=r"nowhere.jsonl: No such file or directory; expected a JSONL file"):
        task(tmp_path / "nowhere.jsonl")
    with pytest.raises(DataError, match="Is a directory"):
        task(tmp_path)
