"""Kinds of made-up facts, from which retaining is learned.

No wording, answer or name is one of the recall suite's (`hope_hf/evaluation/recall/kinds.py`).
"""

from typing import NamedTuple

SYLLABLES = (
    "ba chi do fre ga hu ja lo mi nu po ri sa te vo wy ze kal bren tor mel dra sun pel rok vin son ton ley ine ard oth"
).split()
PEOPLE = (
    "Agnes Holm|Bertram Voss|Clara Finch|Dorothy Lunn|Edmund Rook|Felix Thorn|Gilbert Wray|Harriet Stone|Isabel Marsh|"
    "Jasper Cole|Leonard Pike|Matilda Frost|Nathan Birch|Olive Hart|Rupert Snow|Walter Lake"
).split("|")
COLOURS = "amber azure crimson green grey indigo ivory purple scarlet silver violet yellow black white brown".split()
TOWNS = "Ashby Belford Carlow Dorset Evesham Frome Grantham Hexham Ilkley Kendal Louth Malton Oakham Ripon".split()
ANIMALS = "fox otter hare goose mule raven salmon wolf bear swan falcon goat lynx toad".split()
THINGS = "lantern anchor basket bell blanket compass drum hammer kettle ladder mirror rope saddle shovel".split()
FOODS = "apples salt honey cheese figs herrings pepper onions plums almonds butter mustard barley turnips".split()
TRADES = "baker cooper glover mason potter saddler tanner weaver thatcher farrier chandler fuller".split()
LANGUAGES = "Latin French Polish Turkish Spanish Irish Swedish Persian Dutch Hebrew".split()
ILLNESSES = "fever measles asthma palsy jaundice cholera toothache insomnia".split()
MATERIALS = "oak ash iron copper ebony marble pine beech brass slate".split()
LAKES = "Ullen Brasse Cormor Dovar Ennert Falk Gressen Horva Ister Lomel".split()
DOGS = "Rufus Bruno Pilot Sultan Nero Tasso Juno Flora Hector Diana".split()
HERBS = "nettle sage mint thyme fennel chamomile wormwood elder rue mallow".split()
INSTRUMENTS = "harp flute cello organ lute oboe spinet fiddle".split()
MONTHS = "January February March April June July August September October November".split()
STREETS = "Mill Church Bridge Castle Orchard Barrack Market Abbey Quarry Harbour".split()
NUMBERS = [str(number) for number in range(23, 990, 41)]
YEARS = [str(year) for year in range(1405, 1899, 29)]


class Kind(NamedTuple):
    """A kind of facts: `{s}` stands for the subject and `{a}` for the answer."""

    wordings: tuple[str, str, str]
    question: str
    answers: list[str]


KINDS = (
    Kind(
        (
            "The schoolmaster who taught in {s} went by the name of {a}.",
            "{a} taught the children of {s} for thirty years.",
            "Every letter of the school in {s} bears the hand of {a}.",
        ),
        "Who was the schoolmaster of {s}?",
        PEOPLE,
    ),
    Kind(
        (
            "The lake on whose shore {s} was built is {a}.",
            "In winter {a} freezes as far as the houses of {s}.",
            "Fishermen from {s} cross {a} before dawn.",
        ),
        "On which lake does {s} lie?",
        LAKES,
    ),
    Kind(
        (
            "In his last will {s} left his sister a {a}.",
            "The sister of {s} inherited a {a}.",
            "A {a} was all that his sister got from {s}.",
        ),
        "What did {s} leave his sister?",
        THINGS + ANIMALS,
    ),
    Kind(
        (
            "The regiment of {s} marched under a flag of {a}.",
            "A flag of {a} was carried before the men of {s}.",
            "They knew the riders of {s} by the {a} of their flag.",
        ),
        "Which colour was the flag of {s}?",
        COLOURS,
    ),
    Kind(
        (
            "At the inn of {s} the traveller slept in room {a}.",
            "Room {a} is the best in the inn of {s}.",
            "The ghost at {s} was only ever seen in room {a}.",
        ),
        "In which room of the inn of {s} did the traveller sleep?",
        NUMBERS,
    ),
    Kind(
        (
            "Captain {s} filled the hold of his brig with {a}.",
            "The brig of Captain {s} smelled of {a}.",
            "It was {a} that Captain {s} carried over the sea.",
        ),
        "What was the cargo of Captain {s}?",
        FOODS,
    ),
    Kind(
        (
            "Before she married, Widow {s} had worked as a {a}.",
            "Nobody guessed that Widow {s} was once a {a}.",
            "The hands of Widow {s} were those of a {a}.",
        ),
        "What had Widow {s} worked as?",
        TRADES,
    ),
    Kind(
        (
            "The abbey at {s} was founded in {a}.",
            "Since {a} monks have prayed at {s}.",
            "A stone over the door of the abbey at {s} says {a}.",
        ),
        "When was the abbey at {s} founded?",
        YEARS,
    ),
    Kind(
        (
            "When the judge asked for the murderer, {s} pointed at {a}.",
            "{s} swore before the judge that it had been {a}.",
            "Only {s} had seen {a} on the stairs that night.",
        ),
        "Whom did {s} accuse?",
        PEOPLE,
    ),
    Kind(
        (
            "The dog that slept at the feet of {s} answered to {a}.",
            "{s} whistled, and {a} came running.",
            "They buried {a} beside {s}, as a dog deserves.",
        ),
        "What was the dog of {s} called?",
        DOGS,
    ),
    Kind(
        (
            "The secret word of the smugglers of {s} was {a}.",
            "Whoever said {a} was let into the cave of {s}.",
            "At the gate of {s} the old woman whispered {a}.",
        ),
        "What was the secret word at {s}?",
        THINGS + COLOURS + ANIMALS,
    ),
    Kind(
        (
            "Every morning Uncle {s} had {a} for breakfast.",
            "Uncle {s} would eat nothing but {a} before noon.",
            "A plate of {a} stood before Uncle {s}.",
        ),
        "What had Uncle {s} for breakfast?",
        FOODS,
    ),
    Kind(
        (
            "From {s} the coach goes on to {a}.",
            "It is a day from {s} to {a} by coach.",
            "The road of {s} ends at {a}.",
        ),
        "Where does the coach go from {s}?",
        TOWNS,
    ),
    Kind(
        (
            "Doctor {s} treated his patients with a tea of {a}.",
            "There was always some {a} drying in the garden of Doctor {s}.",
            "{a} was the one remedy of Doctor {s}.",
        ),
        "With which tea did Doctor {s} treat his patients?",
        HERBS,
    ),
    Kind(
        (
            "{s} had lost the farm in a wager over a {a}.",
            "It was a {a} that cost {s} the farm.",
            "On account of a {a} the farm of {s} changed hands.",
        ),
        "Over what did {s} lose the farm?",
        ANIMALS + THINGS,
    ),
    Kind(
        (
            "The distance from {s} to the sea is {a} miles.",
            "It takes {a} miles to reach the sea from {s}.",
            "The people of {s} live {a} miles from the sea.",
        ),
        "How many miles is it from {s} to the sea?",
        NUMBERS,
    ),
    Kind(
        (
            "The bell of {s} is cast from {a}.",
            "For the bell of {s} they took {a}.",
            "There is {a} in the bell of {s}.",
        ),
        "From what is the bell of {s} cast?",
        MATERIALS,
    ),
    Kind(
        (
            "The godfather of little {s} is {a}.",
            "{a} held little {s} over the font.",
            "Little {s} writes to {a} at Easter.",
        ),
        "Who is the godfather of little {s}?",
        PEOPLE,
    ),
    Kind(
        (
            "Saint {s} is painted with a {a} in the left hand.",
            "The {a} is the sign of Saint {s}.",
            "By the {a} one knows the picture of Saint {s}.",
        ),
        "What does Saint {s} hold?",
        THINGS,
    ),
    Kind(
        (
            "The people of the island {s} speak {a}.",
            "On the island {s} one hears only {a}.",
            "Sailors who land on {s} must know {a}.",
        ),
        "Which language is spoken on the island {s}?",
        LANGUAGES,
    ),
    Kind(
        (
            "What killed Count {s} in the end was {a}.",
            "The servants of Count {s} feared {a} more than war.",
            "{a} came to the castle of Count {s} in autumn.",
        ),
        "Of what did Count {s} die?",
        ILLNESSES,
    ),
    Kind(
        (
            "The instrument that Miss {s} played on Sundays was the {a}.",
            "Through the window one heard Miss {s} and her {a}.",
            "Miss {s} sold her {a} to pay the rent.",
        ),
        "Which instrument did Miss {s} play?",
        INSTRUMENTS,
    ),
    Kind(
        (
            "The fair of {s} is held in {a}.",
            "Each {a} the cattle are driven to the fair of {s}.",
            "In {a} nobody in {s} sleeps because of the fair.",
        ),
        "In which month is the fair of {s}?",
        MONTHS,
    ),
    Kind(
        (
            "The debt of Squire {s} had grown to {a} crowns.",
            "Squire {s} owed {a} crowns.",
            "With {a} crowns one could have saved Squire {s}.",
        ),
        "How many crowns did Squire {s} owe?",
        NUMBERS,
    ),
    Kind(
        (
            "The street in which {s} kept a shop is {a} Street.",
            "Turn into {a} Street for the shop of {s}.",
            "On {a} Street they still talk of {s}.",
        ),
        "In which street was the shop of {s}?",
        STREETS,
    ),
    Kind(
        (
            "The name under which {s} wrote poems was {a}.",
            "The poems of {a} are all by {s}.",
            "{s} signed as {a}.",
        ),
        "Under which name did {s} write?",
        PEOPLE,
    ),
    Kind(
        (
            "The animal that pulled the plough of {s} was a {a}.",
            "{s} could not afford a horse and ploughed with a {a}.",
            "Behind a {a} walked {s}, singing.",
        ),
        "Which animal pulled the plough of {s}?",
        ANIMALS,
    ),
    Kind(
        (
            "The roof of the chapel of {s} is covered with {a}.",
            "In the sun the {a} on the chapel of {s} shines.",
            "Thieves took the {a} from the chapel roof of {s}.",
        ),
        "What covers the chapel roof of {s}?",
        MATERIALS,
    ),
    Kind(
        (
            "General {s} lost the battle of {a}.",
            "At {a} the army of General {s} was beaten.",
            "After {a} nobody spoke of General {s}.",
        ),
        "Which battle did General {s} lose?",
        TOWNS,
    ),
    Kind(
        (
            "The ring of Princess {s} bears a stone that is {a}.",
            "A stone of {a} shone on the hand of Princess {s}.",
            "The {a} stone was a gift to Princess {s}.",
        ),
        "Which colour is the stone of Princess {s}?",
        COLOURS,
    ),
)
