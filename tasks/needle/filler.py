"""The filler text that comes with treegen: the chronicle of a valley, put together by rule.

Nothing in it helps to answer a question. A few sentences may recur, by chance. It is the same text
on every machine.
"""

import random
from functools import cache
from typing import Final

_CHARACTERS: Final = 400_000
_SEED: Final = 20

_PLACES: Final = (
    "Aldermere",
    "Birch Hollow",
    "Cold Ferry",
    "Dunmarsh",
    "Eastlock",
    "Fennel Bridge",
    "Gristwater",
    "Hallow Mill",
    "Inverley",
    "Juniper Gate",
    "Kelder",
    "Long Weir",
    "Marrowby",
    "Netherfold",
    "Oxley",
    "Pell Harbour",
    "Quarry End",
    "Rushcombe",
    "Stonebeck",
    "Thornaby",
    "Upper Wick",
    "Vane Hill",
    "Westering",
    "Yarrowdale",
)
_PEOPLE: Final = (
    "the miller",
    "the ferryman",
    "the schoolmistress",
    "the surveyor",
    "the lamplighter",
    "the baker's widow",
    "the clockmaker",
    "the parish clerk",
    "the innkeeper",
    "the bell founder",
    "the postmaster",
    "the glazier",
    "the toll collector",
    "the bookbinder",
    "the carpenter",
    "the ropemaker",
    "the apothecary",
    "the piano tuner",
    "the stonemason",
    "the beekeeper",
    "the weaver",
    "the young doctor",
    "the retired captain",
    "the map seller",
)
_SEASONS: Final = (
    "in the first week of spring",
    "late in the autumn",
    "during the long frost",
    "on the eve of the fair",
    "after three days of rain",
    "in a summer without wind",
    "towards the end of the harvest",
    "when the river was at its lowest",
    "on the shortest day of the year",
    "while the bridge was closed for repairs",
    "before the snow had melted",
    "in the year of the great flood",
    "on a morning of thick fog",
    "a little after midnight",
    "at the hour when the market opens",
    "some weeks before the election of the council",
)
_THINGS: Final = (
    "a cart of turnips",
    "two barrels of vinegar",
    "an unsigned letter",
    "a box of brass hinges",
    "the spare key of the granary",
    "a ledger bound in calf",
    "seven lengths of rope",
    "a crate of window glass",
    "the old church register",
    "a broken barometer",
    "a sack of seed potatoes",
    "the measurements of the lock",
    "a basket of late pears",
    "the plans for a new well",
    "a pair of surveyor's chains",
    "a portrait of nobody in particular",
    "an iron stove",
    "the timetable of the mail coach",
    "a bundle of hazel rods",
    "half a cheese wrapped in linen",
    "a drawing of the weathercock",
    "a jar of goose fat",
)
_DEEDS: Final = (
    "carried {thing} to {place}",
    "lent {thing} to {person}",
    "looked in vain for {thing}",
    "walked from {place} to {other} with {thing}",
    "quarrelled with {person} about {thing}",
    "left {thing} at the inn of {place}",
    "asked {person} what had become of {thing}",
    "sold {thing} to a stranger from {place}",
    "found {thing} under the stairs of the town hall",
    "wrote a long report on {thing} and sent it to {place}",
    "exchanged {thing} for the promise of help with the roof",
    "showed {thing} to everyone who would look at it",
    "forgot {thing} on the road between {place} and {other}",
    "promised {person} that {thing} would be returned before the month was out",
    "was seen near {place}, weighing {thing} on a borrowed scale",
)
_REMARKS: Final = (
    "Nobody at {place} thought this worth writing down",
    "It was said at {place} that such things had happened before",
    "The council of {place} took note of it and did nothing",
    "{Person} disagreed, though without giving any reason",
    "The road to {place} was no better for it",
    "In {place} the matter was talked over until the candles burned low",
    "What {person} thought of all this has not been recorded",
    "There was some laughter about it at {place}, and then it was forgotten",
    "The older people of {place} remembered it differently",
    "{Person} and {person} never spoke of it again",
    "A copy of the account was kept at {place} for several years",
    "As far as {place} was concerned, that settled the question",
)
_VIEWS: Final = (
    "From the hill above {place} one could see the smoke of the lime kilns",
    "The mill at {place} turned slowly and the ducks went about their business",
    "Between {place} and {other} the fields lay under water as far as the hedges",
    "The clock of {place} struck the quarter, some minutes after the one at {other}",
    "Carts stood in a row along the wall of the churchyard at {place}",
    "At {place} the swallows had already begun to gather on the ridge of the barn",
    "The ferry to {other} waited at {place} until there were passengers enough",
    "A smell of bread came from the houses behind the square of {place}",
    "The wind turned to the north and the people of {place} brought in their washing",
    "Somewhere beyond {place} a wagon was being unloaded, plank by plank",
)
_SHAPES: Final = (
    "{Season}, {person} {deed}.",
    "{Person} {deed} {season}.",
    "{Person} {deed}, and {person} {deed}.",
    "{remark}.",
    "{view}.",
    "{Season} {person} {deed}; {person} only shook their head.",
    "{view}, and {person} {deed}.",
    "{Person} {deed} because {person} had asked for it.",
    "When {person} {deed}, it was already getting dark.",
    "{remark}, and {person} {deed}.",
)


@cache
def filler() -> str:
    """Return the text in one line, its sentences one space apart."""
    draw = random.Random(_SEED)
    sentences: list[str] = []
    size = 0
    while size < _CHARACTERS:
        sentence = _sentence(draw)
        sentences.append(sentence)
        size += len(sentence) + 1
    return " ".join(sentences)


def _sentence(draw: random.Random) -> str:
    # Each slot is filled with an entry of its list, which may have slots of its own.
    lists = {
        "place": _PLACES,
        "other": _PLACES,
        "person": _PEOPLE,
        "season": _SEASONS,
        "thing": _THINGS,
        "deed": _DEEDS,
        "remark": _REMARKS,
        "view": _VIEWS,
    }
    text = draw.choice(_SHAPES)
    used: set[str] = set()
    while "{" in text:
        before, _, rest = text.partition("{")
        slot, _, after = rest.partition("}")
        # No entry is used twice: nobody meets himself, and no road leads from a place to itself.
        choices = [word for word in lists[slot.lower()] if word not in used]
        word = draw.choice(choices)
        used.add(word)
        if slot[0].isupper():
            word = word[0].upper() + word[1:]
        text = f"{before}{word}{after}"
    return text
