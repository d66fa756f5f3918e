"""Sixty-four short and not so short prompts that differ in language, shape and length."""

from __future__ import annotations

SYSTEM = "You are a patient assistant who answers in plain words."

QUESTIONS = [
    "What is a tide?",
    "Why does bread rise?",
    "Name three rivers in South America.",
    "How do I sharpen a kitchen knife?",
    "Explain gravity to a child.",
    "What is the difference between a comet and an asteroid?",
    "Give me a recipe for lentil soup.",
    "Write a haiku about a lighthouse.",
    "Is a tomato a fruit or a vegetable?",
    "How many legs do seven spiders have together?",
    "Translate 'good morning, my friend' into French.",
    "Summarize the water cycle in two sentences.",
    "List the planets from the sun outwards.",
    "What should I pack for a week in the mountains?",
    "Who invented the printing press?",
    "Suggest a name for a grey cat.",
    "Write a short letter to a neighbour about a lost umbrella.",
    "What does HTTP stand for?",
    "Compare tea and coffee.",
    "Tell me a story about a clock that runs backwards.",
]

CODE = [
    "def fibonacci(n):\n    ",
    "import numpy as np\n\ndef softmax(x, axis=-1):\n    ",
    "SELECT name, COUNT(*) FROM orders\nWHERE ",
    "#include <stdio.h>\n\nint main(void) {\n    for (int i = 0; i < 10; ++i) {\n        ",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    '{"name": "Ada", "age": 36, "languages": ["en", "fr"], "address": {"street": ',
    "<html>\n<head>\n<title>Ferry timetable</title>\n</head>\n<body>\n<table>\n",
    "fn main() {\n    let numbers = vec![1, 2, 3];\n    let sum: i32 = ",
    "$ git status\nOn branch main\nChanges not staged for commit:\n",
    "for file in *.txt; do\n  ",
]

LISTS = [
    "Shopping list:\n1. apples\n2. flour\n3. ",
    "- red\n- orange\n- yellow\n- ",
    "Monday, Tuesday, Wednesday,",
    "one two three four five one two three four five one two three",
    "a b c a b c a b c a b c a b",
    "Ingredients\n\n* 200 g sugar\n* 3 eggs\n* ",
    "| city | country |\n|---|---|\n| Oslo | Norway |\n| Lima | Peru |\n| Cairo |",
    "Alphabet: A is for apple, B is for boat, C is for",
]

NUMBERS = [
    "1, 1, 2, 3, 5, 8, 13,",
    "12 + 30 = 42\n15 + 27 = 42\n21 + 21 =",
    "Pi is approximately 3.14159",
    "2024-01-31, 2024-02-29, 2024-03-31,",
    "The total is $1,299.00, and with 20% tax it is",
    "0x00 0x01 0x02 0x03",
]

LANGUAGES = [
    "Der schnellste Weg zum Bahnhof ist",
    "La capitale de la France est",
    "El perro corre por la playa y",
    "Il treno parte alle otto e arriva",
    "昔々あるところに、おじいさんと",
    "今天的天气很好。我们",
    "Съешь ещё этих мягких французских",
    "Καλημέρα, πώς",
    "مرحبا، كيف",
    "Emoji: 🙂 🚀 🌧️ and",
]

OPENINGS = [
    "Once upon a time, in a village at the foot of a mountain,",
    "The committee met on Thursday to discuss",
    "Dear Sir or Madam,\n\n",
    "    indented    text   with \t odd   spaces",
]

_PARAGRAPH = (
    "The harbour wakes before the town does. Fishing boats come in with the tide, and their crews "
    "unload crates of herring under lamps that swing in the wind. By six o'clock the auction has "
    "begun: buyers nod, scratch an ear or raise a finger, and each gesture is a price. "
)
_MINUTES = (
    "Item {number}: the bridge on road {number} needs new railings. Cost: {cost} crowns. "
    "Decision: postponed until the inspection in month {month}. "
)

LONG = [
    _PARAGRAPH * 2 + "\n\nContinue the description:\n",
    "".join(
        _MINUTES.format(number=number, cost=number * 1250, month=number % 12 + 1)
        for number in range(1, 9)
    ),
    "Repeat the following text exactly.\n\n" + _PARAGRAPH + "\n\n" + _PARAGRAPH[:80],
    "".join(
        f"Line {number}: {number} times {number} is {number * number}.\n" for number in range(1, 21)
    ),
    _PARAGRAPH + "Question: when does the auction begin?\nAnswer:",
    "Glossary.\n"
    + "".join(f"Term {letter}: see term {letter.lower()}.\n" for letter in "ABCDEFGHIJ"),
]

PLAIN = [*CODE, *LISTS, *NUMBERS, *LANGUAGES, *OPENINGS, *LONG]


def conversations() -> list[list[dict[str, str]]]:
    """Every question as a conversation, every other one with a system message."""
    return [
        [
            *([{"role": "system", "content": SYSTEM}] if index % 2 else []),
            {"role": "user", "content": question},
        ]
        for index, question in enumerate(QUESTIONS)
    ]
