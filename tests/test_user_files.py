"""Files that users write: what every reader takes, what none takes, and that an error names the place."""

from __future__ import annotations

import codecs
import gzip
import json
import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from command_line import invoke
from semkv import user_files
from semkv.config import PolicyConfig
from semkv.errors import ConfigError, DatasetError
from semkv.tiers.policies import Calibration
from semkv.user_files import parse_json, read_json, read_json_lines, read_toml
from semkv_lab.samples import DatasetOptions, load_jsonl
from semkv_lab.semantic import eval_pairs
from semkv_lab.sweep import SweepLog, read_spec


def lines(path: Path) -> list[Any]:
    return [value for _, value in read_json_lines(path)]


@pytest.mark.parametrize("packed", [False, True])
def test_a_byte_order_mark_and_packing_change_nothing(tmp_path: Path, packed: bool) -> None:
    def file(name: str, text: str) -> Path:
        data = codecs.BOM_UTF8 + text.encode()
        path = tmp_path / (name + ".gz" * packed)
        path.write_bytes(gzip.compress(data) if packed else data)
        return path

    assert read_json(file("a.json", '{"a": "é"}')) == {"a": "é"}
    assert read_toml(file("a.toml", 'a = "é"\r\n')) == {"a": "é"}
    assert lines(file("a.jsonl", '"x"\r\n\n{"a": 1}')) == ["x", {"a": 1}]
    assert lines(file("two.jsonl", "1\n\ufeff2\n")) == [1, 2], "one file behind another"
    assert lines(file("none.jsonl", "")) == []


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b'{"a": 1, "b": {"c": [0, {"d": 1, "d": 2}]}}', ", at b.c.1.d: the name 'd' comes twice in one object"),
        (b'{"a": 1, "a": 1}', ", at a: the name 'a' comes twice in one object"),
        (b'{"a": 1, "\\u0061": 2}', ", at a: the name 'a' comes twice in one object"),
        (b'[1, NaN]', ", at 1: NaN is no number in JSON"),
        (b'{"a": -Infinity}', ", at a: -Infinity is no number in JSON"),
        (b'{"a": 1e999}', ", at a: 1e999 is no number in JSON"),
        (b'{"a": "\\ud83d"}', ", at a: '\\ud83d' is half of a character"),
        (b'{"a": {"\\uDE00": 1}}', ", at a: '\\ude00' is half of a character"),
        (b'{"a": 1,}', ": not valid JSON ("),
        (b"{'a': 1}", ": not valid JSON ("),
        (b"1" * 5000, ": not valid JSON ("),
        (b"[" * 99_999, ": not valid JSON (nested too deeply)"),
        (b'"caf\xe9"', ": not UTF-8 text (byte 0xe9); save the file as UTF-8"),
        (b'"\xed\xa0\x80"', ": not UTF-8 text (byte 0xed); save the file as UTF-8"),
        ('"x"'.encode("utf-16"), ": not UTF-8 text (UTF-16); save the file as UTF-8"),
    ],
)  # fmt: skip
def test_what_can_be_taken_in_two_ways_is_an_error_that_names_the_place(
    tmp_path: Path, data: bytes, said: str
) -> None:
    whole, line = tmp_path / "a.json", tmp_path / "a.jsonl"
    whole.write_bytes(data)
    with pytest.raises(DatasetError) as caught:
        read_json(whole)
    assert str(caught.value).startswith(f"{whole}{said}")
    line.write_bytes(b"{}\n\n" + data + b"\n")
    with pytest.raises(DatasetError) as caught:
        lines(line)
    assert str(caught.value).startswith(f"{line}, line 3{said}")


def test_nan_is_null_where_that_is_asked_for(tmp_path: Path) -> None:
    text = '{"a": [NaN, Infinity, -Infinity, -1e999, 1.5, 2]}'
    assert parse_json(text, "here", nan_is_null=True) == {"a": [None, None, None, None, 1.5, 2]}


@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
), st.booleans())  # fmt: skip
def test_what_json_holds_is_read_as_it_was_written(value: Any, ascii_only: bool) -> None:
    assert parse_json(json.dumps(value, ensure_ascii=ascii_only), "here") == value


def test_a_line_that_was_cut_off_is_left_out_where_it_is_the_last(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for cut in (b'{"a": ', b'{"a": "\xc3'):
        path.write_bytes(b'{"a": 1}\n' + cut)
        assert [value for _, value in read_json_lines(path, cut_off=True)] == [{"a": 1}]
        path.write_bytes(cut + b'\n{"a": 1}')
        with pytest.raises(DatasetError, match="line 1"):
            list(read_json_lines(path, cut_off=True))


@pytest.mark.parametrize("name", ["gone.json", "folder", "cut.json.gz", "no.json.gz"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "cut.json.gz").write_bytes(gzip.compress(b"{}" * 100)[:20])
    (tmp_path / "no.json.gz").write_bytes(b"{}")
    for read in (read_json, read_toml, lines):
        with pytest.raises(DatasetError, match=re.escape(f"{tmp_path / name}: ")):
            read(tmp_path / name)


# -- the commands ------------------------------------------------------------


TWICE = '{"name": "a", "name": "b"}'


def test_every_reader_refuses_a_name_that_comes_twice(tmp_path: Path) -> None:
    document, rows = tmp_path / "x.json", tmp_path / "x.jsonl"
    document.write_text('{"experiments": [' + TWICE + "]}", encoding="utf-8")
    rows.write_text(TWICE + "\n", encoding="utf-8")
    readers = {
        "specs": lambda: read_spec(document),
        "data": lambda: load_jsonl(DatasetOptions(root=rows)),
        "pairs": lambda: eval_pairs(rows, PolicyConfig()),
        "log": lambda: SweepLog(tmp_path / "x.csv", resume=True),
        "calibration": lambda: Calibration.load(document),
    }
    for what, read in readers.items():
        with pytest.raises(
            (ConfigError, DatasetError), match="the name 'name' comes twice"
        ) as caught:
            read()
        assert str(tmp_path) in str(caught.value), what
    said = invoke(["bench", "connector", "--extra", TWICE]).stderr
    assert "--extra" in said
    assert "the name 'name' comes twice" in said


def test_every_reader_takes_a_byte_order_mark(tmp_path: Path) -> None:
    marked = codecs.BOM_UTF8.decode()
    spec = '{"experiments": [{"name": "a", "engine": "scripted"}]}'
    (tmp_path / "x.json").write_text(marked + spec, encoding="utf-8")
    (tmp_path / "x.toml").write_text(
        f'{marked}[[experiments]]\nname = "a"\nengine = "scripted"', encoding="utf-8"
    )
    assert read_spec(tmp_path / "x.json") == read_spec(tmp_path / "x.toml")
    (tmp_path / "x.jsonl").write_text(marked + '{"question": "q"}', encoding="utf-8")
    assert [
        sample.question for sample in load_jsonl(DatasetOptions(root=tmp_path / "x.jsonl"))
    ] == ["q"]
    (tmp_path / "c.json").write_text(marked + "{}", encoding="utf-8")
    with pytest.raises(
        ConfigError, match="calibrate` wrote"
    ):  # it is read, and found to be something else
        Calibration.load(tmp_path / "c.json")
    (tmp_path / "gateway.toml").write_text(marked + "nonsense = 1", encoding="utf-8")
    assert "nonsense" in invoke(["serve", "--config", str(tmp_path / "gateway.toml")]).stderr


def test_a_pipe_into_which_nobody_writes_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = tmp_path / "a.toml"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=("a = 1",))
    writer.start()
    assert read_toml(pipe) == {"a": 1}
    writer.join()
    monkeypatch.setattr(user_files, "_PIPE_S", 0.01)
    with pytest.raises(DatasetError, match="nobody wrote into it"):
        read_toml(pipe)
