"""English units: every prefix with every unit that takes it, and the others one by one."""

from __future__ import annotations

from types import MappingProxyType

from semkv.tiers.guards.lexicon import Unit

_PREFIXES = {
    "tera": ("t", 1e12), "giga": ("g", 1e9), "mega": ("m", 1e6), "kilo": ("k", 1e3), "hecto": ("h", 1e2),
    "deci": ("d", 1e-1), "centi": ("c", 1e-2), "milli": ("m", 1e-3), "micro": ("μ", 1e-6), "nano": ("n", 1e-9),
    "pico": ("p", 1e-12),
}  # fmt: skip

# dimension, base units per unit, names, symbol, prefixes of the symbol (of two with one letter the more usual)
_PREFIXED = (
    ("length", 1.0, "meter metre", "m", "kilo deci centi milli micro nano"),
    ("mass", 1.0, "gram gramme", "g", "kilo milli micro nano"),
    ("second", 1.0, "second", "s", "milli micro nano"),
    ("volume", 1.0, "liter litre", "l", "hecto deci centi milli micro"),
    ("byte", 1.0, "byte", "b", "tera giga mega kilo"),
    ("byte", 0.125, "bit", "bit", "giga mega kilo"),
    ("byte/second", 0.125, "bps", "bps", "giga mega kilo"),
    ("power", 1.0, "watt", "w", "giga mega kilo"),
    ("energy", 1.0, "joule", "j", "giga mega kilo"),
    ("energy", 4.184, "calorie", "cal", "kilo"),
    ("energy", 3600.0, "watthour", "wh", "tera giga mega kilo"),
    ("energy", 1.602e-19, "electronvolt", "ev", "giga mega kilo"),
    ("voltage", 1.0, "volt", "v", "kilo milli"),
    ("current", 1.0, "ampere amp", "a", "milli micro"),
    ("charge", 1.0, "coulomb", "c", "micro nano"),
    ("charge", 3600.0, "ah", "ah", "milli"),
    ("capacitance", 1.0, "farad", "f", "micro nano pico"),
    ("resistance", 1.0, "ohm", "ω", "mega kilo"),
    ("force", 1.0, "newton", "n", "kilo"),
    ("frequency", 1.0, "hertz", "hz", "tera giga mega kilo"),
    ("pressure", 1.0, "pascal", "pa", "mega kilo hecto"),
    ("pressure", 1e5, "bar", "bar", "milli"),
    ("amount", 1.0, "mole", "mol", "milli micro nano"),
    ("field", 1.0, "tesla", "tesla", ""),
    ("length", 3.0857e16, "parsec", "parsec", ""),
    ("sievert", 1.0, "sievert", "sv", "milli micro"),
)
_BARE = frozenset("m g s l w v hz ohm mol wh bps".split())  # symbols that stand alone


def _prefixed() -> dict[str, Unit]:
    found: dict[str, Unit] = {}
    for dimension, factor, names, symbol, taken in _PREFIXED:
        for name in names.split():
            found |= dict.fromkeys((name, f"{name}s"), (dimension, factor))
            for prefix, (_, times) in _PREFIXES.items():
                found |= dict.fromkeys((f"{prefix}{name}", f"{prefix}{name}s"), (dimension, factor * times))
        for prefix in taken.split():
            letter, times = _PREFIXES[prefix]
            found[letter + symbol] = (dimension, factor * times)
        if symbol in _BARE:
            found[symbol] = (dimension, factor)
    return found


def _units(dimension: str, **factors: str) -> dict[str, Unit]:
    """``_1="m meter"`` gives every name the factor that the keyword spells: ``_1e3``, ``_0p001``."""
    return {
        name: (dimension, float(factor[1:].replace("p", ".").replace("m", "-")))
        for factor, names in factors.items()
        for name in names.split()
    }


UNITS: MappingProxyType[str, Unit] = MappingProxyType(
    _prefixed()
    | _units(
        "length",
        _1e3="kms",
        _1em6="micron microns",
        _1609p344="mile miles mi",
        _0p9144="yard yards yd",
        _0p3048="foot feet ft",
        _0p0254="inch inches",
        _1852="nmi",
        _149597870700="au",
        _9p4607e15="lightyear lightyears",
    )
    | _units(
        "mass",
        _1e3="kgs kilo kilos",
        _1em6="mcg",
        _1e6="ton tons tonne tonnes",
        _453p59237="lb lbs",
        _28p349523="oz ounce ounces",
        _6350="stone",
        _31p1034768="ozt",
        _1016047="longton",
        _907185="shortton",
        _0p2="carat carats",
    )
    | _units("second", _1="sec secs", _60="min mins minute minutes", _3600="h hr hrs hour hours hourly")
    | _units("second", _86400="day days daily", _604800="week weeks weekly", _1209600="fortnight", _0p001="msec")
    | _units("month", _1="month months monthly", _12="year years yr yrs yearly annual annually", _120="decade decades")
    | _units("month", _1200="century centuries", _3="quarterly", _12000="millennium millennia")
    | _units(
        "volume",
        _3p785="gallon gallons gal",
        _0p473="pint pints",
        _0p946="quart quarts",
        _0p24="cup cups",
        _0p015="tablespoon tablespoons tbsp",
        _0p005="teaspoon teaspoons tsp",
        _0p0003="pinch",
        _159="barrel barrels",
        _0p0295735="floz",
        _4p54609="impgal",
        _0p568261="imppint",
    )
    | _units(
        "area",
        _1="sqm",
        _1e6="sqkm",
        _1em4="sqcm",
        _1em6="sqmm",
        _2589988="sqmi",
        _4047="acre acres",
        _1e4="hectare hectares ha",
        _0p093="sqft",
    )
    | _units("volume", _1000="cbm", _0p001="cbcm")
    | _units("byte", _1024="kib", _1048576="mib", _1073741824="gib")
    | dict.fromkeys(("kph", "kmh"), ("length/second", 1000 / 3600))
    | {"mph": ("length/second", 1609.344 / 3600)}
    | dict.fromkeys(("knot", "knots"), ("length/second", 1852 / 3600))
    | _units("length/second", _1="mps", _343="mach")
    | _units("power", _746="hp horsepower")
    | _units("pressure", _6894p76="psi", _101325="atm atmosphere atmospheres", _133p322="mmhg")
    | _units("frequency", _1="fps", _0p0166667="rpm")
    | _units("percent", _1="% percent pct")
    | _units("points", _1="pp percentagepoint")
    | _units("celsius", _1="celsius centigrade")
    | _units("fahrenheit", _1="fahrenheit")
    | _units("kelvin", _1="kelvin kelvins")
    | _units("degree", _1="° degree degrees")
    | _units("radian", _1="radian radians")
    | _units("dollar", _1="$ usd dollar dollars buck bucks", _0p01="cent cents")
    | _units("euro", _1="€ eur euro euros")
    | _units("pound", _1="£ gbp quid", _0p01="pence")
    | _units("pounds", _1="pound pounds")
    | _units("rupee", _1="₹ inr rs rupee rupees")
    | _units("yen", _1="¥ jpy yen")
    | _units("yuan", _1="cny rmb yuan")
    | _units("franc", _1="chf franc francs")
    | _units("pixel", _1="px pixel pixels")
    | _units("point", _1="pt pts")
    | _units("em", _1="em rem")
)
AMBIGUOUS = MappingProxyType({"pounds": (UNITS["lb"], UNITS["£"])})
