"""Every wording of a question: lists for training, and lists that training never sees.

Slots: {pic} a word for the picture, {thing} a word for a drawn shape, {ref} a named object such as
"the red circle", {a} the same with an article "a red circle", {plural} "circles" or "red shapes", {ref2} a second
object, {nth} "first" or "second".
"""

from __future__ import annotations

from random import Random

from demo.language.paraphrases import EXTRA

TRAIN: dict[str, tuple[str, ...]] = {
    "shape": (
        "What shape is this?", "What shape is it?", "Which shape is this?", "What is the shape?", "Name the shape.",
        "What shape do you see?", "What shape is in {pic}?", "Tell me the shape.",
        "Which shape can you see in {pic}?", "Identify the shape.", "What kind of shape is this?",
        "What shape is shown?", "What is this shape called?", "Is it a circle, a square or something else?",
        "What form does the {thing} have?", "What shape is drawn here?", "Say which shape it is.",
        "What type of shape is shown in {pic}?", "Shape?",
    ),
    "shape_of": (
        "What shape is {ref}?", "Which shape is {ref}?", "What is the shape of {ref}?", "Name the shape of {ref}.",
        "Tell me the shape of {ref}.", "What kind of shape is {ref}?", "What shape does {ref} have?",
        "What is {ref}?", "Which shape does {ref} have?", "Look at {ref}. What shape is it?",
        "{ref}: which shape is it?",
    ),
    "colour": (
        "What color is it?", "What colour is it?", "What color is the {thing}?", "What is the color of the {thing}?",
        "Which color is the {thing}?", "Name the color.", "Tell me the color of the {thing}.",
        "What colour is this?", "Which colour does the {thing} have?", "What color do you see?",
        "What color does it have?", "Color?", "What color is the {thing} in {pic}?", "Say the color of the {thing}.",
        "Identify the color.", "In which color is the {thing} drawn?", "What is its color?",
    ),
    "colour_of": (
        "What color is {ref}?", "What colour is {ref}?", "What is the color of {ref}?", "Which color is {ref}?",
        "Tell me the color of {ref}.", "What color does {ref} have?", "Name the colour of {ref}.",
        "{ref}: what color?", "Which color does {ref} have?", "Look at {ref}. What color is it?",
        "In which colour is {ref} drawn?", "What is the colour of {ref} in {pic}?", "Say the color of {ref}.",
    ),
    "ground": (
        "What color is the background?", "What is the background color?", "What colour is the background?",
        "Which color is the background?", "Tell me the color of the background.",
        "What color is behind the {thing}?", "Name the background color.", "What is the color of the background?",
        "What color does the background have?", "Background color?",
        "Which colour does the background of {pic} have?", "Say the color of the background.",
    ),
    "count": (
        "How many {thing}s are there?", "How many {thing}s do you see?", "How many {thing}s are in {pic}?",
        "Count the {thing}s.", "What is the number of {thing}s?", "How many {thing}s can you see?", "Count them.",
        "How many {thing}s does {pic} show?", "Tell me how many {thing}s there are.", "How many are there?",
        "How many {thing}s are shown?", "How many {thing}s are there in total?", "Count the {thing}s in {pic}.",
        "Please count the {thing}s you see.", "How many different {thing}s are drawn?", "Number of {thing}s?",
    ),
    "count_of": (
        "How many {plural} are there?", "How many {plural} do you see?", "How many {plural} are in {pic}?",
        "Count the {plural}.", "How many {plural} can you see?", "What is the number of {plural}?",
        "Tell me how many {plural} there are.", "How many {plural} are shown?", "How many {plural} does {pic} have?",
        "Count the {plural} in {pic}.", "Number of {plural}?", "How many of them are {plural}?",
    ),
    "where": (
        "Where is {ref}?", "Where is {ref} in {pic}?", "What is the position of {ref}?", "Where do you see {ref}?",
        "In which part of {pic} is {ref}?", "Tell me where {ref} is.", "Where can I find {ref}?",
        "Where is {ref} placed?", "Which part of {pic} shows {ref}?", "Find {ref}.", "Position of {ref}?",
        "Say where {ref} is.", "In what place is {ref}?", "Where is {ref} drawn?",
    ),
    "relation": (
        "Is {ref} {rel} {ref2}?", "Is {ref} {rel} {ref2} in {pic}?", "Do you see {ref} {rel} {ref2}?",
        "Would you say that {ref} is {rel} {ref2}?", "Can you see {ref} {rel} {ref2}?",
        "Is it true that {ref} is {rel} {ref2}?", "{ref} is {rel} {ref2}, right?", "Check if {ref} is {rel} {ref2}.",
        "Does {ref} lie {rel} {ref2}?",
    ),
    "side": (
        "What is {side}?", "Which {thing} is {side}?", "What do you see {side}?", "Which {thing} do you see {side}?",
        "Name the {thing} {side}.", "Tell me what is {side}.", "What is drawn {side}?", "What is {side} in {pic}?",
        "Which {thing} is {side} of {pic}?", "What can you see {side}?", "Say what is {side}.",
        "What {thing} is {side}?",
    ),
    "beside": (
        "What is {rel} {ref}?", "Which {thing} is {rel} {ref}?", "What do you see {rel} {ref}?",
        "Name the {thing} {rel} {ref}.", "What is drawn {rel} {ref}?", "Tell me what is {rel} {ref}.",
        "Which {thing} lies {rel} {ref}?", "What can you see {rel} {ref}?",
    ),
    "exists": (
        "Is there {a}?", "Is there {a} in {pic}?", "Do you see {a}?", "Can you see {a}?", "Does {pic} show {a}?",
        "Is {a} in {pic}?", "Does {pic} have {a}?", "Can you find {a}?", "Tell me if there is {a}.",
        "Check if there is {a}.", "Is {a} shown?", "Can you see {a} in {pic}?", "Do you see {a} here?",
        "Is {a} there?", "Does {pic} contain {a}?",
    ),
    "caption": (
        "Describe {pic}.", "What is in {pic}?", "What do you see?", "Describe what you see.",
        "What is shown in {pic}?", "What does {pic} show?", "Tell me what you see.", "Tell me about {pic}.",
        "What is this?", "Describe {pic} in detail.", "What can you see in {pic}?", "Give me a caption for {pic}.",
        "Write a caption.", "Can you describe {pic}?", "Please describe {pic}.", "What is on {pic}?",
        "Describe {pic} briefly.", "Caption {pic}.", "What do you see in {pic}?", "Describe all {thing}s in {pic}.",
        "Look at {pic} and describe it.", "What am I looking at?",
    ),
    "read": (
        "What number is this?", "Read the number.", "Which number do you see?", "What number is in {pic}?",
        "What does it say?", "What is the number?", "Tell me the number.", "Which number is shown?",
        "What number is shown in {pic}?", "Read it.", "What is written here?", "What number do you see?",
        "Read the digits.", "What are the digits?", "Number?", "Can you read the number?",
        "What is written in {pic}?", "Please read {pic}.", "Which digits do you see in {pic}?",
        "Write down the number.", "What text is in {pic}?", "Read the text.",
    ),
    "main_colour": (
        "What is the main color?", "What color is it mostly?", "What is the main colour of {pic}?",
        "Which color is most common?", "What color do you see most?", "What is the dominant color?",
        "What color is this?", "Which color covers most of {pic}?", "Name the main color.", "What color is {pic}?",
        "Tell me the main color of {pic}.", "What color stands out?", "What is the most common color in {pic}?",
        "Which colour dominates {pic}?", "Mostly which color?", "What colour is it?",
    ),
    "same_shape": (
        "Do both pictures show the same shape?", "Are the shapes the same?",
        "Is the shape the same in both pictures?", "Do the two pictures have the same shape?",
        "Are both shapes the same?", "Do the pictures show the same shape?", "Is it the same shape in both images?",
        "Are the two shapes equal?", "Do both images show the same shape?",
    ),
    "same_colour": (
        "Do both pictures show the same color?", "Are the colors the same?",
        "Is the color the same in both pictures?", "Do the two shapes have the same color?",
        "Are both shapes the same color?", "Do the shapes have the same colour?",
        "Is it the same color in both images?", "Are the two colors equal?", "Do both images show the same color?",
    ),
    "which_picture": (
        "Which picture shows {a}?", "Which picture has {a}?", "In which picture do you see {a}?",
        "Which image shows {a}?", "Which of the two pictures shows {a}?",
        "Where is {a}, in the first or the second picture?", "Which image has {a}?",
        "Is {a} in the first or the second picture?", "In which image is {a}?", "Which picture contains {a}?",
    ),
    "nth": (
        "What is in the {nth} picture?", "What does the {nth} picture show?",
        "What do you see in the {nth} picture?", "Describe the {nth} picture.", "What is in the {nth} image?",
        "What is shown in the {nth} image?", "Tell me about the {nth} picture.", "Describe the {nth} image.",
        "What can you see in the {nth} picture?",
    ),
    "nth_colour": (
        "What color is the {thing} in the {nth} picture?", "Which color do you see in the {nth} picture?",
        "What color is it in the {nth} image?", "Tell me the color of the {thing} in the {nth} image.",
        "What is the color of the {thing} in the {nth} picture?",
        "Which color has the {thing} in the {nth} picture?",
    ),
    "nth_shape": (
        "What shape is in the {nth} picture?", "Which shape do you see in the {nth} picture?",
        "What shape is in the {nth} image?", "Tell me the shape in the {nth} picture.",
        "Which shape is shown in the {nth} image?", "Name the shape in the {nth} picture.",
    ),
    "both": (
        "Describe both pictures.", "What is in the pictures?", "What do the pictures show?",
        "Describe the two images.", "What do you see in both pictures?", "What is in the two pictures?",
        "Describe the pictures.", "What do both images show?", "Compare the two pictures.",
        "What do you see in the images?", "Tell me about both pictures.",
    ),
}  # fmt: skip

HELD_OUT: dict[str, tuple[str, ...]] = {
    "shape": (
        "What shape can you see?", "Which shape is drawn in {pic}?", "Tell me which shape this is.",
    ),
    "shape_of": (
        "Can you name the shape of {ref}?", "Which kind of shape is {ref}?",
    ),
    "colour": (
        "Which color do you see?", "What colour does it have?", "Tell me what color the {thing} is.",
    ),
    "colour_of": (
        "Which colour is {ref}?", "Tell me what color {ref} is.", "What color do you see on {ref}?",
    ),
    "ground": (
        "Which color does the background have?", "Tell me what color the background is.",
    ),
    "count": (
        "How many {thing}s can be seen in {pic}?", "Say how many {thing}s you see.", "Can you count the {thing}s?",
    ),
    "count_of": (
        "Can you count the {plural}?", "How many {plural} can be seen?", "Say how many {plural} you see.",
    ),
    "where": (
        "Where in {pic} is {ref}?", "Can you tell where {ref} is?", "At what place do you see {ref}?",
    ),
    "relation": (
        "Is {ref} drawn {rel} {ref2}?", "Tell me if {ref} is {rel} {ref2}.",
    ),
    "side": (
        "Describe what is {side}.", "Which shape can you find {side}?", "What shape lies {side}?",
    ),
    "beside": (
        "Say what lies {rel} {ref}.", "What shape can you find {rel} {ref}?",
    ),
    "exists": (
        "Are you able to see {a}?", "Is there {a} anywhere?", "Does {pic} include {a}?", "Do you find {a} in {pic}?",
    ),
    "caption": (
        "What can you tell me about {pic}?", "Give a short description of {pic}.", "Say what {pic} shows.",
        "What is there to see?",
    ),
    "read": (
        "Which number is written in {pic}?", "Tell me which number this is.", "What digits can you see?",
    ),
    "main_colour": (
        "Which color is the main one?", "What color is most of {pic}?", "Say which color dominates.",
    ),
    "same_shape": (
        "Do the two images show the same shape?", "Is the shape in both images the same?",
    ),
    "same_colour": (
        "Do the two images show the same color?", "Is the color of both shapes the same?",
    ),
    "which_picture": (
        "Which of the images has {a}?", "Tell me which picture shows {a}.",
    ),
    "nth": (
        "Say what the {nth} picture shows.", "What can be seen in the {nth} image?",
    ),
    "nth_colour": (
        "Which color is the {thing} in the {nth} image?",
    ),
    "nth_shape": (
        "What shape does the {nth} picture show?",
    ),
    "both": (
        "Tell me what both pictures show.", "What can you see in the two images?",
    ),
}  # fmt: skip

IMAGE_WORDS = ("this picture", "the picture", "the image", "this image", "the photo", "this photo", "the drawing")
THING_WORDS = ("shape", "shape", "object", "thing", "figure")
OPENINGS = (
    "Please tell me: ",
    "Hey, ",
    "Hi! ",
    "Hello. ",
    "Look at the picture. ",
    "Look at this. ",
    "Quick question: ",
    "Can you help me? ",
    "Now, ",
    "And ",
    "Ok. ",
    "Please answer: ",
    "I have a question. ",
    "So, ",
    "Well, ",
)
CLOSINGS = (" Please.", " Thanks.", " Answer briefly.", " Answer in one word.", " Be brief.", " Thank you!",
            " Answer shortly.", " Just the answer.", " I need to know.")  # fmt: skip


def _unpunctuated(text: str) -> str:
    return text.rstrip("?.!").replace("?", "").replace(",", "")


def plain(text: str) -> str:
    """The question in lower case without punctuation, as someone in a hurry types it."""
    return _unpunctuated(text).replace(".", "").replace("!", "").replace(":", "").lower()


def fill(template: str, slots: dict[str, str], rng: Random) -> str:
    """The template with its slots filled and a capital first letter."""
    text = template.format(pic=rng.choice(IMAGE_WORDS), thing=slots.get("noun") or rng.choice(THING_WORDS), **slots)
    return text[:1].upper() + text[1:]


def restyle(text: str, rng: Random) -> str:
    """Training noise: politeness, lower case, missing or doubled punctuation."""
    if rng.random() < 0.12:
        opening = rng.choice(OPENINGS)
        text = opening + (text[:1].lower() + text[1:] if opening.endswith((", ", "And ")) else text)
    if rng.random() < 0.1:
        text = (
            f"Please {text[:1].lower()}{text[1:]}"
            if rng.random() < 0.3
            else text[:-1] + rng.choice((", please?", " please", " please."))
        )
    elif rng.random() < 0.1:
        text += rng.choice(CLOSINGS)
    if rng.random() < 0.1:
        text = text.replace("What is", "What's").replace("what is", "what's").replace("Where is", "Where's")
    dice = rng.random()
    if dice < 0.15:
        text = plain(text)
    elif dice < 0.3:
        text = text.lower()
    elif dice < 0.42:
        text = _unpunctuated(text)
    elif dice < 0.44:
        text = text.upper()
    elif dice < 0.47:
        text += rng.choice(("??", "!", " :)", "..", "?"))
    return text


def ways(intent: str) -> tuple[str, ...]:
    """Every template of training for an intent."""
    return TRAIN[intent] + EXTRA[intent]


def ask(intent: str, slots: dict[str, str], rng: Random) -> str:
    """A question in one of the ways of training."""
    return restyle(fill(rng.choice(ways(intent)), slots, rng), rng)
