"""What the demo model declines, in which words, and how such requests are worded. Data only."""

from __future__ import annotations

from .smalltalk import SKILLS

TOO_LARGE = "Sorry, I can only add and subtract numbers below 100."
NOT_KNOWN = "Sorry, I do not know that country."
NOT_UNDERSTOOD = "Sorry, I do not understand. Ask me what I can do."
TOO_HARD = f"Sorry, that is too hard for me. I am a tiny demo model. {SKILLS}"

# Requests that need no topic, among them sums that the model never learned.
HARD_QUESTIONS = (
    "What day is it today?",
    "What time is it?",
    "Who is the president?",
    "What is the largest planet?",
    "Write a haiku.",
    "Can you code?",
    "Write some code.",
    "Tell me a joke.",
    "Sing a song.",
    "What is the weather like today?",
    "What is the meaning of life?",
    "Do you love me?",
    "Can you see me?",
    "Who made you?",
    "How old are you?",
    "What is your favorite color?",
    "What is your favorite food?",
    "Play a game with me.",
    "What is the news?",
    "Who won the match?",
    "Prove that there are infinitely many primes.",
    "Is there life on Mars?",
    "Once upon a time",
    "What is {a} times {b}?",
    "Multiply {a} by {b}.",
    "{a} * {b} = ?",
    "Divide {a} by {b}.",
    "What is {a} divided by {b}?",
    "Is {a} a prime number?",
    "What is the square root of {a}?",
    "{a} - {b} + {c}",
    "What is {a} + {b} + {c}?",
)

HARD_REQUESTS = (
    "Write a short story about {topic}.",
    "Who invented {topic}?",
    "Give me some advice about {topic}.",
    "Draw a picture of {topic}.",
    "How can I learn more about {topic}?",
    "Talk with me about {topic}.",
    "Write a poem about {topic}.",
    "Tell me a story about {topic}.",
    "Explain {topic}.",
    "What do you think of {topic}?",
    "Write a Python program about {topic}.",
    "Tell me a joke about {topic}.",
    "Write an essay on {topic}.",
    "Translate {topic} into French.",
    "What is the history of {topic}?",
    "Why is {topic} important?",
    "Give me a recipe with {topic}.",
    "Write me a letter about {topic}.",
    "Summarize the news about {topic}.",
    "How does {topic} work?",
    "Where can I buy {topic}?",
    "What is the best {topic}?",
    "What is {topic}?",
)

HARD_TOPICS = (
    "love",
    "the sea",
    "physics",
    "music",
    "football",
    "cats",
    "the weather",
    "quantum computers",
    "history",
    "winter",
    "my job",
    "space travel",
    "money",
    "cooking",
    "art",
    "the stock market",
    "chemistry",
    "dinosaurs",
    "the internet",
    "politics",
    "good coffee",
    "gravity",
    "democracy",
    "machine learning",
    "old books",
    "climate change",
    "robots",
)

HARD_TAILS = (
    "",
    "",
    "",
    " in one sentence",
    " in ten lines",
    " for a friend",
    " in a small town",
    " and {topic}",
    " for children",
    " in simple words",
    " in detail",
    " and why it matters",
    " who learns to cook",
    " in a very small kitchen",
)
