# SPDX-License-Identifier: Apache-2.0
"""What the demo asks: from a few words to a few hundred tokens, after one system prompt."""

SYSTEM = (
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face. You are friendly and "
    "honest. You answer in plain and correct English. Keep every answer short: one paragraph, or "
    "a short list when the user asks for a list."
)

_LIGHTHOUSES = """\
Before there were lighthouses, sailors were guided home by fires lit on hilltops. A fire on a \
platform could be seen from further away, and so the first towers were built at the entrances of \
ports. The most famous of them stood on the island of Pharos, near the city of Alexandria in \
Egypt. It was finished around 280 BC, was more than one hundred metres high, and was damaged by \
several earthquakes before it fell.

The modern lighthouse begins in the eighteenth century, when trade across the Atlantic grew and \
engineers learned to build on rocks in the open sea. John Smeaton's tower on the Eddystone rocks, \
lit in 1759, was made of granite blocks that locked into one another, and of a cement that set \
under water. Its shape, wide at the foot and slender above, was taken from the trunk of an oak.

The next great step was the lens. In 1822 the French physicist Augustin Fresnel replaced one thick \
piece of glass by many thin rings, each of which bent the light a little. Such a lens was light \
enough to turn on a bed of mercury, and it sent the light of a single lamp more than thirty \
kilometres out to sea. Every lighthouse was given its own rhythm of flashes, so that a captain \
could tell from a printed list which one was in sight.

Lamps burned whale oil at first, then petroleum, and from the end of the nineteenth century \
electricity. Keepers wound the clockwork, trimmed the wicks, cleaned the glass and wrote down the \
weather. During the twentieth century almost all of the lights were made automatic, and the last \
keepers went home. Satellites now tell ships where they are, yet many lights are still kept, for \
they need no receiver and cannot be switched off from afar."""

_LETTER = """\
Dear neighbours, as you know the roof of the community hall has been leaking since the storm in \
March. The builder came on Tuesday and found that eleven tiles are broken and that one beam is \
wet. He can start on 4 May and will need about two weeks. During this time the hall stays closed, \
so the choir will meet in the school and the chess club at the library. The repair costs 3,200 \
euros. The town pays half of it. For the rest we will hold a cake sale on Saturday, 25 April, \
from ten in the morning, in front of the hall. Please bring cakes, and please bring friends. \
Yours, Marta"""

_ABOUT_LIGHTHOUSES = f"Here is a text about lighthouses.\n\n{_LIGHTHOUSES}\n\n"

PROMPTS = {
    "greeting": "Hi! Who are you?",
    "summary": f"{_ABOUT_LIGHTHOUSES}Summarize the text.",
    "capital": "What is the capital of France?",
    "seasons": "Why do we have seasons?",
    "sleep": "Give me three tips for sleeping well.",
    "pharos": f"{_ABOUT_LIGHTHOUSES}Where did the most famous lighthouse stand?",
    "rainbow": "Explain in two sentences how a rainbow forms.",
    "letter": f"{_LETTER}\n\nWhat happened to the roof?",
    "code": "Write a Python function that returns the square of a number.",
    "water": "What is the water cycle?",
}
