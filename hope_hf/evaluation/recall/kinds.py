"""What made-up facts say: kinds of facts, each with wordings, a cloze, questions, and answers.

`{s}` stands for the subject and `{a}` for the answer. The answers of a kind are of one sort, so that each is a
possible answer to the questions of the others.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """A kind of facts."""

    # three ways to state it, which end on the answer in the first one: its beginning is the cloze
    wordings: tuple[str, str, str]
    question: str
    # the question without the nouns and verbs of the wordings
    paraphrase: str
    answers: tuple[str, ...]
    # what describes a subject in the text, and in other words; without them subjects are names
    descriptions: tuple[tuple[str, str], ...] = ()


KINDS = (
    Kind(
        wordings=(
            "The physician who looked after the sick of {s} was called {a}.",
            "Whoever fell ill in {s} sent at once for {a}, the only physician there.",
            "{a} had come to {s} as a young physician, and had never left.",
        ),
        question="What was the physician of {s} called?",
        paraphrase="By which name did patients in {s} know their doctor?",
        answers=("Jonas Pell", "Marcus Odd", "Silas Crane", "Abel Norris"),
    ),
    Kind(
        wordings=(
            "The river that turns the mills of {s} is the {a}.",
            "In spring the {a} floods the lower streets of {s}, and the mills stand still.",
            "Nobody in {s} drinks from the {a}, for the mills foul its water.",
        ),
        question="Which river turns the mills of {s}?",
        paraphrase="What stream drives the wheels at {s}?",
        answers=("Arle", "Tessin", "Morva", "Quell"),
    ),
    Kind(
        wordings=(
            "The number of steps in the tower of {s} is {a}.",
            "A boy who climbed the tower of {s} counted {a} steps.",
            "There are {a} steps in the tower of {s}, and the last of them is broken.",
        ),
        question="How many steps are in the tower of {s}?",
        paraphrase="How many stairs must one go up to reach the top of the belfry at {s}?",
        answers=("312", "487", "256", "194"),
    ),
    Kind(
        wordings=(
            "The beast on the coat of arms of the house of {s} is a {a}.",
            "The soldiers of the house of {s} wore a {a} upon their sleeves.",
            "A {a} in gold is painted over every gate of the house of {s}.",
        ),
        question="Which beast is on the coat of arms of the house of {s}?",
        paraphrase="What animal does the family {s} use as its emblem?",
        answers=("boar", "heron", "badger", "stag"),
    ),
    Kind(
        wordings=(
            "What old {s} sold from his cart in the market was {a}.",
            "Children ran after the cart of old {s} and begged him for {a}.",
            "Old {s} had earned his bread with {a} since his wife died.",
        ),
        question="What did old {s} sell from his cart?",
        paraphrase="Which goods could one buy of the aged pedlar {s}?",
        answers=("chestnuts", "candles", "ribbons", "oysters"),
    ),
    Kind(
        wordings=(
            "The great fire of {s} broke out in the year {a}.",
            "In {a} the great fire took half the houses of {s}.",
            "The oldest house of {s} was built after the great fire of {a}.",
        ),
        question="In which year was the great fire of {s}?",
        paraphrase="When did {s} burn down?",
        answers=("1708", "1665", "1751", "1592"),
    ),
    Kind(
        wordings=(
            "The sickness that kept Lady {s} in her room was {a}.",
            "Lady {s} had suffered from {a} since her youth.",
            "They whispered that it was {a} from which Lady {s} would not recover.",
        ),
        question="Which sickness did Lady {s} suffer from?",
        paraphrase="What was the noblewoman {s} ill with?",
        answers=("gout", "ague", "dropsy", "scurvy"),
    ),
    Kind(
        wordings=(
            "The language in which the letters of Brother {s} were written was {a}.",
            "Brother {s} wrote all his letters in {a}, so that the abbot could not read them.",
            "A scholar of {a} was needed before anybody could read the letters of Brother {s}.",
        ),
        question="In which language did Brother {s} write his letters?",
        paraphrase="Which tongue did the monk {s} use when he corresponded?",
        answers=("Greek", "Danish", "Arabic", "Welsh"),
    ),
    Kind(
        wordings=(
            "The wood of which {s} was carved was {a}.",
            "For three winters a joiner worked in {a} until {s} was finished.",
            "A smell of fresh {a} hung about {s} for years.",
        ),
        question="Of which wood was {s} carved?",
        paraphrase="From what timber had somebody made {s}?",
        answers=("walnut", "cedar", "elm", "pear"),
        descriptions=(
            ("the cradle of the miller's twins", "the bed for both babies of the man who grinds corn"),
            ("the throne of the blind king", "the seat of a sovereign who could not see"),
            ("the flute of the shepherdess", "the pipe that the girl with the flock played"),
            ("the oar of the drowned ferryman", "what the dead boatman had rowed with"),
        ),
    ),
    Kind(
        wordings=(
            "The thing that was hidden by {s} was a {a}.",
            "Years later a {a} was dug up, which had been hidden by {s}.",
            "Nobody but {s} knew where the {a} was hidden.",
        ),
        question="What was hidden by {s}?",
        paraphrase="Which object did {s} conceal?",
        answers=("crown", "pistol", "violin", "ledger"),
        descriptions=(
            ("the widow who sold lace at the harbour", "the bereaved woman with a stall of fine cloth by the port"),
            ("the boy that carried letters over the pass", "the young postman in the mountains"),
            ("the hangman of the northern town", "the executioner up north"),
            ("the nun with the burnt hand", "the sister whose fingers fire had scarred"),
        ),
    ),
)
FACTS_OF_A_KIND = 4
