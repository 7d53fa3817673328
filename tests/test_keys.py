"""Keys: two different things never share one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from growth import assert_linear
from semkv.keys import Keyed
from semkv.types import MediaSegment, Namespace, Role, TextSegment
from semkv_guards.folding import LITERAL, normalise
from semkv_stores.digests import digest, weights_digest


def test_a_digest_tells_where_a_part_ends() -> None:
    parts = [("ab", "c"), ("a", "bc"), ("abc",), ("abc", ""), ("", "abc")]
    assert len({digest(*p) for p in parts}) == len(parts)
    assert digest("é") == digest("é".encode())


def test_a_checkpoint_is_the_names_and_bytes_of_its_files_without_cards_and_logs(
    tmp_path: Path,
) -> None:
    def folder(**files: str) -> Path:
        root = tmp_path / str(len(list(tmp_path.iterdir())))
        root.mkdir()
        for name, text in files.items():
            (root / name).write_text(text)
        return root

    model = folder(a="1", b="2")
    first = weights_digest(model)
    for name in ("README.md", "training.jsonl", ".hidden"):
        (model / name).write_text("x")
    assert weights_digest(model) == weights_digest(folder(a="1", b="2")) == first
    others = [folder(a="1b\0002"), folder(a="2", b="1"), folder(a="1", c="2"), folder(a="12", b="")]
    assert len({first, *map(weights_digest, others)}) == 5
    (model / "part").symlink_to(others[0])
    (others[0] / "up").symlink_to(model)  # a folder is read once, so this ends
    linked = weights_digest(model)
    (others[0] / "a").write_text("2")
    assert len({first, linked, weights_digest(model)}) == 3


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        # Case and lines.
        ("What color is it? It is big.", "what  color is it?  it is big.", True),
        ("What color is the car?", "WHAT COLOR IS THE CAR?", True),
        ("What color is the car?", "What Color Is The Car?", True),
        ("Don't touch it", "don't touch it ", True),
        ("Is Polish hard?", "Is polish hard?", False),
        ("How many capitals in HELLO?", "How many capitals in hello?", False),
        ("Answer YES or NO", "answer yes or no", False),
        ("CO", "Co", False),
        ("Alkohol in Maßen", "Alkohol in Massen", False),
        ("say 'Hi'", "say 'hi'", False),
        ('say "Hi Bob"', 'say "hi bob"', False),
        ("use `x Y z`", "use `x y z`", False),
        ("sort\nb a\nc", "sort\nb\na c", False),
        ("a\tb c", "a b\tc", False),
        ("ﬁne, ｗｉｄｅ", "fine, wide", True),
        ("What is 2²?", "What is 22?", False),
        ("ls -l", "ls -L", False),
        ("print(x)", "Print(x)", False),
        ("FOO_BAR", "foo_bar", False),
        ("open README.md", "open readme.MD", False),
        ("a cable of 5m", "a cable of 5M", False),
        ("if a:\n    b\nc", "if a:\n    b\n    c", False),
        ("one\r\ntwo \r\n\r\nthree", "one\ntwo\n\nthree", True),
        ("one\r\r\ntwo", "one\n\ntwo", False),
        ("C’est\u202fquoi  ça\u3000? Rien.", "c’est quoi ça ? rien.", True),
        ("E\u0301tait-il la\u0300", "Était-il là", True),
        # Code, quotations and tables.
        ("sed 's/  / /' f", "sed 's/ / /' f", False),
        ("What does len('a  b') give?", "What does len('a b') give?", False),
        ("replace '  ' with ' '", "replace ' ' with ' '", False),
        ("What is the length of b'a  b' here?", "What is the length of b'a b' here?", False),
        ("用'a  b'替换", "用'a b'替换", False),
        ("「a  b」は何文字", "「a b」は何文字", False),
        ("How many?\n```\nfoo  bar\n```", "How many?\n```\nfoo bar\n```", False),
        ("cat <<EOF\na  b\nEOF", "cat <<EOF\na b\nEOF", False),
        ("Type “One. Two. Three”", "Type “One. two. Three”", False),
        ("Math.floor(x)", "math.floor(x)", False),
        ("Look. Math.floor", "look. math.floor", False),
        ("Name  City\nBob     Paris", "Name  City\nBob Paris", False),
        ("Bob\t\tParis", "Bob\tParis", False),
        ("How long is 'e\u0301'?", "How long is 'é'?", False),
        # Width.
        ("ｗｈａｔ ｉｓ it", "what is it", True),
        ("りんごが３個", "りんごが3個", True),
        ("ＡＢＣ社とは", "ABC社とは", True),
        ("the ﬁrst ﬂoor", "the first floor", True),
        ("What is ，", "What is ,", False),
        ("What is ？", "What is ?", False),
        ("What is …", "What is ...", False),
        ("What is ﬁ", "What is fi", False),
        ("What is Ａ", "What is A", False),
        ("What is ℃", "What is °C", False),
        ("ＡとAの違い", "AとAの違い", False),
        ("ﬁne or fine", "fine or fine", False),
        ("print('Ａｂ')", "print('Ab')", False),
    ],
)
def test_what_only_typing_explains_is_folded(one: str, other: str, same: bool) -> None:
    assert (normalise(one) == normalise(other)) is same


@pytest.mark.parametrize("end", list("\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"))
def test_every_line_end_ends_a_line(end: str) -> None:
    assert normalise(f"x{end}y") not in (normalise("x y"), normalise("xy"))
    assert normalise(f"x = 1{end}y = 2") != normalise("x = 1 y = 2")
    assert normalise(f"x  z \xa0{end}  y") == f"x z{end}  y"
    assert normalise(f"Hello you{end}A = B  c") == f"hello you{end}A = B  c"


ODD = st.sampled_from(
    [
        *"aAbBiIkKsS .?!'’‘`\t\n\r1-/ﬁＡａ３，ﾞİıßΣ",
        *"\u3000\xa0\u2028\u0307\u0323\u0301\u0338\u0345\u1fef\u1ffd\u212a",
        "\r\n",
    ]
)


@given(st.one_of(st.text(), st.lists(ODD, max_size=12).map("".join)))
@example("\u1ffd x")
@example("İ\u0323 İ\u0308")
@example("A\u0300ﬀ")
@example("Fine Ｆine")
@example("I\nb\u1fef")
@example("W\u030aﬀ B")
@example("x\r \nb `")
def test_folding_twice_is_folding_once(text: str) -> None:
    assert normalise(normalise(text)) == normalise(text)


@pytest.mark.parametrize(
    "unit",
    ["a 'b", "‘a ", "a ‘", "'", "\r", "\r\n", " \xa0", "a\t ", "A. ", "Ａ ", "a.A", "İ\u0323"],
)
@pytest.mark.parametrize("around", ["word {}\nx", "é {}\nx", "{}\nx `"])
def test_a_long_text_is_no_quadratic_work(unit: str, around: str) -> None:
    def work(size: int) -> Callable[[], object]:
        text = around.format(unit * (size // len(unit)))
        return lambda: (normalise(text), LITERAL.search(text))

    assert_linear(work, 30_000)


@pytest.mark.parametrize("kept", ["ww.xy", "aB", "5k", "--x", "f(y", "http://", "'x'", "x   y"])
def test_what_is_kept_is_found_wherever_a_long_text_is_searched_in_parts(kept: str) -> None:
    for size in range(16_370, 16_390):
        text = f"a  {'b' * size} {kept}"
        assert normalise(text) == text != normalise(text.replace(kept, "plain"))


# -- keys of a prompt -----------------------------------------------------------------------------------


def test_no_key_is_shared_between_namespaces() -> None:
    segments = (
        TextSegment("s", Role.SYSTEM),
        MediaSegment("a" * 64),
        TextSegment("c", Role.CONTEXT),
        TextSegment("q"),
    )
    keys = [
        set(Keyed(Namespace(t, m), segments).entry_keys())
        for t, m in (("a", "x"), ("b", "x"), ("a", "y"))
    ]
    assert len(keys[0] | keys[1] | keys[2]) == sum(map(len, keys))
