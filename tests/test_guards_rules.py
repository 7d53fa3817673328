"""The guards' rules for operators, units, places, speakers and owners, turned comparisons and denied words."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from growth import assert_linear
from semkv import guards
from semkv.cache import SemanticCache
from semkv.config import CacheConfig
from semkv.guards import REASONS, veto, wording
from semkv.guards.language import languages, short_token
from semkv.guards.text import read, short_chunk
from semkv.keys import normalise
from semkv.types import Namespace, Request, TextSegment

CHANGED = [
    ("Keep rows where a > 0 and b", "Keep rows where a < 0 and b", "code"),
    ("What does x ** 2 give?", "What does x * 2 give?", "code"),
    ("What does m*n give?", "What does m.*n give?", "code"),
    ("Run it for (k = 0; k < 9; k++)", "Run it for (k = 0; k <= 9; k++)", "code"),
    ("Find rows where sent AND paid", "Find rows where sent OR paid", "code"),
    ("Pipe ls > all", "Pipe ls >> all", "code"),
    ("Which names are LIKE 'an%'?", "Which names are LIKE '%an'?", "quote"),
    ("Train it for 4 epochs", "Train it for 4 steps", "unit"),
    ("Is 30 psi enough?", "Is 30 kPa enough?", "unit"),
    ("How fast is it in km/h?", "How fast is it in m/s?", "unit"),
    ("How much is it in mmol/L?", "How much is it in mg/dL?", "unit"),
    ("It rose by 3 percent", "It rose by 3 percentage points", "unit"),
    ("It holds 4 kJ", "It holds 4 kcal", "unit"),
    ("Did he use his foot to stop it?", "Did he use his hand to stop it?", "substitution"),
    ("We went to Oslo and to Rome. What did we see in Oslo?", "We went to Oslo and to Rome. What did we see in Rome?",
     "entity"),
    ("The box holds nuts and bolts. What are the nuts for?", "The box holds nuts and bolts. What are the bolts for?",
     "substitution"),
    ("There is candle wax on my coat", "There is lipstick on my coat", "substitution"),
    ("My rash itches. How do I treat the rash?", "My wart itches. How do I treat the wart?", "substitution"),
    ("How do I treat nitrate in water?", "How do I treat nitrite in water?", "substitution"),
    ("My boss owes me money", "I owe my boss money", "person"),
    ("Can my aunt ask me to leave?", "Can I ask my aunt to leave?", "person"),
    ("The hotel cancelled my stay", "I cancelled my stay with the hotel", "person"),
    ("My friend is older than me", "I am older than my friend", "word order"),
    ("Ann's dog chased my cat", "My dog chased Ann's cat", "person"),
    ("By which kings was Rome beaten?", "Which kings was Rome beating?", "word order"),
    ("Can a judge refuse to hear a lawyer?", "Can a lawyer refuse to be heard by a judge?", "word order"),
    ("Who was beaten by Ann?", "Who beat Ann?", "word order"),
    ("Show sales from yesterday", "Show sales from the day before yesterday", "date"),
    ("Who won in the year the war ended?", "Who won in the year after the war ended?", "date"),
    ("Wake me at quarter past six", "Wake me at quarter to six", "number"),
    ("We meet at 2:15 p.m. today", "We meet at 2:15 a.m. today", "number"),
    ("What was the rate this month?", "What was the rate this month a year ago?", "date"),
    ("We are two goals ahead", "We are two goals behind", "direction"),
    ("Round it up to the next ten", "Round it down to the next ten", "direction"),
    ("which birds lay eggs", "which birds dont lay eggs", "negation"),
    ("Is gold heavier than lead?", "Is gold lighter than lead?", "comparison"),
    ("What is on today?", "What is on tonight?", "date"),
    ("How do I say hello in Thai?", "How do I say goodbye in Thai?", "antonym"),
    ("Who founded the club?", "Who funded the club?", "substitution"),
    ("Did I add too much salt?", "Did I add too little salt?", "quantity"),
    ("How do I write a while loop?", "How do I write a for loop?", "substitution"),
    ("Which tribes border Peru?", "Which tribes bordered Peru?", "tense"),
    ("What is she looking for?", "What is she looking at?", "relation"),
    ("How far is 7 miles at sea?", "How far is 7 nautical miles at sea?", "unit"),
    ("The line does 50 Mbps", "The line does 50 MBps", "case"),
    ("List birds that hunt snakes", "List birds that snakes hunt", "word order"),
    ("Copy the daily report into main", "Copy main into the daily report", "word order"),
    ("If A causes B, is A rare?", "If A causes B, is B rare?", "entity"),
    ("Can I at home call my aunt?", "Can my aunt call me at home?", "person"),
    ("Spend a Canadian dollar in Mexico", "Spend a Mexican dollar in Canada", "word order"),
    ("Is the referendum binding?", "Is the referendum valid?", "substitution"),
    ("Is the contract valid without a witness?", "Is the contract enforceable without a witness?", "substitution"),
    ("How much does a pair of kidneys weigh?", "How much does a kidney weigh?", "number"),
    ("Where can I buy a pair of tickets?", "Where can I buy a ticket?", "number"),
    ("Can I bring one pair of skis?", "Can I bring two pairs of skis?", "number"),
    ("How do I cook turkey for Christmas?", "How do I cook Turkish for Christmas?", "entity"),
    ("How do I cook turkey soup?", "How do I cook Turkish soup?", "entity"),
    ("Is Irish a language?", "Is Ireland a language?", "entity"),
    ("Who are the Dutch?", "Who are the Netherlands?", "entity"),
    ("Is he short for a goalkeeper?", "Is he mean for a goalkeeper?", "substitution"),
    ("Does RSS work for AIDS news?", "Does rss work for aids news?", "case"),
    ("Which tyres suit a trail bike?", "Which tyres suit a hiking bike?", "substitution"),
    ("Does TCP PET work?", "Does tcp pet work?", "case"),
]  # fmt: skip

SAME = [
    ("Balance H2 + O2 -> H2O", "Balance H2 + O2 → H2O"),
    ("Factor x^2 - 9 now, please", "Factor x² - 9 now, please"),
    ("Keep rows where a <> 0", "Keep rows where a != 0"),
    ("The car drives at 50 km/h", "The car drives at 50 kilometers per hour"),
    ("The car drives at 50 kph", "The car drives at 50 km/h"),
    ("Convert 10 pounds to kilograms", "Convert 10 lb to kg"),
    ("The bag costs 10 pounds", "The bag costs £10"),
    ("It took an hour and a half", "It took 1.5 hours"),
    ("Call me at half past seven", "Call me at 7:30"),
    ("Call me at quarter to one", "Call me at 12:45"),
    ("Meet me at the gate at 3 p.m.", "Meet me at the gate at 15:00"),
    ("The dog bit me", "I was bitten by the dog"),
    ("Did the board appoint her?", "Was she appointed by the board?"),
    ("Is lunch included in the ticket?", "Does the ticket include lunch?"),
    ("What does my policy cover?", "What is covered by my policy?"),
    ("Who was beaten by Ann?", "Whom did Ann beat?"),
    ("When is the deadline for the tax return in the UK?", "What is the UK tax return deadline?"),
    ("Is gold heavier than lead?", "Is lead lighter than gold?"),
    ("Is 3/8 greater than 0.4?", "Is 0.4 less than 3/8?"),
    ("Which roads are unsafe?", "Which roads are not safe?"),
    ("How is the alternating current made?", "How is the AC made?"),
    ("What is the colour of copper sulphate?", "What is the color of copper sulfate?"),
    ("What caused World War I?", "What caused the First World War?"),
    ("How long is the river?", "What's the length of the river?"),
    ("My phone's screen broke", "The screen of my phone broke"),
    ("How do I reset a forgotten code?", "I forgot my code. How do I reset it?"),
    ("What is on this evening?", "What is on tonight?"),
    ("Who founded the club?", "Who established the club?"),
    ("Do bears sleep in caves?", "Do bears sleep inside caves?"),
    ("Do bears sleep in winter?", "Do bears sleep during winter?"),
    ("May I look over the fence?", "May I look across the fence?"),
    ("Can I stand up there?", "Can I stand there?"),
    ("How do I heat a 10 m² room?", "How do I heat a 10 square metre room?"),
    ("How long does it take to fill 3 m³?", "How long does it take to fill 3000 litres?"),
    ("Was Einstein German?", "Was Einstein a German?"),
    ("How do I put away my skis?", "How do I store my skis?"),
    ("What does PVC stand for?", "What is PVC short for?"),
    ("Is it free for babies under one year?", "Is it free for infants under 12 months?"),
    ("How do I pair my watch?", "How do I connect my watch?"),
    ("when do I use udp and tcp?", "when do I use UDP and TCP?"),
    ("Who makes non-toxic paint?", "Who makes nontoxic paint?"),
    ("Is it legal in the U.S. now?", "Is it legal in the US now?"),
    ("Rename a column in pandas", "How do I rename a column in pandas?"),
    ("What is the currency of Turkey?", "What is the Turkish currency?"),
    ("How is the economy of the Netherlands doing?", "How is the Dutch economy doing?"),
    ("How do I hem a pair of jeans?", "How do I hem jeans?"),
    ("How much do a pair of kidneys weigh?", "How much do two kidneys weigh?"),
    ("Does RSS work for UDP?", "Does rss work for udp?"),
    ("what does PVC stand for", "what is PVC short for"),
    ("What do American people eat?", "What do people in America eat?"),
    ("Which watch pairs with my phone?", "Which watch works with my phone?"),
    ("How many pairs of chromosomes do we have?", "How many chromosome pairs do we have?"),
    ("Is the will legally valid in France?", "Is the will legally binding in France?"),
    ("Where is the best hiking trail?", "Where is the best hike?"),
    ("What do Pakistanis think of Indians?", "What do the Pakistanis think about India?"),
]  # fmt: skip


WORDS_AND_IDENTIFIERS = [
    ("Is Co toxic to breathe?", "Is CO toxic to breathe?", "case"),
    ("What is the symbol Hf?", "What is the symbol HF?", "case"),
    ("Delete the branch Prod", "Delete the branch prod", "case"),
    ("What may the user Admin do?", "What may the user admin do?", "case"),
    ("Is the password Secret1 strong?", "Is the password secret1 strong?", "code"),
    ("Restart web01 now", "Restart web-01 now", "code"),
    ("Merge the branch feature/login", "Merge the branch feature/log-in", "code"),
    ("How do you spell color?", "How do you spell colour?", "substitution"),
    ("How many letters are in strawberry?", "How many letters are in strawberries?", "substitution"),
    ("How many r's are in cherry?", "How many r's are in cherries?", "substitution"),
    ("What rhymes with sad?", "What rhymes with unhappy?", "substitution"),
    ("What is the German word for child?", "What is the German word for children?", "substitution"),
    ("How do I say I love my cat in French?", "How do I say I loved my cat in French?", "tense"),
    ("Is the sentence he ran fast grammatical?", "Is the sentence he run fast grammatical?", "tense"),
    ("Translate she has a dog into Thai", "Translate she had a dog into Thai", "tense"),
    ("Translate I can swim into Welsh", "Translate I could swim into Welsh", "tense"),
    ("When may I leave the exam?", "When must I leave the exam?", "modality"),
    ("Which guests may bring pets?", "Which guests must bring pets?", "modality"),
    ("Who can vote in the meeting?", "Who should vote in the meeting?", "modality"),
    ("Who has the key to the shed?", "Who had the key to the shed?", "tense"),
    ("Have they paid the bill?", "Had they paid the bill?", "tense"),
    ("Can mammoths swim?", "Could mammoths swim?", "tense"),
    ("What should I do if my boss lies to me?", "What should I do if I lie to my boss?", "person"),
    ("Why is my mom so mean to me?", "Why am I so mean to my mom?", "person"),
    ("How can I stop my brother hitting me?", "How can I stop hitting my brother?", "person"),
    ("Why does he lie to his boss?", "Why does his boss lie to him?", "person"),
    ("Only I saw Ann", "I only saw Ann", "word order"),
    ("Does just the king move?", "Does the king just move?", "word order"),
    ("Is she the only doctor?", "Is she only the doctor?", "word order"),
    ("Even Tom likes the plan", "Tom even likes the plan", "word order"),
    ("He almost lost all his money", "He lost almost all his money", "word order"),
    ("Is iron more brittle than steel?", "Is iron as brittle as steel?", "comparison"),
    ("Is gold more expensive than silver?", "Is gold as expensive as silver?", "comparison"),
    ("Does tea have more sugar than milk?", "Does tea have as much sugar as milk?", "comparison"),
    ("Track loan LN-5567", "Track loan LN-5567A", "entity"),
    ("Is model ZR900 sold?", "Is model ZR900D sold?", "entity"),
    ("Where is gate 12?", "Where is gate 12A?", "entity"),
    ("Is part X-77G in stock?", "Is part X-77 in stock?", "entity"),
    ("Who was George W. Bush?", "Who was George H. W. Bush?", "entity"),
    ("What did Samuel Jackson win?", "What did Samuel L. Jackson win?", "entity"),
    ("Polish furniture tips", "polish furniture tips", "case"),
    ("Turkey recipes", "turkey recipes", "case"),
    ("May flowers", "may flowers", "case"),
    ("Will was late again", "will was late again", "case"),
    ("Apple pie ideas", "apple pie ideas", "case"),
    ("What did A. Weber invent?", "What did Weber invent?", "entity"),
    ("who is d. weber", "who is weber", "entity"),
    ("Deploy to Prod now", "Deploy to prod now", "case"),
    ("How do I deploy My-App?", "How do I deploy MyApp?", "code"),
    ("Which team wins the cup?", "Which team won the cup?", "tense"),
    ("Why prices rise", "Why prices rose", "tense"),
    ("What will happen if I stop?", "What would happen if I stop?", "tense"),
]

NEARBY = [
    ("How do you spell receive?", "What is the spelling of receive?"),
    ("How do you pronounce quinoa?", "How is quinoa pronounced?"),
    ("How many letters are in strawberry?", "How many letters does strawberry have?"),
    ("What is the plural of ox?", "What's the plural form of ox?"),
    ("Can you translate I love you into French?", "Could you translate I love you to French?"),
    ("How do I reset my Gmail password?", "How do I reset my gmail password?"),
    ("Is my e-mail password safe?", "Is my email password safe?"),
    ("How do I use an iPhone15?", "How do I use an iPhone-15?"),
    ("What can I do about mold?", "What should I do about mold?"),
    ("When should I plant tomatoes?", "When can I plant tomatoes?"),
    ("When must I pay?", "When do I have to pay?"),
    ("Can I get a refund?", "Could I get a refund?"),
    ("Has my parcel arrived?", "Did my parcel arrive?"),
    ("My boss lies to me. What can I do?", "What can I do if my boss lies to me?"),
    ("Is the pool only open in summer?", "Is the pool open only in summer?"),
    ("I only have two hours", "I have only two hours"),
    ("Is it for members only?", "Is it only for members?"),
    ("Is Tom taller than Ann?", "Is Ann shorter than Tom?"),
    ("Is 3D printing slow?", "Is 3d printing slow?"),
    ("Is a 5A fuse enough?", "Is a 5 amp fuse enough?"),
    ("Track loan LN-5567A", "Track my loan LN-5567a"),
    ("What happened in the mid-1980s?", "What happened in the mid 1980s?"),
    ("Who was George W. Bush?", "who was george w bush"),
    ("May I park here?", "may I park here?"),
    ("Polish is hard to learn", "It is hard to learn Polish"),
]


@pytest.mark.parametrize(("a", "b", "reason"), [*CHANGED, *WORDS_AND_IDENTIFIERS])
def test_a_changed_question_is_vetoed_and_says_why(a: str, b: str, reason: str) -> None:
    assert veto(a, b) == veto(b, a) == reason
    assert reason in REASONS


@pytest.mark.parametrize(("a", "b"), [*SAME, *NEARBY])
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


MARKS = st.sampled_from(
    "i me my we us 's dog cat Ann bit bitten by was is not safe unsafe larger smaller than over under + - < > <> ** = "
    "AND OR x 5 km/h m/s per hour pounds lb kg £ quarter half past to six ago before after AC alternating current ? , "
    "asked ask to of in which who does include included 'a%' '%a' x² → percentage points foot hand".split()
)
TEXTS = st.lists(MARKS, max_size=14).map(" ".join)


@given(TEXTS, TEXTS)
def test_veto_and_wording_do_not_depend_on_which_text_came_first(a: str, b: str) -> None:
    assert (veto(a, b) is None) == (veto(b, a) is None)
    assert wording(a, b) == wording(b, a)
    assert veto(a, a) is veto(a, f" {a}  ") is None


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


def test_the_time_is_linear_in_passives_put_in_another_order() -> None:
    def work(count: int) -> Callable[[], object]:
        subjects, verbs, objects = (
            [f"{letter}{''.join('bdfghklmnp'[int(digit)] for digit in str(i))}{end}" for i in range(count)]
            for letter, end in (("za", "o"), ("ve", "ed"), ("yu", "o"))
        )
        told = zip(subjects, verbs, objects, strict=True)
        first = " ".join([*(f"{x} was {verb} {y}" for x, verb, y in told), "the end by a fence"])
        second = " ".join([*subjects, *verbs, *objects, "the end by a fence"])
        return partial(veto, first, second)

    assert_linear(work, 2_000)


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


@pytest.mark.parametrize("text", ["How do I polish silver?", "Delete the file", "Where is my job?"])
def test_the_capital_of_another_start_is_typing(text: str) -> None:
    assert normalise(text) == normalise(text[0].lower() + text[1:])
