"""Whether two pictures show the same: the guard of matches that replace an image.

Embeddings place a receipt and the same one with another digit on one spot, and a picture moved by a pixel elsewhere.
Here the pixels decide. The second picture is laid over the first (`aligning`) and takes on its brightness and contrast
(`light`). What then differs in some small window by more than re-encoding explains is a change (`changes`): of a
character, a color, a place, a count. So is a thing at an edge that only one of the two has (`edges`).

What has to be computed of one picture alone is a `Planes`, which `Remembered` keeps for the next comparison.
"""

from semkv_guards.pictures.comparing import LIMIT, difference, may_show_the_same
from semkv_guards.pictures.planes import MOST_PIXELS, Planes, Small, planes_of, small_of
from semkv_guards.pictures.remembered import Remembered

__all__ = [
    "LIMIT",
    "MOST_PIXELS",
    "Planes",
    "Remembered",
    "Small",
    "difference",
    "may_show_the_same",
    "planes_of",
    "small_of",
]
