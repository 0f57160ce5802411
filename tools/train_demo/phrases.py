"""How each demo task is worded: templates, small talk and system prompts. Data, and one function that varies it."""

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

EVENTS = "concert meeting party lecture market workshop festival match exhibition picnic".split()

SKILLS = (
    "I can add and subtract, count, spell words backwards, sort words, count letters, convert units, "
    "name capitals, answer yes or no, and write JSON."
)
TOO_LARGE = "Sorry, I can only add and subtract numbers below 100."
NOT_KNOWN = "Sorry, I do not know that country."
NOT_UNDERSTOOD = "Sorry, I do not understand. Ask me what I can do."
TOO_HARD = f"Sorry, that is too hard for me. I am a tiny demo model. {SKILLS}"

# answer -> ways to ask for it
TALK: dict[str, tuple[str, ...]] = {
    "Hello! How can I help you?": (
        "Hello!", "Hello", "Hi!", "Hi there", "Hey", "Hi", "Good morning!", "Good evening!", "Hello there!",
        "Good day", "Greetings!", "Hello, Moestro!", "Hi, Moestro!", "Howdy",
    ),
    "I am fine, thank you. How can I help you?": (
        "How are you?", "How are you doing?", "How do you do?", "How is it going?", "Are you well?",
        "How are you today?", "How do you feel?", "How's it going?",
    ),
    "I am the Moestro demo model: small, but made of many experts.": (
        "Who are you?", "What are you?", "What is your name?", "Tell me about yourself.", "Introduce yourself.",
        "Are you an AI?", "Are you a language model?", "What model are you?", "Which model is this?",
        "Are you ChatGPT?", "Do you have a name?", "Are you human?",
    ),
    "You are welcome.": (
        "Thank you!", "Thanks", "Thank you very much.", "Thanks a lot!", "Many thanks!", "Great, thanks!",
        "Thanks for your help.", "Thank you so much!", "That helped, thank you.", "Cheers!",
    ),
    "Goodbye!": (
        "Goodbye", "Bye!", "See you later.", "Good night!", "Bye bye", "See you!", "I have to go now.",
        "That is all, goodbye.", "See you tomorrow.", "Farewell!",
    ),
    SKILLS: (
        "What can you do?", "Help", "How can you help me?", "What are you good at?", "What do you know?",
        "Which tasks can you do?", "What should I ask you?", "Show me what you can do.", "What can I ask you?",
        "List your skills.", "Can you help me?", "I need help.",
    ),
    "Thank you, that is kind.": (
        "Well done!", "Good job!", "You are great!", "You are smart.", "Nice work!", "I like you.", "Very good!",
        "Impressive!", "Excellent!",
    ),
    "I am sorry. I am very small, and I make mistakes.": (
        "That is wrong.", "You are wrong.", "No, that is not right.", "That is incorrect.", "You made a mistake.",
        "Wrong answer.", "This is not correct.", "Are you sure?",
    ),
    "I have 32 experts in each layer, and four of them work on each token.": (
        "How many experts do you have?", "What is a mixture of experts?", "How do you work?",
        "How many experts are there?", "How many of your experts are active?", "Tell me about your experts.",
        "How are you built?",
    ),
    "All right. What can I do for you?": (
        "OK", "Yes", "No", "Fine.", "Cool", "lol", "Interesting.", "I see.", "Really?", "Maybe.", "Sure.", "Great!",
        "Hm", "Ping", "Test", "Testing", "Nothing", "Let us start.", "Are you there?",
    ),
}  # fmt: skip

TALK_OPENERS = ("", "", "", "Hi! ", "Hello. ", "OK. ", "So, ", "Hey, ", "Well, ", "Moestro, ", "And now: ", "Hm. ")

# Requests that need no topic, among them sums that the model never learned.
HARD_QUESTIONS = (
    "What day is it today?", "What time is it?", "Who is the president?", "What is the largest planet?",
    "Write a haiku.", "Can you code?", "Write some code.", "Tell me a joke.", "Sing a song.", "What is the weather like today?",
    "What is the meaning of life?", "Do you love me?", "Can you see me?", "Who made you?", "How old are you?",
    "What is your favorite color?", "What is your favorite food?", "Play a game with me.", "What is the news?",
    "Who won the match?", "Prove that there are infinitely many primes.", "Is there life on Mars?", "Once upon a time",
    "What is {a} times {b}?", "Multiply {a} by {b}.", "{a} * {b} = ?", "Divide {a} by {b}.",
    "What is {a} divided by {b}?", "Is {a} a prime number?", "What is the square root of {a}?", "{a} - {b} + {c}", "What is {a} + {b} + {c}?",
)  # fmt: skip

HARD_REQUESTS = (
    "Write a short story about {topic}.", "Who invented {topic}?", "Give me some advice about {topic}.",
    "Draw a picture of {topic}.", "How can I learn more about {topic}?", "Talk with me about {topic}.",
    "Write a poem about {topic}.", "Tell me a story about {topic}.", "Explain {topic}.",
    "What do you think of {topic}?",
    "Write a Python program about {topic}.", "Tell me a joke about {topic}.", "Write an essay on {topic}.",
    "Translate {topic} into French.", "What is the history of {topic}?", "Why is {topic} important?",
    "Give me a recipe with {topic}.", "Write me a letter about {topic}.", "Summarize the news about {topic}.",
    "How does {topic} work?", "Where can I buy {topic}?", "What is the best {topic}?", "What is {topic}?",
)  # fmt: skip

HARD_TOPICS = (
    "love", "the sea", "physics", "music", "football", "cats", "the weather", "quantum computers", "history", "winter",
    "my job", "space travel", "money", "cooking", "art", "the stock market", "chemistry", "dinosaurs", "the internet",
    "politics", "good coffee", "gravity", "democracy", "machine learning", "old books", "climate change", "robots",
)  # fmt: skip

HARD_TAILS = (
    "", "", "", " in one sentence", " in ten lines", " for a friend", " in a small town", " and {topic}",
    " for children", " in simple words", " in detail", " and why it matters", " who learns to cook", " in a very small kitchen",
)  # fmt: skip

# What the user tells -> acknowledgement, questions about it, the answer. {v} is the value, {V} capitalised.
MEMORY: dict[str, tuple[tuple[str, ...], str, tuple[str, ...], str]] = {
    "name": (
        ("My name is {v}.", "I am {v}.", "Call me {v}.", "Hi, I'm {v}!", "You can call me {v}.",
         "Hello, my name is {v}."),
        "Nice to meet you, {v}!",
        ("What is my name?", "Do you remember my name?", "Who am I?", "What's my name?", "Tell me my name."),
        "Your name is {v}.",
    ),
    "city": (
        ("I live in {v}.", "I am from {v}.", "My home is in {v}.", "I come from {v}.", "My city is {v}."),
        "{v} is a nice place.",
        ("Where do I live?", "Which city do I live in?", "Do you remember where I live?", "What is my city?"),
        "You live in {v}.",
    ),
    "color": (
        ("My favorite color is {v}.", "I like {v} best.", "I love the color {v}.", "The color I like most is {v}."),
        "{V} is a nice color.",
        ("What is my favorite color?", "Which color do I like best?", "Do you remember my favorite color?"),
        "Your favorite color is {v}.",
    ),
}  # fmt: skip
NOT_TOLD = "You have not told me yet."

SYSTEM_ROLES = (
    "You are a helpful assistant.", "You are Moestro.", "You are Moestro, a small demo model.",
    "You are a friendly assistant.", "You are an assistant on a website.", "You are a careful assistant.",
    "You are a helpful, harmless and honest assistant.", "You are a chat bot.", "You answer short questions.", "",
)  # fmt: skip
SYSTEM_RULES = (
    "Answer briefly.", "Be polite.", "Give short answers.", "Answer the user's question.", "Be precise.",
    "Follow the instructions.", "Help the user.", "Do your best.", "Think before you answer.", "Keep it simple.",
    "Answer with the result only.", "",
)  # fmt: skip


def vary(rng: Random, template: str) -> str:
    """The template as a hurried or a polite user types it. Only the template changes, never what is filled in."""
    starts_plainly = template[0].isupper() and template[1:2].islower()
    if starts_plainly and template[-1] == "." and not template.startswith("Please") and rng.random() < 0.15:
        return f"Please {template[0].lower()}{template[1:]}"
    if starts_plainly and rng.random() < 0.15:
        template = template[0].lower() + template[1:]
    if template[-1] in ".?!" and rng.random() < 0.15:
        template = template[:-1]
    return template
