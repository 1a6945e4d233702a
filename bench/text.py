"""Words to fill a prompt with: common ones, which nearly every tokenizer has as one token each with the blank before them. Pure.

So a text of n words is n tokens long, whatever their order, and a prompt can be made to a length by counting words. Whether a server's own
tokenizer does have a word is asked before it is used (``prompts``).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Final

_LISTED: Final = """
able about above across act action add after again against age ago air all almost alone along already also although always among
amount and animal another answer any anyone anything appear are area arm around art ask away back bad ball bank bar base be beautiful
became because become bed been before began begin behind being believe below best better between big bit black blood blue board boat
body book both box boy break bring brother brought brown build building built business but buy by call came can car card care carry
case cause cell center certain chance change check child children choice church city class clear close cold color come common
community company complete computer condition consider contain control cost could country course court cover create cross culture
current cut dark data daughter day dead deal death decide decision deep degree design development did difference different difficult
direction do doctor does dog done door down draw drive during each early earth easy eat economic effect effort eight either else end
energy enough even evening event ever every everyone everything evidence example experience eye face fact fall family far farm fast
father feel feet fell few field fight figure fill film final find fine fire first fish five floor follow food foot for force foreign
form forward found four free friend from front full future game garden gave general get girl give given glass go goal gold gone good
got government great green ground group grow growth had hair half hall hand happen happy hard has have he head health hear heart heat
heavy held help her here high him himself his history hold home hope hospital hot hotel hour house how however huge human hundred
husband idea if image important in include increase indeed industry information inside interest into island issue it its job join
just keep kept key kind king knew know knowledge known land language large last late later law lay lead learn least leave led left
leg less let letter level life light like likely line list little live local long look lost lot love low machine made main major make
man manager many mark market matter may me mean means measure media medical meet meeting member men method middle might mile military
million mind minute miss model modern moment money month more morning most mother mountain mouth move movement much music must my
name nation national natural nature near nearly necessary need never new news next night nine no none nor north not note nothing
notice now number of off offer office often oil old on once one only open or order other our out outside over own page pain paper
part particular party pass past patient pattern pay peace people per perhaps period person phone picture piece place plan plant play
point police policy political poor popular population position possible power present president press price private probably problem
process produce product production program project property provide public pull purpose push put quality question quick quite
"""
WORDS: Final = tuple(_LISTED.split())
"""Lower case, ASCII, none twice."""


def words(seed: str, known: Sequence[str]) -> Iterator[str]:
    """The endless text that a seed stands for, a word at a time, drawn from ``known``: two texts of one seed begin alike."""
    draw = random.Random(seed)
    while True:
        yield from draw.choices(known, k=64)
