"""Words, numbers and UUIDs of the needles: every one is drawn with a generator of its sample."""

import uuid
from random import Random

ADJECTIVES = (
    "ancient bitter brave bright broken calm careful cheap clean clever cold common curly dark deep dry dusty eager "
    "early empty fair faint fancy fierce flat fresh gentle giant grand happy heavy hollow honest hungry icy jolly "
    "large late lazy light lonely loud lucky mellow narrow noisy odd pale plain polite proud quick quiet rapid rare "
    "rough round rusty salty sharp shiny silent simple sleepy slow smooth soft solid sour steep sticky strange sweet "
    "tall tame thick thin tidy tiny tough vast warm weary wild wise young"
).split()
NOUNS = (
    "anchor apple arrow badge barrel basket beach bell bench bird blanket boat bottle branch bridge bucket button "
    "cabin candle canyon carpet castle chair cherry circle cloud coat coin comet cradle crown desert door drum eagle "
    "engine farm feather fence field flute forest fountain garden ginger glove hammer harbor hat hill horse island "
    "jacket kettle key ladder lake lamp lantern leaf lemon letter meadow mirror mountain needle ocean orange paddle "
    "paper pencil piano pillow planet pocket puzzle rabbit ribbon river rocket saddle sailor shell shovel spoon stone "
    "table tiger tower tunnel violin wagon wheel window"
).split()
DIGITS = 7


def word(generator: Random) -> str:
    """A key such as `quiet-harbor`."""
    return f"{generator.choice(ADJECTIVES)}-{generator.choice(NOUNS)}"


def number(generator: Random) -> str:
    """A number of seven digits."""
    return str(generator.randrange(10 ** (DIGITS - 1), 10**DIGITS))


def uuid4(generator: Random) -> str:
    """A random UUID of 36 characters."""
    return str(uuid.UUID(int=generator.getrandbits(128), version=4))


def distinct(draw, count: int, generator: Random) -> list[str]:
    """`count` different ones of `draw(generator)`."""
    found = {}
    while len(found) < count:
        found[draw(generator)] = None
    return list(found)
