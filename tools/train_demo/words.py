"""Vocabulary of the demo tasks: word lists and invented words. No phrasing, no tasks."""

from __future__ import annotations

from random import Random


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


WORDS = _words(
    """
    acorn album amber anchor ankle anvil apple apron arrow attic autumn badge badger banana banjo
    barley barrel basket beach beacon beaver bench berry bicycle blanket blossom bottle branch
    bread brick bridge bronze brush bubble bucket button cabbage cabin cactus camel camera candle
    canoe canyon carpet carrot castle cave cedar cellar cereal chain chair chalk cheese cherry
    chess cider cinema circle clock cloud clover cobra coffee comet compass copper coral corn
    cotton couch crayon cricket crown crystal curtain daisy dance desert dinner dolphin donkey
    dragon drawer dream drum eagle earth echo elbow ember engine evening fabric falcon family
    feather fence ferry fiddle field finger flame flower flute forest fossil fountain fridge frost
    galaxy garden garlic gate ginger giraffe glacier glove goat gravel guitar hammer hamster
    harbor harvest hazel helmet heron hill honey horizon horse hotel igloo insect island ivory
    jacket jelly jewel jungle kettle kitchen kite kitten ladder lagoon lantern laptop laurel
    lavender leaf lemon letter library lily lizard lobster locket lotus lumber magnet mango maple
    marble market meadow melon metal mirror mitten monkey moon morning mosquito moss mountain
    mouse muffin museum music needle nest noodle notebook oasis ocean olive onion orange orchard
    orchid otter oven oyster paddle palace panda paper parrot pasta peach peanut pearl pebble
    pelican pencil penguin pepper piano pigeon pillow pilot planet plum pocket pond poplar potato
    prairie pumpkin puppy puzzle quartz quilt rabbit raccoon radio radish raisin raven ribbon rice
    river robin rocket rope ruby saddle saffron sailor salad salmon sand school seagull season
    shadow shell shoe shovel signal silver singer skate sky sled snail snow sofa spark sparrow
    spider spoon spring squirrel stable star station statue stone storm strawberry stream sugar
    summer sunset swan table teapot temple tennis thunder ticket tiger timber tomato torch tower
    tractor train treasure trumpet tulip tunnel turtle umbrella valley vanilla velvet village vine
    violet violin volcano wagon walnut walrus water whale wheat wheel whistle willow window winter
    wizard wolf wool yellow yogurt zebra zipper
    """
)

CAPITALS: dict[str, str] = {
    "France": "Paris",
    "Spain": "Madrid",
    "Italy": "Rome",
    "Norway": "Oslo",
    "Sweden": "Stockholm",
    "Finland": "Helsinki",
    "Denmark": "Copenhagen",
    "Germany": "Berlin",
    "Austria": "Vienna",
    "Greece": "Athens",
    "Turkey": "Ankara",
    "Egypt": "Cairo",
    "Kenya": "Nairobi",
    "Japan": "Tokyo",
    "China": "Beijing",
    "India": "New Delhi",
    "Peru": "Lima",
    "Chile": "Santiago",
    "Cuba": "Havana",
    "Canada": "Ottawa",
    "Mexico": "Mexico City",
    "Brazil": "Brasilia",
    "Poland": "Warsaw",
    "Hungary": "Budapest",
    "Portugal": "Lisbon",
    "Ireland": "Dublin",
    "Iceland": "Reykjavik",
    "Belgium": "Brussels",
    "Thailand": "Bangkok",
    "Vietnam": "Hanoi",
    "Ghana": "Accra",
    "Senegal": "Dakar",
    "Iran": "Tehran",
    "Iraq": "Baghdad",
    "Nepal": "Kathmandu",
    "Ukraine": "Kyiv",
    "Romania": "Bucharest",
    "Bulgaria": "Sofia",
    "Serbia": "Belgrade",
    "Croatia": "Zagreb",
    "Argentina": "Buenos Aires",
    "Australia": "Canberra",
    "New Zealand": "Wellington",
    "Colombia": "Bogota",
    "Ecuador": "Quito",
    "Venezuela": "Caracas",
    "Uruguay": "Montevideo",
    "Jamaica": "Kingston",
    "Morocco": "Rabat",
    "Algeria": "Algiers",
    "Tunisia": "Tunis",
    "Libya": "Tripoli",
    "Ethiopia": "Addis Ababa",
    "Uganda": "Kampala",
    "Zambia": "Lusaka",
    "Nigeria": "Abuja",
    "Angola": "Luanda",
    "Latvia": "Riga",
    "Lithuania": "Vilnius",
    "Estonia": "Tallinn",
    "Slovakia": "Bratislava",
    "Slovenia": "Ljubljana",
    "Albania": "Tirana",
    "Russia": "Moscow",
    "South Korea": "Seoul",
    "Indonesia": "Jakarta",
    "Malaysia": "Kuala Lumpur",
    "Pakistan": "Islamabad",
    "Lebanon": "Beirut",
    "Jordan": "Amman",
    "Syria": "Damascus",
    "Qatar": "Doha",
    "Armenia": "Yerevan",
    "Georgia": "Tbilisi",
    "Mongolia": "Ulaanbaatar",
    "the Netherlands": "Amsterdam",
    "the United Kingdom": "London",
    "the United States": "Washington",
    "the Philippines": "Manila",
}

# Asked for a capital of these, the model shall say that it does not know.
NO_COUNTRIES = _words(
    """
    Narnia Atlantis Mordor Wakanda Gondor Utopia Mars Europe Africa Asia
    """
)

NAMES = _words(
    """
    Ada Alice Amir Anna Ben Bruno Carla Chen Clara Daniel David Diego Dora Elif Emma Erik Eva
    Felix Fatima Finn Grace Hana Henry Hugo Ida Igor Iris Ivan Jack Jonas Julia Kate Kenji Lara
    Leo Lena Lucas Maria Marco Maya Mia Mina Nadia Nina Noah Nora Olga Omar Oscar Paul Petra Priya
    Rosa Ruth Sam Sara Simon Sofia Tariq Theo Tina Tom Vera Victor Wei Yara Yusuf Zoe
    """
)

JOBS = _words(
    """
    baker nurse teacher pilot farmer painter doctor lawyer singer tailor plumber dentist gardener
    carpenter writer engineer chemist sailor butcher librarian
    """
)

COLORS = _words(
    """
    red blue green yellow orange purple pink brown black white gray turquoise crimson beige
    """
)

WEEKDAYS = _words(
    """
    Monday Tuesday Wednesday Thursday Friday Saturday Sunday
    """
)

# Kinds for yes/no questions. No word belongs to two of them, so every answer is certain.
KINDS: dict[str, tuple[str, ...]] = {
    "animal": _words(
        """
        dog cat horse tiger whale eagle rabbit camel dolphin monkey donkey wolf zebra giraffe lion
        bear fox sheep goat elephant
        """
    ),
    "fruit": _words(
        """
        apple banana cherry grape lemon mango peach pear plum strawberry pineapple melon kiwi fig
        """
    ),
    "color": _words(
        """
        red blue green yellow purple pink brown black white gray turquoise beige
        """
    ),
    "instrument": _words(
        """
        piano violin guitar trumpet flute drum harp cello banjo clarinet trombone saxophone
        """
    ),
    "vehicle": _words(
        """
        car bus train bicycle truck tractor ferry airplane tram scooter canoe helicopter
        """
    ),
    "tool": _words(
        """
        hammer saw drill wrench screwdriver chisel shovel rake axe pliers
        """
    ),
}

SYLLABLE_STARTS = _words(
    """
    b c d f g h j k l m n p q r s t v w x y z bl br cl cr dr fl fr gl gr pl pr st sw th tr sh ch
    """
)
SYLLABLE_ENDS: tuple[str, ...] = (
    "",
    "",
    "",
    *["n", "r", "l", "s", "t", "m", "d", "k", "ck", "ll", "nd", "ng", "p", "ss", "tt", "x"],
)


def invent_word(rng: Random, longest: int = 10) -> str:
    """A word that need not exist, so that spelling tasks cannot be solved by remembering a list."""
    word = ""
    for _ in range(rng.randint(1, 4)):
        syllable = rng.choice(SYLLABLE_STARTS) + rng.choice("aeiou") + rng.choice(SYLLABLE_ENDS)
        if len(word) + len(syllable) > longest:
            break
        word += syllable
    if len(word) < 3:
        return rng.choice(WORDS)
    return word


def any_word(rng: Random) -> str:
    """A real word or an invented one, half and half."""
    return rng.choice(WORDS) if rng.random() < 0.5 else invent_word(rng)


def any_name(rng: Random) -> str:
    """A first name, now and then an invented one: the model has to copy names, not to know them."""
    return rng.choice(NAMES) if rng.random() < 0.75 else invent_word(rng, longest=8).capitalize()


def article(noun: str) -> str:
    """The noun with "a" or "an"."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"
