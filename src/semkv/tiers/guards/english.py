"""English: the words that the guards know."""

from __future__ import annotations

from types import MappingProxyType

from semkv.tiers.guards.english_content import OPPOSITES, SYNONYMS
from semkv.tiers.guards.english_units import AMBIGUOUS, UNITS
from semkv.tiers.guards.lexicon import Lexicon, merged, senses

_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
).split()
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
_ORDINALS = (
    "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth fourteenth fifteenth "
    "sixteenth seventeenth eighteenth nineteenth twentieth"
).split()

_NUMBERS = MappingProxyType(
    {word: float(n) for n, word in enumerate(_ONES)}
    | {word: 10.0 * n for n, word in enumerate(_TENS, 2)}
    | {word: float(n) for n, word in enumerate(_ORDINALS, 1)}
    | {"half": 0.5, "halves": 0.5, "quarter": 0.25, "quarters": 0.25, "thirds": 1 / 3, "couple": 2.0}
    | {"twice": 2.0, "double": 2.0, "doubles": 2.0, "triple": 3.0, "triples": 3.0, "thrice": 3.0, "thirtieth": 30.0}
    | {"minus": -1.0}
)
_MULTIPLIERS = MappingProxyType(
    {"hundred": 1e2, "thousand": 1e3, "million": 1e6, "billion": 1e9, "trillion": 1e12, "dozen": 12.0, "pair_": 2.0}
    | {"k": 1e3, "mn": 1e6, "bn": 1e9, "lakh": 1e5, "lakhs": 1e5, "crore": 1e7, "crores": 1e7}
    | {"hundreds": 1e2, "thousands": 1e3, "millions": 1e6, "billions": 1e9, "dozens": 12.0}
)

_DATES = MappingProxyType(
    {
        "month": senses(
            "january jan", "february feb", "march mar", "april apr", "may", "june jun", "july jul", "august aug",
            "september sep sept", "october oct", "november nov", "december dec",
        ),
        "weekday": senses(
            "monday mon mondays", "tuesday tue tues tuesdays", "wednesday wed wednesdays",
            "thursday thu thurs thursdays", "friday fri fridays", "saturday sat saturdays", "sunday sun sundays",
        ),
        "day": senses("yesterday", "daybeforeyesterday", "dayaftertomorrow", "today todays", "tonight", "tomorrow"),
        "part": senses("morning mornings", "noon midday", "afternoon afternoons", "evening evenings",
        "midnight", "night nights"),
        "which": senses("last past previous", "this current", "next coming following upcoming"),
        "season": senses("winter winters", "spring", "summer summers", "autumn fall"),
        "feast": senses(
            "christmas xmas", "easter", "halloween", "thanksgiving", "ramadan", "diwali", "hanukkah", "valentine", "eid"
        ),
        "era": senses("bc bce", "ad_ ce ad"),
        "span": senses("weekday weekdays", "weekend weekends"),
    }
)  # fmt: skip

_GROUPS = MappingProxyType(
    {
        "direction": senses("left leftmost", "right rightmost", "above", "below beneath underneath"),
        "color": senses(
            *"red orange yellow green blue purple pink brown black white silver gold beige cyan magenta".split(),
            "gray grey",
        ),
        "quantity": senses("only solely exclusively", "everyother"),
        "date": senses("ago"),
    }
)

_FUNCTION = merged(
    (
        "a an the is are was were be been being am do does did doing done have has had having of to it its this that "
        "these those there here any some such each every what which who whom whose how where when why whether if then "
        "can could would will shall may might must should ought i me my mine we us our ours you your yours he him his "
        "she her hers they them their theirs 's one ones oneself myself yourself yourselves itself themselves himself "
        "herself someone somebody anyone anybody something anything everyone everybody everything people person as "
        "with for by at from and or both either also than so but because since while though although until about into "
        "in on onto upon over under out off up down away back through across during per via within between among "
        "against like not no never too very really quite just even still yet already ever now please exactly actually "
        "basically all other another else own s t d ll re ve m o'clock more most much many lot lots few however "
        "therefore hence thus instead around along above below before after behind without toward towards isn't "
        "aren't wasn't weren't don't doesn't didn't hasn't haven't hadn't won't can't couldn't wouldn't shouldn't "
        "mustn't i'm i've i'd i'll you're you've you'd you'll he'd he'll she'd she'll it'll we're we've isnt arent "
        "wasnt werent dont doesnt didnt hasnt havent hadnt wont cant couldnt wouldnt shouldnt im ive we'd we'll "
        "they're they've they'd they'll that'll cannot let lets ok okay oh hi hello dear thanks",
    )
)

_FILLERS = merged(
    (
        "way ways method methods thing things kind kinds sort type types stuff step steps process procedure tip tips "
        "advice good best better great nice easy easily simple simply quick quickly proper properly correct correctly "
        "right effective efficient main major different various possible certain specific particular thank know tell "
        "show give explain describe list find get got take make made use used using need needed want help suggest "
        "suggestion recommend suggestions recommended recommendation say said think mean means meaning see look go "
        "going come work works working try happen happens exist exists able become example examples definition term "
        "word words question answer people person man someone time day year today nowadays currently usually often "
        "normally generally world part new online real true actual same total whole",
    )
)

_FORMS = """
be is are was were been being am; go goes went gone going; do does did done doing; have has had having; die dies died
dying; lie lies lying; tie ties tied tying; buy bought; sell sold; find found; leav left_behind; win won; los lost
losing lose; eat ate eaten; drink drank drunk; writ wrote written write; speak spoke spoken; break broke broken; tak
took taken take; giv gave given give; see saw seen; com came come; becom became become; begin began begun; know knew
known; grow grew grown; throw threw thrown; fly flew flown flies; draw drew drawn; driv drove driven drive; rid rode
ridden ride; ris rose risen rise; hid hid hidden hide; bit bit bitten bite; kill killed; get got gotten getting; forget
forgot forgotten; sing sang sung; ring rang rung; swim swam swum; run ran running; sit sat; stand stood; understand
understood; hold held; tell told; say said; pay paid; mak made make; build built; send sent; spend spent; lend lent;
bend bent; feel felt; keep kept; sleep slept; meet met; lead led; feed fed; teach taught; catch caught; think thought;
bring brought; fight fought; seek sought; hear heard; mean meant; hang hung; dig dug; stick stuck; strik struck strike;
shoot shot; steal stole stolen; choos chose chosen choose; freez froze frozen freeze; wear wore worn; tear tore torn;
bear bore born; beat beaten; child children childs; man men; woman women; foot feet; tooth teeth; mous mice mouse; wif
wives wife; lif lives life; knif knives knife; leaf leaves; half halves; wolf wolves; shelf shelves; person persons
people; new; news; mus muse; set setup; user users; founded founding; number numbers; center centre centres; theater
theatre; meter metre metres; liter litre litres; fiber fibre; tir tyre tyres tire tires; program programme programmes;
catalog catalogue; dialog dialogue; check cheque; jewelry jewellery; plow plough; gray grey; airplan aeroplane
airplane; aluminum aluminium; pajama pyjamas pajamas; defens defence defense; licens licence license; practic practice
practise; curb kerb; enrol enroll; artefact artifact; mom mum mums; analyz analyse analyze analysis analyses; wake woke
woken waking; forgiv forgave forgiven; shak shook shaken shake; sink sank sunk; shrink shrank shrunk; wind wound; sew
sewn; prov proven prove; show shown showed; physics physic; bus buses; gas gases; virus viruses; data datum; criteria
criterion; phenomenon phenomena; usa america u.s u.s.a; https https; sinc since; business businesses; thes
these
"""
_COUNTRIES = """
usa american americans; china chinese; france french; germany german germans; spain spanish spaniard spaniards; italy
italian italians; russia russian russians; japan japanese; mexico mexican mexicans; canada canadian canadians; india
indian indians; australia australian australians; brazil brazilian brazilians; korea korean koreans; egypt egyptian
egyptians; sweden swedish; norway norwegian norwegians; greece greek greeks; ireland irish; scotland scottish; portugal
portuguese; netherlands dutch; austria austrian austrians; switzerland swiss; hungary hungarian hungarians; ukraine
ukrainian ukrainians; vietnam vietnamese; thailand thai; turkey turkish; england english; britain british
"""
_IRREGULAR = {form: forms.split()[0] for forms in f"{_FORMS}; {_COUNTRIES}".split(";") for form in forms.split()}
_NATIVES = frozenset(word for _, *words in map(str.split, _COUNTRIES.split(";")) for word in words)

_SUFFIXES = (
    (
        ("'s", ""), ("’s", ""), ("s'", ""), ("s’", ""), ("sses", "ss"), ("ies", "y"), ("shes", "sh"), ("ches", "ch"),
        ("xes", "x"), ("zes", "z"), ("oes", "o"), ("ss", "ss"), ("us", "us"), ("is", "is"), ("s", ""),
    ),
    (
        ("ization", "iz"), ("isation", "iz"), ("ising", "iz"), ("izing", "iz"), ("ised", "iz"),
        ("ized", "iz"), ("ise", "iz"),
        ("ize", "iz"), ("ied", "y"), ("ing", ""), ("eed", "eed"), ("ed", ""), ("ily", "y"), ("ely", ""), ("ly", ""),
    ),
    (("our", "or"),),
)  # fmt: skip

_PHRASED = """
a third of = thirds of; get rid of = remove; find out = discover; a lot of = many; lots of = many; how come = why; what
causes = why; what caused = why; what makes = why; the reason for = why; no one = nobody; how much time = how long; how
much money = how much; how many times = how often; if not =; of all time =; of all times =; all natural = natural; or
why not =; why not = why; right way = way; right time = time; right age = age; what year = when; which year = when;
what date = when; which person = who; what person = who; log in = login; sign in = login; log on = login; log into =
login; sign into = login; the united states of america = usa; united states of america = usa; united states = usa; u.s.
= usa; u.s = usa; u.s.a = usa; united kingdom = uk; great britain = britain; as well as = and; or not =; not only =; no
matter =; of course =; more expensive = dearer; less expensive = cheaper; most expensive = dearest; least expensive =
cheapest; 2 nd world war = wwii; 1 st world war = wwi; in front of = front_of; on top of = above; next to = beside;
close to = near; away from = awayfrom; as well = also; no longer = not; give up = quit; at least = atleast; at most =
atmost; up to date = current; up to = atmost; more than = over; less than = under; fewer than = under; greater than =
over; switch off = turn off; switch on = turn on; shut down = shutdown; mobile phone = phone; cell phone = phone; world
wide web = internet; take care of = care; get back = recover; gotten over = get over; deal with = handle; look after =
care; turn into = become; carry out = perform; speed up = accelerate; go up = rise; went up = rise; go down = fall;
went down = fall; goes up = rise; goes down = fall; put off = postpone; pick up = collect; throw away = discard; look
for = seek; point out = mention; one another = other; each other = other; in order to = to; due to = because; because
of = because; thanks to = because; such as = like; apart from = except; aside from = except; other than = except; with
the exception of = except; instead of = instead; used to = used; have to = must; every other = everyother; which people
= who; everyone but = everyone except; everybody but = everybody except; everything but = everything except; all but =
all except; any but = any except; anyone but = anyone except; anything but = anything except; call off = cancel; called
off = cancel; going to = will; light weight = lightweight; web site = website; e mail = email; back up = backup; left
over = leftover; all right =; fill out = fill; fill in = fill; right now = now; right thing = thing; right person =
person; right place = place; right away = now; whats = what s; hows = how s; wheres = where s; whos = who s; im = i m;
ive = i ve; day before yesterday = daybeforeyesterday; day after tomorrow = dayaftertomorrow; percentage point =
percentagepoint; percentage points = percentagepoint; light year = lightyear; light years = lightyears; an hour and a
half = 1.5 hours; a year and a half = 1.5 years; a month and a half = 1.5 months; a week and a half = 1.5 weeks; a day
and a half = 1.5 days; a mile and a half = 1.5 miles; no more than = atmost; no less than = atleast; no fewer than =
atleast; not more than = atmost; not less than = atleast; how long ago = when; first world war = wwi; second world war
= wwii; world war i = wwi; world war ii = wwii; world war one = wwi; world war two = wwii; world war 1 = wwi; world war
2 = wwii; ww1 = wwi; ww2 = wwii; money back = refund; against the law = illegal; let go = dismiss; laid off = dismiss;
phone up = phone; ring up = phone; high blood pressure = hypertension; heart attack = infarction; make up = compose; in
advance = ahead; prime minister = pm_; head of state = president; per cent = percent; mind blowing = amazing; little
known = unknown; a couple of = two; as soon as possible = quickly; asap = quickly; all over = throughout; in spite of =
despite; free of charge = free; at no cost = free; these days = nowadays; at the moment = now; at present = now; set
out = depart; pick out = choose; come across = find; run out of = exhaust; get in touch with = contact; get hold of =
contact; leave out = omit; cut down on = reduce; do away with = abolish; this morning = today morning; this afternoon =
today afternoon; this evening = tonight; today evening = tonight; how many minutes = how long minutes; how many hours =
how long hours; how many seconds = how long seconds; how many weeks = how long weeks; how many months = how long
months; how many years = how long years; how many days = how long days; while loop = whileloop; while loops =
whileloop; for loop = forloop; for loops = forloop; square meter = sqm; square meters = sqm; square metre = sqm; square
metres = sqm; sq m = sqm; square kilometers = sqkm; square kilometres = sqkm; square kilometer = sqkm; square kilometre
= sqkm; sq km = sqkm; square feet = sqft; square foot = sqft; sq ft = sqft; square miles = sqmi; square mile = sqmi;
cubic meter = cbm; cubic meters = cbm; cubic metre = cbm; cubic metres = cbm; nautical mile = nmi; nautical miles = nmi;
fluid ounce = floz; fluid ounces = floz; fl oz = floz; troy ounce = ozt; troy ounces = ozt; metric ton = tonne; metric
tons = tonnes; long ton = longton; long tons = longton; short ton = shortton; short tons = shortton; imperial gallon =
impgal; imperial gallons = impgal; imperial pint = imppint; imperial pints = imppint; u s = usa; u s a = usa; u k = uk;
stand for = mean; stands for = mean; short for = mean; legally binding = legally valid; legally enforceable = legally
valid; hiking trail = hike; hiking trails = hikes
"""
_WHOLES = "binoculars glasses headphones jeans pants pliers scissors shorts sunglasses tights trousers tweezers".split()
_PHRASES = MappingProxyType(
    {
        " ".join(phrase.split()): instead.strip()
        for phrase, _, instead in (p.partition("=") for p in _PHRASED.split(";"))
    }
    | {"a pair": "pair_", "the pair": "the pair_", "pair of": "pair_", "a pair of": "pair_", "the pair of": "the pair_"}
    | {
        f"{n} {pair}": f"{n} pair_"
        for n in (*_ONES[1:13], *range(1, 13))
        for pair in ("pair", "pair of", "pairs", "pairs of")
    }
    | {f"a pair of {whole}": whole for whole in _WHOLES}
)

_PARTICLES = """
adopt out; back off; blow up; break up off; bring up about; call back off; carry on; check in out; cut off; drop off
out; fall apart; get over away; give away out in; go off over; hand in out over; hang up; hold off on back up; lay off;
lend out; let down off; look up out over into after for down; make up off; opt in out; pass away out; pay off; pull off
over; put away down out up; rent out; run into over out away; sell out off; set off aside; show off up; sign off; sleep
in over; stand up; take away back off over up; throw up; trade in; turn away back down in off on over up; wear off; work
out; write off up
"""
_BOUNDS = {"within": "inside", "under": "inside", "atmost": "inside", "atleast": "outside", "over": "outside"}

ENGLISH = Lexicon(
    negations=frozenset(
        "no not never unless none nothing nobody nowhere neither nor without cannot hardly barely except non isn't "
        "aren't wasn't weren't don't doesn't didn't hasn't haven't hadn't won't can't couldn't wouldn't shouldn't "
        "mustn't needn't ain't isnt arent wasnt werent dont doesnt didnt hasnt havent hadnt wont cant couldnt wouldnt "
        "shouldnt mustnt neednt aint".split()
    ),
    denials=frozenset(
        "fail refuse stop quit cease avoid prevent unable lack forbid ban prohibit deny reject decline cancel "
        "forget miss "
        "disagree impossible".split()
    ),
    numbers=_NUMBERS,
    ordinals=frozenset((*_ORDINALS, "thirtieth", "st", "nd", "rd", "th")),
    multipliers=_MULTIPLIERS,
    units=UNITS,
    ambiguous=AMBIGUOUS,
    per="per",
    clock=MappingProxyType({"am": 0, "a.m": 0, "pm": 12, "p.m": 12}),
    past=MappingProxyType({"past": 1, "after": 1, "to": -1, "before": -1, "till": -1}),
    dates=_DATES,
    shifts=frozenset("before after since until till".split()),
    groups=_GROUPS,
    opposites=OPPOSITES,
    denying=("un", "in", "im", "il", "ir", "dis", "non"),
    contraries=(
        ("", "un"), ("", "in"), ("", "im"), ("", "il"), ("", "ir"), ("", "dis"), ("", "non"), ("", "de"), ("", "mis"),
        ("", "anti"), ("", "a"), ("en", "de"), ("im", "ex"), ("in", "ex"), ("in", "de"), ("in", "out"), ("up", "down"),
        ("over", "under"), ("pre", "post"), ("in", "e"), ("im", "e"), ("hyper", "hypo"), ("macro", "micro"),
        ("pro", "anti"),
        ("sub", "super"), ("up", "off"), ("inter", "intra"), ("con", "de"), ("a", "de"), ("max", "min"),
        ("under", "upper"),
        ("multi", "single"), ("mono", "poly"), ("homo", "hetero"), ("ex", "in"),
        ("clockwise", "counterclockwise"), ("", "counter"),
        ("on", "off"), ("de", "in"), ("com", "decom"), ("re", "de"), ("step", "grand"), ("", "ab"),
        ("", "post"), ("", "pre"),
    ),
    synonyms=SYNONYMS,
    phrases=_PHRASES,
    beside=MappingProxyType({"short for": "what"}),
    telling=frozenset(
        "the are were been and what how which who whom whose where when why does did can could would should this that "
        "these those there it its their they them you your our she his from not isn't don't doesn't aren't any "
        "some than if about into got while between many much out please with tell show people write explain calculate "
        "convert".split()
    ),
    function_words=_FUNCTION,
    fillers=_FILLERS,
    attributes=frozenset("work world whole mean day year time part total online word question people".split()),
    relations=frozenset(
        "to from than before after over under into onto of for with without on in behind above below beside near by "
        "per within off at about during between among around across along inside outside via against through toward "
        "towards as because since until is are was were 's".split()
    ),
    symmetric=frozenset(
        "and or vs versus v v/s / between both either compare same equal similar different beside near next".split()
    ),
    questions=MappingProxyType(
        {
            "who": "person", "whom": "person", "whose": "owner", "when": "time", "where": "place", "why": "reason",
            "how": "manner", "what": "", "which": "",
        }
    ),
    degree=("how", frozenset("much many long often far old tall big".split())),
    open=frozenset("kind kinds type types sort sorts way ways thing things good best happens happened exact".split()),
    leads=frozenset(
        "and or so but , then for at by to in on from with of about please can could would you tell me explain "
        "show know describe "
        "do i want wonder wondering like understand ask if exactly also hi hello hey".split()
    ),
    capitals=MappingProxyType({"US": "usa", "U.S": "usa", "IT": "it_", "WHO": "who_", "AD": "ad_"}),
    twofold=frozenset(
        "polish turkey china march may august apple amazon jersey nice reading bath orange job lent pole swede finn "
        "dane welsh guinea chile jordan cologne panama bill mark frank rob will rose hope faith grace kb mb gb tb "
        "kbps mbps gbps tbps mw mac".split()
    ),
    acronyms=frozenset(
        "ace acid aid aids arc bat cab cap care cat cod dash lad mad may pet ram rest sad salt soap spa who".split()
    ),
    vowels="aeiouy",
    spelling=frozenset(
        "capitals capitalized uppercase lowercase letter letters spell spelled spelling spelt vowel vowels "
        "consonant consonants anagram palindrome".split()
    ),
    lessening=(frozenset(("less", "least", "as")), ("er", "est")),
    demonyms=frozenset("n an ian i es ish er ".split()),
    natives=_NATIVES,
    peoples=frozenset(word for word in _NATIVES if word.endswith(("ns", "ks", "ds"))),
    persons=senses(
        "i me my mine myself we us our ours", "you your yours yourself", "he him his himself", "she her hers herself",
        "they them",
    ),
    third=frozenset(("he", "she", "they")),
    owners=frozenset(("my", "our", "your")),
    speaker=(frozenset(("i", "we")), frozenset(("me", "us"))),
    owns="'s",
    hearer=frozenset(("you",)),
    modals=senses("may can could might", "should ought", "must"),
    tenses=MappingProxyType(
        dict.fromkeys("was were did had".split(), "past")
        | dict.fromkeys("has have been".split(), "perfect")
        | dict.fromkeys("is are am do does".split(), "present")
        | dict.fromkeys("will shall".split(), "future")
    ),
    pivots=frozenset(("than",)),
    helpers=frozenset(("do", "does", "did")),
    choices=frozenset(("or",)),
    bounds=MappingProxyType({"": _BOUNDS, "before": _BOUNDS | {"atmost": "outside"}}),
    bounded=MappingProxyType(dict.fromkeys("before prior ahead advance earlier".split(), "before")),
    ways=senses("for to toward towards into onto", "from"),
    joints=frozenset("of for in on at".split()),
    relatives=frozenset("that which who whom".split()),
    particles=MappingProxyType(
        {verb: frozenset(after) for verb, *after in (entry.split() for entry in _PARTICLES.split(";"))}
    ),
    spots=frozenset(("here", "there")),
    articles=frozenset("a an the this that these those my your his her its our their some any".split()),
    by=("by", frozenset("be is are was were been being get got gets".split()), ("ing",)),
    participles=tuple("ed en wn rn ilt old ent ept elt ost ught ound ung unk aid ade eld ead ot".split()),
    spellings=(
        ("sulph", "sulf"), ("haem", "hem"), ("aemi", "emi"), ("oestr", "estr"), ("foet", "fet"), ("paed", "ped"),
        ("anaes", "anes"), ("oedem", "edem"), ("diarrhoe", "diarrhe"), ("alyse", "alyze"), ("alysing", "alyzing"),
        ("manoeuv", "maneuv"), ("skilful", "skillful"), ("grey", "gray"), ("mould", "mold"),
    ),
    suffixes=_SUFFIXES,
    irregular=MappingProxyType(_IRREGULAR),
)  # fmt: skip
