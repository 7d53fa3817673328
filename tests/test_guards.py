"""The guards veto what changes a question, and let a rewording pass."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import semkv_guards as guards
from growth import assert_linear
from semkv_guards import REASONS, RULES, Language, same_words, veto, wording
from semkv_guards.folding import LITERAL, asks_of_typing, normalise
from semkv_guards.guard import objection, pair_of
from semkv_guards.language import WORDS, languages
from semkv_guards.quantities import differ
from semkv_guards.rules import negation
from semkv_guards.rules.rule import Rule
from semkv_guards.text import Text

DATA = Path(__file__).parents[1] / "bench" / "data"

ENGLISH = languages()[0]
GERMAN_FILE = """
negations = "nicht kein keine ohne"
numbers = "2 = zwei; 3 = drei"
synonyms = "auto wagen"
function = "der die das ein eine ich wie kann den ist am"
questions = "person = wer; time = wann; = was"
suffixes = "en= e="
[units]
length = "1000 = km; 1 = meter m; 1609 = meilen"
[dates]
weekday = "montag; dienstag"
[groups]
direction = "links; rechts"
[opposites]
antonym = "kaufen / verkaufen; öffnen / schließen"
"""
GERMAN = [
    ("Ist der Ball links?", "Ist der Ball rechts?", "direction"),
    ("Wie kann ich das Auto kaufen?", "Wie kann ich das Auto verkaufen?", "antonym"),
    ("Ist der Ball ohne Salz?", "Ist der Ball mit Salz?", "negation"),
    ("Wie ist der Weg, 5 km?", "Wie ist der Weg, 5 Meilen?", "unit"),
    ("Wie ist der Weg, 5 km?", "Wie ist der Weg, 5000 Meter?", None),
    ("Wie kann ich zwei Eier kaufen?", "Wie kann ich drei Eier kaufen?", "number"),
    ("Ist das am Montag offen?", "Ist das am Dienstag offen?", "date"),
    ("Wie kann ich das Auto öffnen?", "Wie kann ich den Wagen öffnen?", None),
]


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("Was ist in der Box an der Wand?", "Was ist nicht in der Box an der Wand?"),
        ("Puis-je prendre du lait ?", "Puis-je ne pas prendre du lait ?"),
        ("这个立方体是红色的吗？", "这个立方体不是红色的吗？"),
        ("Куб красный?", "Куб не красный?"),
        ("order cancel karo", "order cancel mat karo"),
    ],
)
def test_another_language_stands_for_itself_alone(a: str, b: str) -> None:
    assert veto(a, b) == veto(b, a) == "language"
    assert veto(a, f" {a}") is None


def rows_of(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize(
    ("name", "passed", "lost"),
    [
        ("traps.jsonl", 19, 0),
        ("classes.jsonl", 4, 8),
        ("added.jsonl", 4, 5),
        ("other_languages.jsonl", 3, 0),
        ("last_turns.jsonl", 5, 2),
        ("long.jsonl", 18, 24),
        ("paraphrases.jsonl", 0, 70),
    ],
)
def test_no_more_traps_pass_and_no_more_paraphrases_are_lost_than_before(
    name: str, passed: int, lost: int
) -> None:
    found: dict[bool, list[str]] = {True: [], False: []}
    for row in rows_of(name):
        same, reason = row.get("same", name == "paraphrases.jsonl"), veto(row["a"], row["b"])
        assert veto(row["b"], row["a"]) == reason
        if same == (reason is not None):
            found[same].append(f"{row['a']} | {row['b']}: {reason}")
    assert len(found[False]) <= passed, found[False]
    assert len(found[True]) <= lost, found[True]


def test_each_rule_vetoes_its_example_by_name_and_passes_a_rewording() -> None:
    rules = [row for row in rows_of("classes.jsonl") if row["kind"] == "rule"]
    assert len(rules) > 100
    assert [
        (row, found) for row in rules if (found := veto(row["a"], row["b"])) != row.get("reason")
    ] == []
    assert {row["reason"] for row in rules if not row["same"]} <= set(REASONS)


EACH_RULE = pytest.mark.parametrize(
    "rule", [rule for rule in RULES if rule.reasons], ids=lambda rule: rule.name
)


@EACH_RULE
def test_a_rule_vetoes_its_own_cases_before_any_other_and_allows_the_others(rule: Rule) -> None:
    assert len(rule.vetoes) >= 2
    assert rule.allows
    assert rule.why
    for one, other in rule.vetoes:
        for a, b in ((one, other), (other, one)):
            found = objection(pair_of(a, b))
            assert found is not None, (a, b)
            assert found.rule.name == rule.name
            assert found.reason == veto(a, b)
            assert found.reason in rule.reasons
    for a, b in rule.allows:
        assert a != b
        assert objection(pair_of(a, b)) is None
        assert veto(a, b) is None


@EACH_RULE
def test_a_rule_needs_the_tables_that_it_names(rule: Rule) -> None:
    language = without_tables(rule.tables)
    for a, b in rule.vetoes if rule.tables else ():
        assert rule.check(pair_of(a, b, language)) is None


def test_the_page_for_contributors_shows_a_rule_as_it_is() -> None:
    page = (DATA.parents[1] / "docs" / "contributing.md").read_text(encoding="utf-8")
    shown = page.partition("```python\n")[2].partition("```")[0]
    assert shown.startswith("@rule(")
    assert shown in inspect.getsource(negation)


def without_tables(names: tuple[str, ...]) -> Language:
    """English without some of its tables."""
    text = (WORDS / "en.toml").read_text(encoding="utf-8")
    for name in names:
        assert name in Language.__annotations__
        section = re.compile(rf"^\[{name}\]\n.*?(?=^\[|\Z)", re.MULTILINE | re.DOTALL)
        line = re.compile(rf'^{name} = (""".*?"""|"[^"\n]*")$', re.MULTILINE | re.DOTALL)
        text, sections = section.subn("", text)
        text, lines = line.subn("", text)
        assert sections + lines == 1, name
    return Language(text)


@pytest.mark.parametrize(
    ("a", "b", "reason"),
    [
        ("Who is chasing the dog?", "Who is the dog chasing?", "word order"),
        ("What is holding the man?", "What is the man holding?", "word order"),
        ("Who will help the old man?", "Who will the old man help?", "word order"),
        ("What kills bacteria?", "What do bacteria kill?", "word order"),
        ("What is behind the tree?", "What is the tree behind?", "word order"),
        ("Who works for Tom?", "Who does Tom work for?", "word order"),
        ("Can I use my dad's insurance?", "Can my dad use my insurance?", "person"),
        ("Are all cats mammals?", "Are all mammals cats?", "word order"),
        ("Sort [3, 1, 2]", "Sort [3, 2, 1]", "word order"),
        ("What do cats and dogs eat?", "What do dogs and cats eat?", None),
        ("How do I write a for loop?", "How do I write the for loop?", None),
        ("What is on the menu?", "What is in the menu?", None),
        (
            "Which is most dangerous, a lion or a tiger?",
            "Which is more dangerous, a lion or a tiger?",
            None,
        ),
        ("What can I do this weekend in Berlin?", "What can I do in Berlin this weekend?", None),
        ("Who is currently leading the race?", "Who is leading the race currently?", None),
        ("Is my car automatically insured?", "Is my car insured automatically?", None),
        ("Which of these colleges is the best?", "Which is the best of these colleges?", None),
        ("What is the red large ball?", "What is the large red ball?", None),
        ("Remind me on May 3", "Remind me on 3 May", None),
        ("What is 10:00 UTC+2 in Rome?", "What is 10:00 UTC-2 in Rome?", "code"),
        ("Is x > 5 or x < 3?", "Is x < 5 or x > 3?", "code"),
        ("What does Ω stand for?", "What does ω stand for?", "case"),
        ("Is he old enough to drive?", "Is he too old to drive?", "antonym"),
        ("Not all birds can fly, right?", "All birds can not fly, right?", "negation"),
        ("When did WW2 end?", "When did World War II end?", None),
        ("How fast is 36 km/h?", "How fast is 10 metres per second?", None),
        ("How fast is 36 km/h?", "How fast is 36 metres per second?", "unit"),
        ("What is a level of 5 mg/dL?", "What is a level of 50 mg/L?", None),
        ("What does len('a  b') give?", "What does len('a b') give?", "code"),
        (
            "What does this print:\nif x:\n  y()\nz()",
            "What does this print:\nif x:\n  y()\n  z()",
            "code",
        ),
        ("How tall is it?\nAnswer in metres.", "How tall is it? Answer in metres.", "lines"),
        ("Polish furniture tips", "polish furniture tips", "case"),
        ("Windows crashed", "windows crashed", "case"),
        ("What does 😂 mean?", "What does 😭 mean?", "symbol"),
        ("What flag is 🇧🇬?", "What flag is 🇬🇧?", "symbol"),
        (
            "What flag is 🏴\U000e0067\U000e0062\U000e0065\U000e007f?",
            "What flag is 🏴\U000e0067\U000e0062\U000e0073\U000e007f?",
            "symbol",
        ),
        ("Do I like it when it is 30 °C? 🎉", "Do I like it when it is 30 degrees C?", "unread"),
        ("What does userId mean in this schema?", "What does userID mean in this schema?", "code"),
        ("What does %d print?", "What does %s print?", "code"),
        ("What do pandas eat?", "When do pandas eat?", "question word"),
        ("Who is Siri?", "What is Siri?", "question word"),
        ("What is the weather in Rome?", "How is the weather in Rome?", None),
        ("What is the best time to go?", "When is the best time to go?", None),
        ("Who is the interviewer?", "Who is the interviewee?", "antonym"),
        ("Is this a meat lasagna?", "Is this a meatless lasagna?", "antonym"),
        ("The tenant shall repair it.", "The tenant may repair it.", "modality"),
        ("Do I need exactly two witnesses?", "Do I need at least two witnesses?", "comparison"),
        ("How do I clean my oven?", "How do I clean my dirty oven?", None),
        ("Where is the best repair center?", "Which is the best repair center?", None),
        ("What shall I cook?", "What can I cook?", None),
        ("Can you say if I want it?", "Should I say if I want it?", "modality"),
        ("Is it done? 👍", "Is it done? 👍🏽👍🏽", "unread"),
        ("Divide a by b", "Divide b by a", "entity"),
        ("SELECT a, b FROM t", "SELECT b, a FROM t", "word order"),
        ("What is None in Python?", "What is none in Python?", "case"),
    ],
)
def test_pairs_by_hand(a: str, b: str, reason: str | None) -> None:
    assert veto(a, b) == veto(b, a) == reason


def test_a_language_needs_no_more_than_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    english = (Path(guards.__file__).parent / "words" / "en.toml").read_text(encoding="utf-8")
    (tmp_path / "en.toml").write_text(english, encoding="utf-8")
    (tmp_path / "de.toml").write_text(
        f'telling = "ich der das ist wie wer"\n{GERMAN_FILE}', encoding="utf-8"
    )
    monkeypatch.setattr("semkv_guards.language.WORDS", tmp_path)
    languages.cache_clear()
    try:
        for a, b, reason in GERMAN:
            assert veto(a, b) == veto(b, a) == reason
        assert veto("Is the ball left?", "Is the ball right?") == "direction"
        assert veto("How do I fix a bike?", "How do I repair a bike?") is None
        assert veto("Puis-je prendre du lait ?", "Puis-je ne pas prendre du lait ?") == "language"
    finally:
        monkeypatch.undo()
        languages.cache_clear()
    assert all(veto(a, b) for a, b, _ in GERMAN)


def test_an_empty_language_still_compares_figures_and_code() -> None:
    bare = Language("")
    assert veto("x 5", "x 6", bare) == "number"
    assert veto("run a_b", "run a_c", bare) == "code"
    assert veto("is it not so", "is it so", bare) is None


def test_a_table_that_no_guard_knows_is_named() -> None:
    with pytest.raises(
        ValueError, match=r"de\.toml: no guard knows negation; the tables are .*negations"
    ):
        Language('[grammar]\nnegation = "nicht"', "de.toml")


MARKS = st.sampled_from(
    "not no 5 km miles two hundred and from to by was left right Monday May 3 pm % $ ' \" ` ( ) foo() a_b --x C++ 's ? "
    ", who what how many did dog cat Paris bites less than as 1,000 15:00 2024-05-01 ½ ² İ ß ﷺ . - / 's' US "
    "will must may I you they than Polish polish HELLO hello letters third 5+3 unless every other hotter "
    "hottest up to at least within before after look turn in over for required recommended only even could can had "
    "userId userID a/b b/a 😂 😭 %d %s "
    "spell translate Co CO LN-5A LN-5 web01 web-01 branch Prod prod H. W. many r as more him he if me my us bit bitten "
    "safe unsafe larger smaller over under + < > <> ** = AND OR km/h m/s per hour pounds lb kg £ quarter half past six "
    "ago AC alternating current asked ask of 'a%' '%a' x² → percentage points won wins A. d. deploy".split()
)
TEXTS = st.one_of(st.text(max_size=40), st.lists(MARKS, max_size=12).map(" ".join))


@given(TEXTS, TEXTS)
@example("'s", "5")
@example("1" * 5000, "1e999")
def test_neither_veto_nor_wording_depends_on_which_text_came_first(a: str, b: str) -> None:
    assert (veto(a, b) is None) == (veto(b, a) is None)
    assert veto(a, b) in (None, *REASONS)
    assert wording(a, b) == wording(b, a)
    assert all(
        0.0 <= part <= most for part, most in zip(wording(a, b), (8.0, 1.0, 1.0), strict=True)
    )


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ("Is there a dark mode?", "Do you have a dark mode?", True),
        ("How can I make money online?", "Can you make money online?", False),
        ("Does the dog chase the cat?", "Does the cat chase the dog?", False),
        ("Is there a dark mode?", "Is there a dark mode for phones?", False),
        ("How do I clean sand at home?", "How do I clean sandal at home?", False),
    ],
)
def test_the_same_words_ask_for_the_same_kind_of_answer(a: str, b: str, same: bool) -> None:
    assert same_words(a, b) is same
    assert same_words(b, a) is same


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ("How do I bake bread?", "How do I bake bread", (0.0, 0.0, 0.0)),
        ("Is the red cone large?", "Is the red cube large?", (2.0, 1 / 3, 0.0)),
        ("How do I repair a bike?", "How do I fix a bike?", (0.0, 2 / 7, 0.0)),
        ("Does the dog chase the cat?", "Does the cat chase the dog?", (0.0, 0.0, 1.0)),
        ("", "", (0.0, 0.0, 0.0)),
    ],
)
def test_wording_by_hand(a: str, b: str, expected: tuple[float, float, float]) -> None:
    assert wording(a, b) == pytest.approx(expected)


@given(TEXTS)
def test_a_text_never_vetoes_itself(text: str) -> None:
    assert veto(text, text) is None
    around = veto(text, f"  {text}\t")
    assert around in (
        "typing" if asks_of_typing(text) else None,
        "lines" if "\n" in text.strip() else None,
    )
    lines = "\n".join(text.split(" "))
    same = normalise(text) == normalise(lines)
    assert veto(text, lines) in (
        (None,) if same else ("lines", "code", "typing", "unread", "language")
    )


@given(st.lists(MARKS, min_size=2, max_size=12).map(" ".join).filter(str.isascii))
@example("who is US")
@example("WHO is it")
@example("CO web01 web-01")
def test_a_text_typed_in_capitals_or_small_throughout_is_never_vetoed_for_it(text: str) -> None:
    allowed = {
        None,
        *(("code",) if LITERAL.search(text) or {"AND", "OR"} & set(text.split()) else ()),
        *(("typing",) if asks_of_typing(text) else ()),
    }
    assert veto(text, text.upper()) in allowed
    assert veto(text.lower(), text.upper()) in allowed


HOSTILE = [
    "a", "a ", "1", "1 ", '"', '"a" ', "“", "' ", "(", "a.", "/a", "a@", "<", ",", "1,", "not ", "it's ", "twenty ",
    "was by ", "one hundred ", "united states ", "Foo Bar ", "how many ", "` ", "x" * 198 + " ", "/" * 198 + " ",
    "a<" * 99 + " ", "un", "aa_", "3 pm ", "«", "-- ", "a" * 39 + "ing ", "only I ", "spell as ", "a-01b ",
    "branch b2/ ",
]  # fmt: skip


@pytest.mark.parametrize("unit", HOSTILE)
def test_the_time_is_linear_whatever_the_text(unit: str) -> None:
    def work(size: int) -> Callable[[], object]:
        text = unit * (size // len(unit))
        return partial(veto, text, text[::-1] + " end")

    assert_linear(work, 2_000)


def different_words(count: int) -> tuple[str, str]:
    tails = [f"{'abcdefghij'[i % 10]}{i}q" for i in range(count)]
    first, second = (
        " ".join(chr(c + i % 26) + tail for i, tail in enumerate(tails)) for c in (97, 65)
    )
    return first, second


def the_same_in_another_order(count: int) -> tuple[str, str]:
    first, _ = different_words(count)
    return first, " ".join(reversed(first.split()))


def passives_in_another_order(count: int) -> tuple[str, str]:
    subjects, verbs, objects = (
        [
            f"{letter}{''.join('bdfghklmnp'[int(digit)] for digit in str(i))}{end}"
            for i in range(count)
        ]
        for letter, end in (("za", "o"), ("ve", "ed"), ("yu", "o"))
    )
    told = zip(subjects, verbs, objects, strict=True)
    first = " ".join([*(f"{x} was {verb} {y}" for x, verb, y in told), "the end by a fence"])
    return first, " ".join([*subjects, *verbs, *objects, "the end by a fence"])


@pytest.mark.parametrize(
    "texts", [different_words, the_same_in_another_order, passives_in_another_order]
)
def test_the_time_is_linear_in_words(texts: Callable[[int], tuple[str, str]]) -> None:
    assert_linear(lambda count: partial(veto, *texts(count)), 500)


def test_the_time_is_linear_in_numbers_that_miss_their_units() -> None:
    def work(count: int) -> Callable[[], object]:
        first, second = (
            Text(f" {unit} ".join(map(str, range(count))), ENGLISH).quantities
            for unit in ("kg", "km")
        )
        assert differ(first, second, ENGLISH) == "unit"
        return partial(differ, first, second, ENGLISH)

    assert_linear(work, 1_000)
