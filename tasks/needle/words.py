"""Words that keys consist of: an adjective and a noun, as in brisk-lantern."""

from typing import Final

_ADJECTIVES: Final = """
able agile airy amber ample ancient arctic ardent arid ashen autumn bashful bitter blunt bold
brave breezy brief bright brisk broad bronze calm candid careful chilly civil clever coastal
cosmic crisp curly dainty damp daring deep dense dim distant drowsy dusky eager early earnest
easy elder elegant even faint fancy fearless fertile fierce final flat fluent foggy fond frank
fresh frosty frugal gentle gilded glad gloomy glossy grand grassy hardy hasty hazy hearty heavy
hidden hollow honest humble icy ideal idle inner ivory jolly keen kind lanky lasting lavish lazy
level lively lofty lonely loyal lucid lunar mellow merry mighty mild misty modest mossy muted
narrow neat nimble noble novel oaken odd open ornate outer pale patient placid plain polite
proud prudent quaint quick quiet rapid rare ready regal remote robust rocky rough round rustic
salty sandy scarce secret serene shady sharp shiny silent silken simple sincere sleepy slender
smooth snug sober solar solemn solid sparse spry stable steady stern still stout subtle sunny
supple swift tall tame tender thick thorny thrifty tidy timid tranquil true upper urban vacant
vague valiant vast verdant vivid warm wary wavy weary western whole wide wild willing windy wise
witty wooden worthy young zealous
"""
ADJECTIVES: Final = tuple(_ADJECTIVES.split())

_NOUNS: Final = """
abbey alcove almanac anvil apron arbor arch arrow attic axle bakery balcony ballad banner barge
barrel basin basket beacon bell bench bicycle blanket bobbin bonnet bottle boulder bridge brook
bucket buckle bugle cabin cable candle canoe canvas canyon carpet castle cellar chalk chapel
chimney chisel cider cliff cloak clock cloud coach cobweb comb compass copse coral corner
cottage cradle crane crate crown crystal cupboard curtain cushion dagger dairy desk dome door
drum dune easel engine envelope estuary fable fan farm feather fence fern ferry fiddle flag
flagon flask flute folder forest forge fork fountain funnel garden gate geyser glacier glove
goblet grotto guitar hamlet hammer hammock harbor harness harp hatchet hedge helmet hinge hive
horizon inkwell island jacket jetty jug kennel kettle key kiln kite ladder lagoon lamp lantern
latch lathe lattice ledger lens lighthouse locket loft loom lute magnet mallet mantle map market
marsh meadow medal mirror mitten monument moor mortar mosaic mug needle nest notebook oar oasis
orchard organ oven paddle palace parcel pasture pebble pendulum pier pillar pillow pipe plateau
plough pocket pond porch prairie prism pulley quarry quill quilt raft railway rampart ravine
ribbon ridge river roof rope rudder saddle satchel scarf scroll shelf shield shovel sickle
signal sled spade spindle spoon spring stable staircase statue stove stream summit table
tapestry teapot temple tent thimble timber tower trellis trumpet tunnel turret umbrella valley
vase vault velvet viaduct village violin wagon walnut waterfall wharf wheel whistle window
workshop wreath yard
"""
NOUNS: Final = tuple(_NOUNS.split())
