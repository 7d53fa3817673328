"""The guards' rules by example: the pairs that no row of ``bench/data`` stands for, and how a text is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from semkv import guards
from semkv.cache import SemanticCache
from semkv.config import CacheConfig
from semkv.guards import REASONS, veto
from semkv.guards.language import languages, short_token
from semkv.guards.text import read, short_chunk
from semkv.keys import normalise
from semkv.types import Namespace, Request, TextSegment

CHANGED = [
    ("Is the red cube to the left of the ball?", "Is the red cube to the right of the ball?", "direction"),
    ("Is there a car?", "Is there no car?", "negation"),
    ("How do I cook two eggs?", "How do I cook three eggs?", "number"),
    ("Is it -5 degrees outside?", "Is it 5 degrees outside?", "number"),
    (
        "Is the large blue cone to the left of or to the right of the purple object?",
        "Is it to the right of or to the left of the large blue cone that you see the small purple object?",
        "word order",
    ),
    ("How do I add 5% to a price?", "How do I add 5 to a price?", "unit"),
    ("How far is 5 km?", "How far is 5 miles?", "unit"),
    ("Due 2024-05-01", "Due 2024-06-01", "date"),
    ("Is the pool only open in summer?", "Is the pool open in summer?", "quantity"),
    ("Is the ball red?", "Is the ball blue?", "color"),
    ("How do I enable logging?", "How do I disable logging?", "antonym"),
    ("What does --hard do?", "What does --soft do?", "code"),
    ('Who sang "Hurt"?', 'Who sang "Creep"?', "quote"),
    ("When did the ship sink?", "Why did the ship sink?", "question word"),
    ("Does it cost more than rent?", "Does it cost as much as rent?", "comparison"),
    ("Is it large or small?", "Is it large?", "choice"),
    ("Put the key in the box", "Put the key on the box", "relation"),
    ("Who was beaten by Ann?", "Who beat Ann?", "word order"),
    ("Is Co toxic to breathe?", "Is CO toxic to breathe?", "case"),
    ("Delete the branch Prod", "Delete the branch prod", "case"),
    ("What may the user Admin do?", "What may the user admin do?", "case"),
    ("Restart web01 now", "Restart web-01 now", "code"),
    ("Where is main.py?", "Where is Main.py?", "code"),
    ("Merge the branch feature/login", "Merge the branch feature/log-in", "code"),
    ("How do you spell color?", "How do you spell colour?", "substitution"),
    ("How many r's are in cherry?", "How many r's are in cherries?", "substitution"),
    ("What rhymes with sad?", "What rhymes with unhappy?", "substitution"),
    ("What is the German word for child?", "What is the German word for children?", "substitution"),
    ("How do I say I love my cat in French?", "How do I say I loved my cat in French?", "tense"),
    ("Translate I can swim into Welsh", "Translate I could swim into Welsh", "tense"),
    ("When may I leave the exam?", "When must I leave the exam?", "modality"),
    ("Who can vote in the meeting?", "Who should vote in the meeting?", "modality"),
    ("Who has the key to the shed?", "Who had the key to the shed?", "tense"),
    ("Who is winning the election?", "Who won the election?", "tense"),
    ("He might come", "He will come", "modality"),
    ("Open the file README.md", "Open the file readme.md", "code"),
    ("Can mammoths swim?", "Could mammoths swim?", "tense"),
    ("What should I do if my boss lies to me?", "What should I do if I lie to my boss?", "person"),
    ("Why is my mom so mean to me?", "Why am I so mean to my mom?", "person"),
    ("How can I stop my brother hitting me?", "How can I stop hitting my brother?", "person"),
    ("Only I saw Ann", "I only saw Ann", "word order"),
    ("Is she the only doctor?", "Is she only the doctor?", "word order"),
    ("Is iron more brittle than steel?", "Is iron as brittle as steel?", "comparison"),
    ("Does tea have more sugar than milk?", "Does tea have as much sugar as milk?", "comparison"),
    ("Track loan LN-5567", "Track loan LN-5567A", "entity"),
    ("Where is gate 12?", "Where is gate 12A?", "entity"),
    ("Who was George W. Bush?", "Who was George H. W. Bush?", "entity"),
    ("Polish furniture tips", "polish furniture tips", "case"),
    ("What did A. Weber invent?", "What did Weber invent?", "entity"),
    ("Deploy to Prod now", "Deploy to prod now", "case"),
    ("How do I deploy My-App?", "How do I deploy MyApp?", "code"),
    ("What will happen if I stop?", "What would happen if I stop?", "tense"),
    ("Can you tell me when it closed?", "Can you tell me why it closed?", "question word"),
    ("When is the pool open?", "Is the pool open?", "question word"),
    ("What did C.S. Lewis write?", "What did C.D. Lewis write?", "entity"),
    ("WHO IS THE KING?", "WHERE IS THE KING?", "question word"),
    (
        "We went to Oslo and to Rome. What did we see in Oslo?",
        "We went to Oslo and to Rome. What did we see in Rome?",
        "entity",
    ),
    ("How do I cook turkey for Christmas?", "How do I cook Turkish for Christmas?", "entity"),
    ("Who founded the club?", "Who funded the club?", "substitution"),
    ("Is he short for a goalkeeper?", "Is he mean for a goalkeeper?", "substitution"),
    ("Are you allowed to park here?", "Do you have to park here?", "modality"),
    ("Do I need to file taxes?", "Do I want to file taxes?", "modality"),
    ("You do not have to pay", "You must not pay", "modality"),
    ("Take two tablets every 4 hours", "Take four tablets every 2 hours", "number"),
    ("Is prednisone safe for the liver?", "Is prednisolone safe for the liver?", "substitution"),
    ("Who is the principal of the school?", "Who is the principle of the school?", "substitution"),
    ("deploy to Prod", "deploy to prod", "case"),
    ("What is an example of irony?", "What is a definition of irony?", "antonym"),
    ("Who passed?", "Who failed to pass?", "negation"),
    ("What shape is the large orange object?", "What shape is the orange object?", "entity"),
    ("Is there a green ball and a ring?", "Is there a ball and a green ring?", "word order"),
    ("Have the cone and the ball the same color?", "Have the cone and the ball different colors?", "antonym"),
    ("Who is the president of France?", "Who is the former president of France?", "entity"),
    ("What is the dose of aspirin?", "What is the lethal dose of aspirin?", "quantity"),
    ("What is the latest release?", "What is the first release?", "direction"),
]

SAME = [
    ("It is due 2024-05-01", "It is due 1 May 2024"),
    ("Where is Turkey?", "where is turkey?"),
    ("Do I need a visa for Peru?", "Is a visa required for Peru?"),
    ("Should I rinse rice?", "Do I need to rinse rice?"),
    ("How big is the Pacific Ocean?", "What is the size of the Pacific Ocean?"),
    ("Are there both a cone and a green cube?", "Are there both a green cube and a cone?"),
    ("Is it possible to swim there?", "Can I swim there?"),
    ("How do I connect my iPhone to the car?", "how do i connect my iphone to the car"),
    ("How do I install Node.js?", "how do I install node.js?"),
    ("What is the best hotel booking site?", "What is the best site to book hotels?"),
    ("Keep rows where a <> 0", "Keep rows where a != 0"),
    ("How do I hem a pair of jeans?", "How do I hem jeans?"),
    ("How do you spell receive?", "What is the spelling of receive?"),
    ("How many letters are in strawberry?", "How many letters does strawberry have?"),
    ("Can you translate I love you into French?", "Could you translate I love you to French?"),
    ("How do I use an iPhone15?", "How do I use an iPhone-15?"),
    ("What can I do about mold?", "What should I do about mold?"),
    ("When should I plant tomatoes?", "When can I plant tomatoes?"),
    ("Has my parcel arrived?", "Did my parcel arrive?"),
    ("My boss lies to me. What can I do?", "What can I do if my boss lies to me?"),
    ("Is the pool only open in summer?", "Is the pool open only in summer?"),
    ("Is it for members only?", "Is it only for members?"),
    ("Is Tom taller than Ann?", "Is Ann shorter than Tom?"),
    ("Is a 5A fuse enough?", "Is a 5 amp fuse enough?"),
    ("Track loan LN-5567A", "Track my loan LN-5567a"),
    ("What happened in the mid-1980s?", "What happened in the mid 1980s?"),
    ("Who was George W. Bush?", "who was george w bush"),
    ("Polish is hard to learn", "It is hard to learn Polish"),
    ("How do I get a US visa?", "HOW DO I GET A US VISA?"),
    ("Turkey has how many lakes?", "How many lakes has Turkey?"),
    ("Can you tell me if I should sell?", "Should I sell?"),
    ("How does one keep his or her job?", "How do I keep my job?"),
    ("I was ill. Will I get paid?", "I was ill. Do I get paid?"),
    ("Take 10-15 drops", "Take 10 to 15 drops"),
    ("Is it -5 degrees outside?", "Is it minus 5 degrees outside?"),
    ("Balance H2 + O2 -> H2O", "Balance H2 + O2 → H2O"),
    ("Factor x^2 - 9 now, please", "Factor x² - 9 now, please"),
    ("How do I heat a 10 m² room?", "How do I heat a 10 square metre room?"),
    ("How long does it take to fill 3 m³?", "How long does it take to fill 3000 litres?"),
]


@pytest.mark.parametrize(("a", "b", "reason"), CHANGED)
def test_a_changed_question_is_vetoed_and_says_why(a: str, b: str, reason: str) -> None:
    assert veto(a, b) == veto(b, a) == reason
    assert reason in REASONS


@pytest.mark.parametrize(("a", "b"), SAME)
def test_a_rewording_passes(a: str, b: str) -> None:
    assert veto(a, b) is None
    assert veto(b, a) is None


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a well-known and/or one - on 2024-05-01", ("-",)),
        ("i <= n && j != 2", ("!=", "&&", "<=")),
        ("if a>=b: x=1", ("=", ">=")),
        ("5 + 3 is 8", ("5+3",)),
        ("paid AND sent", ("AND",)),
        ("x³ and 5 m²", ("^",)),
        ("- a point", ()),
        ("what?! no...", ()),
    ],
)
def test_operators_by_hand(text: str, found: tuple[str, ...]) -> None:
    assert read(text, languages()[0]).operators == found


@pytest.mark.parametrize(
    ("text", "dimension", "value"),
    [
        ("3 kilometres", "length", 3000.0),
        ("3 µg", "mass", 3e-6),
        ("36 km/h", "length/second", 10.0),
        ("10 metres per second", "length/second", 10.0),
        ("5 mg/dL", "mass/volume", 0.05),
        ("5 kJ", "energy", 5000.0),
        ("20 percentage points", "points", 20.0),
    ],
)
def test_a_unit_has_a_dimension_and_a_value(text: str, dimension: str, value: float) -> None:
    (found,) = read(text, languages()[0]).quantities.found
    assert (found.dimension, found.value) == (dimension, pytest.approx(value))


def test_a_deletion_takes_the_pieces_of_users_texts_from_memory(tmp_path: Path) -> None:
    cache = SemanticCache(CacheConfig(tmp_path, semantic=False))
    cache.add_observation(cache.try_reuse(Request("1", Namespace(), (TextSegment("Who is Ann?"),))), "a friend")
    assert veto("Who is Ann?", "Who is Bob?")
    cache.invalidate(namespace=Namespace(), dry_run=True)
    assert all(remembered.cache_info().currsize for remembered in guards._CACHES)
    cache.invalidate(namespace=Namespace())
    cache.close()
    assert not any(remembered.cache_info().currsize for remembered in guards._CACHES)


def test_long_chunks_and_words_are_not_remembered() -> None:
    guards.forget()
    assert [t.word for t in read(f"{'c1' * 13} {'b' * 25}", languages()[0]).tokens] == [*["c", "1"] * 13, "b" * 25]
    assert short_chunk.cache_info().currsize == 0
    assert short_token.cache_info().currsize == 2


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("What does len('a  b') give?", "What does len('a b') give?"),
        ("sed 's/  / /' notes.txt", "sed 's/ / /' notes.txt"),
        ("What does len('é  b') give?", "What does len('é b') give?"),
        ("What does this print:\nif x:\n  y()\nz()", "What does this print:\nif x:\n  y()\n  z()"),
    ],
)
def test_white_space_counts_in_code_and_quotations(a: str, b: str) -> None:
    assert veto(a, b) == veto(b, a) == "code"
    assert veto("How tall is it?\nAnswer in metres.", "How tall is it? Answer in metres.") is None


@pytest.mark.parametrize(
    "text", ["Polish furniture tips", "March on Rome", "Reading tips", "Windows crashed", "May flowers are blue"]
)
def test_a_capital_at_the_start_stays_where_it_tells_a_name_from_a_word(text: str) -> None:
    small = text[0].lower() + text[1:]
    assert normalise(text) != normalise(small)
    assert normalise(f"I am new. {text}") != normalise(f"I am new. {small}")
    assert veto(text, small) == "case"
    assert normalise(text.title()) != normalise(text.lower()) != normalise(text.upper())
    assert normalise("How do I polish silver?") == normalise("how do I polish silver?")
