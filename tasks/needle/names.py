"""Names of dogs, none of which is a prefix of another, and colours of fur."""

import random
from typing import Final

from treegen.errors import InputError

COLOURS: Final = ("white", "black", "brown", "red", "golden", "silver", "cream", "blue")

_NAMES: Final = """
Acorn Admiral Agatha Ajax Albus Alfie Almond Amadeus Anchor Angus Anouk Apollo Archie Argus Arlo
Asta Athena Attila Aubrey Axel Badger Bagel Bailey Balto Bandit Banjo Barkley Barnaby Basil
Baxter Beacon Bella Benji Beowulf Bertie Biscuit Bishop Blaze Bodhi Bolt Bonnie Boomer Boris
Bosco Bramble Brisket Bruno Brutus Bubbles Buckley Buddy Bugsy Bumble Buster Butters Buzz
Cadbury Caesar Calypso Captain Caramel Casper Cedric Chance Chaplin Chester Chewie Chico Chutney
Cinder Cleo Clover Cocoa Colonel Comet Cookie Copper Cosmo Cricket Crumpet Cupcake Custard Daisy
Dante Darwin Dashiell Delilah Denver Dexter Dickens Diesel Dingo Django Dobby Domino Doodle
Dottie Dragon Drummer Duchess Duffy Dumpling Dundee Dusty Dylan Echo Edison Einstein Elmo Ember
Enzo Ernie Everest Falstaff Fang Felix Fennel Fergus Fidget Figaro Finnegan Flash Fletcher Flora
Fonzie Freckles Freya Frodo Fudge Fuzzy Gadget Galahad Gatsby Geordie Gizmo Gnocchi Goliath
Gonzo Gordon Gulliver Gumbo Hamlet Hank Harley Harpo Havoc Hazel Hector Heidi Henley Herbie
Hercules Holmes Homer Hopper Houdini Hubert Huxley Iggy Indigo Ivy Izzy Jasper Jazz Jellybean
Jethro Jigsaw Jinx Jolly Juno Kaiser Karma Keeper Kelpie Kenobi Kepler Kermit Khan Kipper
Klondike Kodiak Koko Lady Laika Lancelot Lassie Leopold Lightning Linus Loki Lotus Lucky Lulu
Luna Macaroon Madison Maggie Magnus Mango Maple Marlowe Marvin Matilda Maverick Merlin Midge
Milo Minnie Mischief Mitzi Moose Morpheus Mozart Mudge Muffin Murphy Mustard Nacho Napoleon
Nelson Neptune Nettle Newton Nimbus Noodle Nugget Nutmeg Oakley Oberon Odin Olive Omelette Onyx
Opal Orbit Orson Oscar Otis Otto Ozzy Paddington Panda Paprika Patches Peaches Peanut Pebbles
Penny Pepper Percy Pesto Petra Phoebe Pickles Pippin Pistachio Pixie Plato Pluto Pogo Polka
Popcorn Porter Potato Pretzel Puddles Pumpkin Quincy Radar Ragnar Ralph Rambo Ranger Rascal
Ravioli Rebel Rhubarb Ricochet Ripley Rocket Rolo Romeo Roscoe Rowdy Rufus Rumble Sadie Saffron
Salem Samson Sandy Sausage Scamp Scooter Scout Scruffy Shadow Shasta Sherlock Sizzle Skipper
Smokey Snickers Socks Sparky Spartan Spock Sprout Squirt Stella Storm Sultan Sushi Taffy Tango
Tasha Teddy Tequila Thistle Thor Thunder Tilly Tinker Toffee Topaz Truffle Tucker Turbo Twiggy
Ulysses Umber Valkyrie Velvet Viking Vulcan Waffles Waldo Walnut Warlock Watson Wiggles Willow
Winston Wizard Wombat Wookie Yoda Yogi Zelda Zeppelin Zeus Ziggy Zorro
"""
NAMES: Final = tuple(_NAMES.split())

_SECOND_NAMES: Final = """
Abernathy Barrow Cartwright Dalloway Eastwood Fairbanks Galloway Hawthorne Ironside Jessop
Kingsley Lockhart Montrose Norwood Ogilvy Pemberton Quayle Ravenscroft Stanhope Thackeray
Underhill Vandermeer Whitlock Yardley
"""
SECOND_NAMES: Final = tuple(_SECOND_NAMES.split())


def draw_names(draw: random.Random, num: int) -> list[str]:
    """Return `num` different names in random order, none of which is a prefix of another.

    If there are enough single names, these are used. Otherwise every dog has two names, and the
    first names are spread as evenly as possible.

    Raises:
        InputError: There are too few names.
    """
    if num <= len(NAMES):
        return draw.sample(NAMES, num)
    most = len(NAMES) * len(SECOND_NAMES)
    if num > most:
        raise InputError(
            f"there are names for {most:,} dogs at most, but {num:,} are needed; ask for fewer"
        )
    rounds = -(-num // len(NAMES))
    seconds = {first: draw.sample(SECOND_NAMES, rounds) for first in NAMES}
    names: list[str] = []
    for turn in range(rounds):
        wanted = min(len(NAMES), num - len(names))
        names += [f"{first} {seconds[first][turn]}" for first in draw.sample(NAMES, wanted)]
    draw.shuffle(names)
    return names


def draw_colours(draw: random.Random, num: int) -> list[str]:
    """Return `num` colours in random order. Their counts differ by at most one."""
    order = draw.sample(COLOURS, len(COLOURS))
    colours = [order[index % len(order)] for index in range(num)]
    draw.shuffle(colours)
    return colours
