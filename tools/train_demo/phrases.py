"""How the tasks with one right result are worded: templates, and how they vary."""

from __future__ import annotations

from random import Random

ADD = (
    "What is {a} plus {b}?",
    "{a} + {b} = ?",
    "Add {a} and {b}.",
    "How much is {a} + {b}?",
    "What is {a} + {b}?",
    "Calculate {a} + {b}.",
    "What is the sum of {a} and {b}?",
    "Compute {a} plus {b}.",
    "{a}+{b}",
    "{a} plus {b}",
    "If you add {b} to {a}, what do you get?",
    "How much do {a} and {b} make together?",
)

SUBTRACT = (
    "What is {a} minus {b}?",
    "{a} - {b} = ?",
    "Subtract {b} from {a}.",
    "How much is {a} - {b}?",
    "What is {a} - {b}?",
    "Calculate {a} - {b}.",
    "What is the difference between {a} and {b}?",
    "Compute {a} minus {b}.",
    "{a}-{b}",
    "{a} minus {b}",
    "Take {b} away from {a}.",
    "If you take {b} from {a}, what is left?",
)

BACKWARDS = (
    "Spell {word} backwards.",
    "Reverse the word {word}.",
    "Write {word} backwards.",
    "What is {word} spelled backwards?",
    "How do you spell {word} backwards?",
    'Spell "{word}" backwards.',
    'Reverse "{word}".',
    "Reverse: {word}",
    "Write the word {word} in reverse.",
    "Read {word} from right to left.",
    "Flip the letters of {word}.",
    "Turn the word {word} around.",
    "Can you reverse {word}?",
    "Give me {word} with its letters in reverse order.",
)

SORT = (
    "Sort these words: {words}",
    "Put these words in alphabetical order: {words}",
    "Put in alphabetical order: {words}",
    "Sort alphabetically: {words}",
    "Alphabetize: {words}",
    "Sort the words {words}.",
    "Order these words from A to Z: {words}",
    "Arrange in alphabetical order: {words}",
    "Sort the list {words}.",
    "{words} - sort these words.",
    "What is the alphabetical order of {words}?",
    "Can you sort {words}?",
    "Sort these words alphabetically: {words}",
    "Sort: {words}",
    "Sort {words}.",
)

COUNT = (
    "How many times does {letter} occur in {word}?",
    "Count the letter {letter} in {word}.",
    "How many {letter} are in {word}?",
    "How often does the letter {letter} appear in {word}?",
    "How many times does the letter {letter} occur in {word}?",
    "How many letters {letter} are in the word {word}?",
    "How many {letter}'s are in {word}?",
    "How many times is {letter} in {word}?",
    'Count "{letter}" in "{word}".',
    'How many "{letter}" are in "{word}"?',
    "In the word {word}, how many times do you see {letter}?",
    "Tell me how many times {letter} appears in {word}.",
)

LENGTH = (
    "How many letters are in {word}?",
    "How many letters does {word} have?",
    "How long is the word {word}?",
    "Count the letters in {word}.",
    "How many letters has the word {word}?",
)

UNITS = (
    "How many {small} are in {amount}?",
    "Convert {amount} to {small}.",
    "How many {small} is {amount}?",
    "{amount} in {small}?",
    "What is {amount} in {small}?",
    "Express {amount} in {small}.",
    "{amount} to {small}",
    "Change {amount} into {small}.",
    "How many {small} make {amount}?",
    "How many {small} do {amount} have?",
)

CAPITALS = (
    "What is the capital of {country}?",
    "Capital of {country}?",
    "Which city is the capital of {country}?",
    "Name the capital of {country}.",
    "Tell me the capital of {country}.",
    "What is the capital city of {country}?",
    "What's the capital of {country}?",
    "Do you know the capital of {country}?",
    "The capital of {country} is?",
    "{country}: what is its capital?",
    "Give me the capital of {country}.",
    "I need the capital of {country}.",
    "Which city is {country}'s capital?",
    "What city is the capital of {country}?",
)

CAPITAL_FACTS = (
    "Is {city} the capital of {country}?",
    "Yes or no: is {city} the capital of {country}?",
    "Is the capital of {country} {city}?",
    "True or not: {city} is the capital of {country}?",
    "Is it true that {city} is the capital of {country}?",
    "Is {city} in {country}?",
)

KIND_FACTS = (
    "Is {thing} {kind}?",
    "Yes or no: is {thing} {kind}?",
    "Is it true that {thing} is {kind}?",
    "Would you say that {thing} is {kind}?",
    "Is {thing} {kind} or not?",
)

MORE_FACTS = (
    "Is {a} greater than {b}?",
    "Is {a} larger than {b}?",
    "Is {a} bigger than {b}?",
    "Is {a} more than {b}?",
    "Yes or no: is {a} greater than {b}?",
    "Is {a} > {b}?",
)

LESS_FACTS = (
    "Is {a} less than {b}?",
    "Is {a} smaller than {b}?",
    "Yes or no: is {a} less than {b}?",
    "Is {a} < {b}?",
)

PARITY_FACTS = (
    "Is {a} {parity}?",
    "Is {a} an {parity} number?",
    "Yes or no: is {a} {parity}?",
    "Is the number {a} {parity}?",
)

COUNT_UP = (
    "Count from {a} to {b}.",
    "Count up from {a} to {b}.",
    "Write the numbers from {a} to {b}.",
    "List the numbers {a} to {b}.",
    "Please count from {a} up to {b}.",
    "Give me all numbers between {a} and {b}, both included.",
)

COUNT_FROM_ONE = "Count to {b}."

COUNT_DOWN = (
    "Count down from {b} to {a}.",
    "Count backwards from {b} to {a}.",
    "Write the numbers from {b} down to {a}.",
    "Start at {b} and count down to {a}.",
)

FIELD = (
    "What is the {field} in this text? {text}",
    "{text} What is the {field}?",
    "Extract the {field}: {text}",
    "Give only the {field} from this text: {text}",
    "Find the {field} in: {text}",
    "Which {field} does this text give? {text}",
    "Read this: {text} Now tell me the {field}.",
    "Text: {text} Question: what is the {field}?",
    "What {field} is mentioned here? {text}",
    "From the following text, give me the {field}. {text}",
)

JSON = (
    "Extract {fields} as JSON: {text}",
    "Extract the {fields} as JSON: {text}",
    "Give me the {fields} as JSON. {text}",
    "Give JSON with {fields}: {text}",
    "Return a JSON object with {fields}. {text}",
    "{text} Write {fields} as JSON.",
    "Turn this into JSON with {fields}: {text}",
    "Answer in JSON with {fields}: {text}",
    "Give me {fields} in JSON format: {text}",
    "Read the text and return {fields} as JSON. Text: {text}",
    "As JSON, with {fields}: {text}",
    "Convert to JSON ({fields}): {text}",
)

JSON_ALL = (
    "Extract JSON: {text}",
    "Turn this into JSON: {text}",
    "Convert to JSON: {text}",
    "Write this as JSON: {text}",
    "{text} Give me that as JSON.",
)

PERSON_TEXTS = (
    "{name} lives in {city}.",
    "{name} is {age} years old.",
    "{name} is {age} and lives in {city}.",
    "{name} is {age} years old and lives in {city}.",
    "{name}, {age} years old, from {city}.",
    "{name} is a {job} from {city}.",
    "{name} works as a {job} in {city} and is {age} years old.",
    "My name is {name}, I am {age} and I live in {city}.",
    "Meet {name}, a {job}, aged {age}, who lives in {city}.",
    "name: {name}; age: {age}; city: {city}",
    "{name} ({age}), {job}, {city}",
    "In {city} there lives a {job} of {age} years called {name}.",
)

ORDER_TEXTS = (
    "{customer} ordered {quantity} pieces of {item} for {price} euros.",
    "{customer} bought {item} x {quantity}, price {price}.",
    "item: {item}, quantity: {quantity}, price: {price}",
    "Order from {customer}: {quantity} of {item}, {price} dollars in total.",
    "We sold {quantity} units of {item} to {customer} for {price} dollars.",
)

EVENT_TEXTS = (
    "The {event} is on {day} at {time} in {place}.",
    "{event}: {day}, {time}, {place}",
    "Come to the {event} in {place} on {day} at {time}.",
    "On {day} at {time} there is a {event} in {place}.",
    "The {event} in {place} starts at {time} on {day}.",
)

EVENTS = [
    "concert",
    "meeting",
    "party",
    "lecture",
    "market",
    "workshop",
    "festival",
    "match",
    "exhibition",
    "picnic",
]


def vary(rng: Random, template: str) -> str:
    """The template as a hurried or a polite user types it. What is filled in never changes."""
    starts_plainly = template[0].isupper() and template[1:2].islower()
    if (
        starts_plainly
        and template[-1] == "."
        and not template.startswith("Please")
        and rng.random() < 0.15
    ):
        return f"Please {template[0].lower()}{template[1:]}"
    if starts_plainly and rng.random() < 0.15:
        template = template[0].lower() + template[1:]
    if template[-1] in ".?!" and rng.random() < 0.15:
        template = template[:-1]
    return template
