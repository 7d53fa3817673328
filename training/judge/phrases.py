"""What generated requests are made of: verbs, things, what describes them, and frames around them.

Words between slashes mean the same here. Neighbors in a list are close in meaning and still other things, so that one
put in the place of another makes a hard trap.
"""

from __future__ import annotations

Alternatives = tuple[str, ...]


def _lists(text: str) -> tuple[Alternatives, ...]:
    entries = (entry for entry in text.replace("\n", " ").split(";") if entry.strip())
    return tuple(tuple(part.strip() for part in entry.split("/")) for entry in entries)


VERBS = _lists(
    """
open/set up; close/shut down; freeze/block; unfreeze/unblock; activate; deactivate; replace; renew; extend; shorten;
order/request; cancel/call off; return/send back; exchange/swap; refund; dispute; confirm; verify/check; report;
transfer/send; receive/get; deposit/pay in; withdraw/take out; increase/raise; lower/reduce; change/edit; update;
delete/remove; restore/recover; archive; export; import; download; upload; share; hide; print; scan; sign; copy;
move/relocate; rename; merge; split; link/connect; unlink/disconnect; lock; unlock; mute; unmute; install; uninstall;
book/reserve; postpone/put off; move forward; attend; skip; join; leave; apply for; drop; add; appeal; submit/hand in;
correct; grade; repeat/retake; pass; fail; take/use; stop taking; start taking; store/keep; throw away; clean/wash;
dry; repair/fix; assemble/put together; take apart; paint; measure; weigh; charge; insure; rent; buy/purchase; sell;
lend; borrow; pay; pay off; find/locate; lose; track/follow; invite; remove access to; give access to; translate;
cook; freeze solid; reheat/warm up; plant; water; prune; feed; train; adopt; test; compare; choose/pick; avoid;
prevent; treat; cause"""
)

THINGS = _lists(
    """
account; savings account; joint account; business account; debit card; credit card; gift card; credit limit;
overdraft; PIN; password; user name/login name; email address; phone number/telephone number; home address;
billing address; delivery address; mortgage; car loan; student loan; statement/account statement; invoice/bill;
receipt; refund; deposit; check; direct debit; standing order; wire transfer; exchange rate; interest rate; tax return;
insurance; travel insurance; policy; claim; pension; order; parcel/package; shipment; delivery; warranty/guarantee;
coupon/voucher; subscription/membership; trial; sofa/couch; armchair; table; shelf; mattress; lamp; jacket; shoes;
dress; fridge/refrigerator; freezer; oven; dishwasher; washing machine/washer; dryer; blender; toaster; laptop; tablet;
phone/smartphone; charger; battery; screen; keyboard; printer; router; camera; bicycle/bike; car; tire; brake;
appointment; prescription; referral; vaccination/shot; blood test; X-ray; biopsy; surgery/operation; wound; rash;
headache; fever; cough; migraine; ankle; knee; tooth; braces; inhaler; antibiotic; painkiller; antidepressant;
vitamin D; iron tablets; diet; pregnancy test; course/class; seminar; lecture; exam/examination; midterm; homework;
essay; thesis; project; grade/mark; transcript; diploma; scholarship; tuition; dorm room; library card; parking permit;
school bus; locker; report card; permission slip; file; folder; document; spreadsheet; cell; chart; backup; update;
app/application; browser; extension; database; table; index; query; server; client; branch; commit; pull request;
repository; API key; token; certificate; workspace; channel; message; group chat; calendar; meeting/call; contact;
notification; dark mode; keyboard shortcut; tomato plant; rose; lawn; dog; cat; puppy; rice; chicken; bread; soup"""
)

DESCRIBED = """
new old used virtual lost stolen expired damaged wrong missing shared private public personal professional online
mobile daily weekly monthly yearly minimum maximum first second last next previous free paid premium basic standard
express international domestic local foreign electric manual wireless small large blue red green black white left right
upper lower front back hot cold frozen fresh raw cooked dry wet temporary permanent partial full automatic secure
encrypted archived deleted duplicate broken open pending final digital printed organic children's company colleague's
husband's mother's neighbor's""".split()

TAILS = _lists(
    """
online/on the internet; by phone/over the phone; by email; in person; at a branch; at an ATM; at home; at work; abroad;
in Germany; in Canada; in Japan; before the surgery; after the surgery; during pregnancy/while pregnant;
before breakfast; after meals; on weekends; on weekdays; at night; in the morning; today; tomorrow;
next week; this month; next year;
without a receipt; with a receipt; without an account; with a gift card; in cash; with a credit card;
for free/free of charge;
for a fee; for two people; for a child; for an adult; for a company; for my husband; for my mother; for a friend;
on my phone; on my computer; on a Mac; on Windows; on Linux; in the app; on the website; from another bank;
to another bank; to another account; from my savings; within the warranty; after the warranty; before it ships;
after it has shipped; in advance; at the last minute; more than once; only once; within 14 days; within 30 days;
after 2 years; under 100 dollars; over 100 dollars; automatically; by hand; in Excel; in Python; in the dark"""
)

# {x} is an action, {n} a thing.
ACTION_FRAMES = (
    (
        "How do I {x}?",
        "How can I {x}?",
        "What do I have to do to {x}?",
        "What do I need to do to {x}?",
        "What is the best way to {x}?",
        "What's the way to {x}?",
        "What are the steps to {x}?",
        "I want to {x}. How do I do that?",
        "I need to {x}. How?",
        "Can you tell me how to {x}?",
        "how to {x}",
        "Could you explain how to {x}?",
    ),
    (
        "Can I {x}?",
        "Is it possible to {x}?",
        "Am I able to {x}?",
        "Is there a way for me to {x}?",
        "Could you tell me whether I can {x}?",
    ),
    ("Am I allowed to {x}?", "May I {x}?", "Is it allowed to {x}?", "Do I have permission to {x}?"),
    (
        "Should I {x}?",
        "Is it a good idea to {x}?",
        "Would you recommend that I {x}?",
        "Would it make sense to {x}?",
    ),
    (
        "Do I have to {x}?",
        "Must I {x}?",
        "Is it necessary to {x}?",
        "Am I required to {x}?",
        "Is it mandatory to {x}?",
    ),
    (
        "What happens if I {x}?",
        "What will happen if I {x}?",
        "If I {x}, what happens?",
        "What are the consequences if I {x}?",
    ),
    ("What happens if I do not {x}?", "If I don't {x}, what happens?"),
    ("How long does it take to {x}?", "How much time does it take to {x}?"),
    ("How much does it cost to {x}?", "What does it cost to {x}?", "What is the cost to {x}?"),
    ("How often should I {x}?", "How often do I need to {x}?", "How many times should I {x}?"),
    (
        "When can I {x}?",
        "When am I able to {x}?",
        "At what time can I {x}?",
        "What is the earliest time I can {x}?",
    ),
    ("Where can I {x}?", "Where do I {x}?", "Where is it possible to {x}?"),
    ("Who can {x}?", "Who is able to {x}?"),
    (
        "Why can't I {x}?",
        "Why am I not able to {x}?",
        "Why is it not possible to {x}?",
        "I cannot {x}. Why?",
    ),
    ("Why do I have to {x}?", "Why is it necessary to {x}?"),
    ("Is it safe to {x}?", "Can I safely {x}?", "Is it okay to {x}?"),
    (
        "Do I need an account to {x}?",
        "Is an account needed to {x}?",
        "Must I have an account to {x}?",
    ),
    ("What documents do I need to {x}?", "Which documents are needed to {x}?"),
)

THING_FRAMES = (
    ("Where is my {n}?", "Can you tell me where my {n} is?", "Where can I find my {n}?"),
    ("How much is the {n}?", "What does the {n} cost?", "What is the price of the {n}?"),
    (
        "Do you have a {n}?",
        "Is there a {n}?",
        "Do you offer a {n}?",
        "Is a {n} something you offer?",
    ),
    ("When does the {n} start?", "When will the {n} begin?", "What is the start of the {n}?"),
    ("When does the {n} end?", "When will the {n} be over?"),
    ("When will my {n} arrive?", "When is my {n} going to arrive?", "When does my {n} arrive?"),
    (
        "What is a {n}?",
        "What's a {n}?",
        "Can you explain what a {n} is?",
        "Tell me what a {n} is.",
    ),
    ("Why was my {n} rejected?", "What is the reason that my {n} was rejected?"),
    ("Why is my {n} late?", "For what reason is my {n} late?"),
    ("Is the {n} included?", "Does it include the {n}?", "Does the {n} come with it?"),
    ("Who needs a {n}?", "Which people need a {n}?"),
    (
        "My {n} is not working. What can I do?",
        "What can I do if my {n} is not working?",
        "What should I do when my {n} does not work?",
    ),
    (
        "What are the disadvantages of a {n}?",
        "What are the drawbacks of a {n}?",
        "Which disadvantages does a {n} have?",
    ),
    (
        "What are the advantages of a {n}?",
        "What are the benefits of a {n}?",
        "Which advantages does a {n} have?",
    ),
    ("How does a {n} work?", "In what way does a {n} work?", "Explain how a {n} works."),
    ("How long does a {n} last?", "For how long does a {n} last?"),
    (
        "What is the difference between a {n} and a {m}?",
        "How does a {n} differ from a {m}?",
        "How do a {n} and a {m} differ?",
    ),
    ("Is a {n} better than a {m}?", "Should I choose a {n} over a {m}?"),
)

POLITE = (
    "Please tell me: {t}",
    "Hi, {t}",
    "Hello! {t}",
    "{t} Thanks!",
    "{t} Thank you.",
    "um, {t}",
    "So, {t}",
)

SENTENCES = """
I have been a customer for six years and never had a problem.
My brother recommended you to me last spring.
We moved to a smaller flat in the old town two months ago.
I read the leaflet twice, but it does not mention my case.
The weather has been terrible, so I could not come by.
There are four of us, and the youngest is three years old.
I usually work until six and can be reached after that.
My last visit was at the beginning of October.
I have a copy of the letter and can send it to you.
The lady on the phone was friendly but could not help me.
I would like to settle this before the holidays.
It worked well for about a year.
Nobody else in my team has this trouble.
We have compared three offers so far.
I do not mind waiting for a few days.
My neighbor had the same question last year.
I am not good with computers, so please keep it simple.
I live half an hour away and have no car.
The screen shows a yellow sign in the upper corner.
My budget is limited, but quality matters to me.
I have attached two photographs of it.
It is for my mother, who turns seventy in June.
I tried it on another machine with the same result.
The deadline is at the end of next week.
As far as I know, nothing has changed since then.
""".strip().split("\n")
