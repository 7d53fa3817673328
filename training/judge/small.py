"""One small change of a text: of those that change what is asked, and of those that do not."""

from __future__ import annotations

import re
from random import Random

_CHANGES = (  # what is written, and what may stand in its place and asks for something else
    (r"\bmy\b", ("a", "your", "his", "her", "our")),
    (r"\byour\b", ("my", "their", "a")),
    (r"\ba\b(?! few| lot)", ("my", "your", "every", "no")),
    (r"\bbefore\b", ("after", "during")),
    (r"\bafter\b", ("before", "during")),
    (r"\bwith\b", ("without", "from", "like", "for")),
    (r"\bwithout\b", ("with",)),
    (r"\bfor\b", ("from", "with", "by", "of", "in", "without")),
    (r"\bfrom\b", ("to", "for", "with", "in")),
    (r"\bto (?=the\b|my\b|a\b|your\b)", ("from ", "for ", "with ")),
    (r"\bin\b", ("from", "near", "outside", "without", "to")),
    (r"\bof\b", ("by", "for", "from", "without")),
    (r"\bby\b", ("for", "of", "without", "until")),
    (r"\bon\b", ("off", "under", "before", "after")),
    (r"\babout\b", ("for", "without", "before")),
    (r"\buntil\b", ("when", "since", "after")),
    (r"\bwhen\b", ("where", "why", "before", "until")),
    (r"\bis\b", ("was", "will be", "is not")),
    (r"\bare\b", ("were", "will be", "are not")),
    (r"\bdoes\b", ("did", "will", "could")),
    (r"\bdo\b", ("did", "will")),
    (r"\bdid\b", ("does", "will")),
    (r"\bcan I\b", ("can you", "can we", "should I", "could they", "must I", "can I only")),
    (r"\bCan I\b", ("How can I", "Can you", "Should I", "When can I", "Why can I", "Must I")),
    (
        r"\bHow do I\b",
        ("Why do I", "When do I", "Where do I", "How often do I", "Do I", "How did I"),
    ),
    (r"\bHow can I\b", ("Why can I", "When can I", "Where can I", "Can I", "How can't I")),
    (r"\bHow do I\b(?=.* my )", ("How do you", "How does he", "How do they")),
    (r"\bShould I\b", ("Can I", "When should I", "Why should I", "Should I not")),
    (r"\bshould I\b", ("can I", "should you", "should I not", "did I")),
    (r"\bWhat is\b", ("Where is", "Who is", "What was", "Why is", "Is there", "What is not")),
    (r"\bWho\b", ("When", "Why", "What")),
    (r"\bWhen\b", ("Where", "Why", "How", "Until when", "Since when")),
    (r"\bWhere\b", ("When", "Why", "How")),
    (r"\bWhy\b", ("When", "How", "Where")),
    (r"\bHow long\b", ("How often", "How far", "How soon")),
    (r"\bHow much\b", ("How many", "How often", "How little")),
    (r"\bget\b", ("take", "use", "have", "need", "give", "sell", "lose", "make", "want")),
    (r"\btake\b", ("get", "use", "have", "need", "give", "avoid", "bring", "store")),
    (r"\buse\b", ("get", "take", "need", "buy", "make", "avoid", "have")),
    (r"\bhave\b", ("need", "lose", "want", "use", "give")),
    (r"\bneed\b", ("have", "use", "want", "like", "lose")),
    (r"\bmake\b", ("get", "buy", "use", "break", "need")),
    (r"\bbuy\b", ("sell", "rent", "use", "make", "return")),
    (r"\bfind\b", ("lose", "hide", "make", "choose")),
    (r"\bsend\b", ("get", "read", "delete", "receive")),
    (r"\bput\b", ("take", "keep", "see")),
    (r"\bkeep\b", ("lose", "get", "buy", "leave")),
    (r"\badd\b", ("remove", "find", "copy")),
    (r"\bchange\b", ("keep", "find", "check", "lose")),
    (r"\bone\b", ("two", "every", "any", "no")),
    (r"\btwo\b", ("three", "one", "both", "ten")),
    (r"\ball\b", ("some", "none of", "most of", "only")),
    (r"\bbest\b", ("worst", "second best", "cheapest", "usual")),
    (r"\bmost\b", ("least", "all", "many")),
    (r"\bfirst\b", ("last", "second", "only")),
    (r"\bnew\b", ("old", "second", "used", "own")),
    (r"\bthis\b", ("that", "my", "every", "last")),
    (r"\bto (?=[a-z]+\b)", ("not to ", "only to ")),
    (r"\b(?=\w+ing\b)", ("not ", "only ")),
)
_KEPT = (  # what may stand in place of each other, and asks for the same
    ("How do I", "How can I"),
    ("How do I", "What is the way to"),
    ("How do I", "How should I go about it if I want to"),
    ("What is", "What's"),
    ("I want to", "I would like to"),
    ("I want to", "I'd like to"),
    ("cannot", "can't"),
    ("does not", "doesn't"),
    ("do not", "don't"),
    ("is not", "isn't"),
    ("Is it possible to", "Can I"),
    ("Am I able to", "Can I"),
    ("Do I need to", "Do I have to"),
    ("Must I", "Do I have to"),
    ("Is it necessary to", "Do I have to"),
    ("buy", "purchase"),
    ("get rid of", "remove"),
    ("picture", "photo"),
    ("film", "movie"),
    ("begin", "start"),
    ("big", "large"),
    ("fix", "repair"),
    ("phone", "telephone"),
    ("kid", "child"),
    ("allowed to", "permitted to"),
    ("What kind of", "What sort of"),
    ("How quickly", "How fast"),
    ("How frequently", "How often"),
    ("a day", "per day"),
    ("a week", "per week"),
    ("right now", "at the moment"),
    ("nearby", "near me"),
    ("sick", "ill"),
    ("quickly", "fast"),
    ("on the internet", "online"),
    ("without paying", "for free"),
)
_ADDED = tuple(  # phrases behind a question that change what is asked
    """in Canada; in India; in the US; in Texas; in my city; at home; at work; at school; online; by phone; in person;
    on weekends; on Sundays; at night; in summer; in winter; today; this week; next year; in 2019; in 2024; for free;
    for beginners; for kids; for a company; for two people; for my mother; for my dog; as a student; as a foreigner;
    as a woman; without money; without a car; without internet; without help; with a friend; with diabetes; with kids;
    on a budget; before the holidays; after a divorce; after retirement; during a pandemic; in one day; in a month;
    on my phone; on Linux; from another country; a second time; every day; with cash; by myself""".replace(
        "\n   ", ""
    ).split("; ")
)
_CHANGED = [(re.compile(pattern), others) for pattern, others in _CHANGES]
_EITHER = [
    (re.compile(rf"\b{re.escape(one)}\b"), other)
    for pair in _KEPT
    for one, other in (pair, pair[::-1])
]
_ARTICLE = re.compile(r"\ba (?=[aeio])")


def trap(text: str, random: Random) -> str | None:
    """The text with one small word changed, so that it asks for something else; None where it has none."""
    fitting = [(pattern, others) for pattern, others in _CHANGED if pattern.search(text)]
    if not fitting:
        return None
    pattern, others = random.choice(fitting)
    found = pattern.sub(random.choice(others), text, count=1)
    return None if found == text else _ARTICLE.sub("an ", found)


def kept(text: str, random: Random) -> str:
    """The text with a word or two changed, so that it asks for the same."""
    for _ in range(random.randrange(1, 3)):
        fitting = [(pattern, other) for pattern, other in _EITHER if pattern.search(text)]
        if not fitting:
            return text
        pattern, other = random.choice(fitting)
        text = pattern.sub(other, text, count=1)
    return text


def with_phrase(text: str, random: Random, but: str = "") -> tuple[str, str]:
    """The text with a phrase behind it that changes what is asked, and the phrase; ``but`` is one that it is not."""
    phrase = random.choice([added for added in _ADDED if added != but])
    return ending(text, phrase), phrase


def ending(text: str, phrase: str) -> str:
    """The text with a phrase before its last mark."""
    body = text.rstrip("?.! ")
    return f"{body} {phrase}{text[len(body) :].strip()}"
