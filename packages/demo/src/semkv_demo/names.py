"""The sides that are asked, and the rows of the table."""

ALONE, SEMKV = "alone", "semkv"
REPEAT = "a question again"
REWORDED = "in other words"
TRAP = "a trap, must not hit"
DOCUMENT = "a document, 4,000 tokens"
PICTURE = "a picture in another chat"
