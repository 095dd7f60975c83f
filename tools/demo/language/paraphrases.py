"""More ways to ask, added after the tokenizer was fixed: its corpus does not hold them."""

from __future__ import annotations

EXTRA: dict[str, tuple[str, ...]] = {
    "shape": (
        "What kind of {thing} is this?", "Can you name the shape?", "Can you tell me the shape?",
        "What shape is it in {pic}?", "Do you know what shape this is?", "Which shape is it?", "Say the shape.",
        "What shape can be seen here?", "Which form is shown?", "Tell me what shape you see.",
    ),
    "shape_of": (
        "Tell me what shape {ref} is.", "Can you tell me the shape of {ref}?", "Which form does {ref} have?",
        "Say what shape {ref} has.", "What type of shape is {ref}?", "Do you know what shape {ref} is?",
        "Identify the shape of {ref}.", "What sort of shape is {ref}?",
    ),
    "colour": (
        "Tell me the color.", "Can you tell me the color?", "Say what color it is.", "Which color is it?",
        "What color can you see?", "Do you know what color the {thing} is?", "What's the color of this {thing}?",
        "Can you name the color of the {thing}?", "Which color is used for the {thing}?",
        "Tell me which color it has.",
    ),
    "colour_of": (
        "Can you tell me the color of {ref}?", "Say what color {ref} is.", "Do you know the color of {ref}?",
        "Identify the color of {ref}.", "Which color do you see for {ref}?", "What color can be seen on {ref}?",
        "What would you say is the color of {ref}?", "Tell me which color {ref} has.",
        "Can you say what colour {ref} is?",
    ),
    "ground": (
        "Say what color the background is.", "Can you tell me the background color?",
        "Which color do you see behind it?", "What color is the ground?", "What is behind the {thing}, which color?",
        "Tell me which color is in the background.", "Identify the background color.",
        "What color is used for the background?",
    ),
    "count": (
        "Can you tell me how many {thing}s there are?", "How many {thing}s are visible?",
        "Tell me the number of {thing}s.", "Can you say how many {thing}s are shown?",
        "What is the count of {thing}s?", "How many {thing}s are drawn?", "How many {thing}s did you find?",
        "Give me the number of {thing}s in {pic}.", "Do you know how many {thing}s there are?",
        "Count all {thing}s.",
    ),
    "count_of": (
        "Can you tell me how many {plural} there are?", "Tell me the number of {plural}.",
        "How many {plural} are visible?", "Can you say how many {plural} are in {pic}?",
        "Say the number of {plural}.", "How many {plural} did you find?", "Give me the number of {plural}.",
        "Do you know how many {plural} there are?", "What is the count of {plural}?",
    ),
    "where": (
        "Can you tell me where {ref} is?", "Can you find {ref}?", "Do you know where {ref} is?",
        "Where does {ref} lie?", "In which place do you see {ref}?", "Say the position of {ref}.",
        "Describe the position of {ref}.", "Where is {ref} located?", "Show me where {ref} is.",
        "In which corner or side is {ref}?", "Where can {ref} be seen?", "At which position is {ref}?",
        "Where is {ref} to be found in {pic}?",
    ),
    "relation": (
        "Tell me whether {ref} is {rel} {ref2}.", "Say if {ref} is {rel} {ref2}.",
        "Can you tell me if {ref} is {rel} {ref2}?", "Is {ref} placed {rel} {ref2}?",
        "Is {ref} located {rel} {ref2}?", "Do you find {ref} {rel} {ref2}?",
        "Is it right that {ref} lies {rel} {ref2}?", "Is {ref} shown {rel} {ref2}?",
    ),
    "side": (
        "What lies {side}?", "Can you tell me what is {side}?", "What shape do you see {side}?",
        "Describe the {thing} {side}.", "What shape is {side}?", "Do you know what is {side}?",
        "What can be found {side}?", "Which shape lies {side}?", "Tell me which {thing} is {side}.",
        "What {thing} can you find {side}?",
    ),
    "beside": (
        "Can you tell me what is {rel} {ref}?", "What lies {rel} {ref}?", "What shape is {rel} {ref}?",
        "Say what is {rel} {ref}.", "What can be found {rel} {ref}?", "Which shape do you see {rel} {ref}?",
        "What {thing} is {rel} {ref}?",
    ),
    "exists": (
        "Can you tell me if there is {a}?", "Do you find {a}?", "Is there {a} to be seen?", "Is {a} visible?",
        "Say if you see {a}.", "Can {a} be seen?", "Is there {a} here?", "Is {a} part of {pic}?",
        "Did you find {a}?", "Tell me whether you see {a}.", "Is there {a} among the {thing}s?",
        "Are you seeing {a}?", "Does {pic} have {a} in it?", "Do you notice {a}?",
    ),
    "caption": (
        "Tell me what {pic} shows.", "Tell me what is in {pic}.", "Say what you see.", "Say what is in {pic}.",
        "Give me a description of {pic}.", "Give a description.", "A short description of {pic}, please.",
        "Write a short description.", "What is there in {pic}?", "What is there?", "What can you tell me?",
        "Can you tell me what is in {pic}?", "Can you tell me about {pic}?", "Explain what you see in {pic}.",
        "What can be seen in {pic}?", "What can be seen here?", "Make a caption.", "Tell me something about {pic}.",
        "Describe it.", "Describe everything you see.", "What do we see here?", "Summarize {pic}.",
        "What does it show?", "Do you know what is in {pic}?", "Which {thing}s are in {pic}?", "List what you see.",
        "What have we here?", "In a few words, what is in {pic}?", "Give me a short caption.",
        "What is going on in {pic}?", "Explain {pic}.", "I want to know what {pic} shows.",
    ),
    "read": (
        "Can you tell me the number?", "What number is written here?", "Say the number.",
        "Say which number you see.", "Which number is it?", "Tell me what number you see.",
        "What number can you see?", "Do you know which number this is?", "Which number is in {pic}?",
        "Tell me the digits.", "Which digits are shown?", "What digits are in {pic}?",
        "What number is written in {pic}?", "What is the number in {pic}?",
    ),
    "main_colour": (
        "Which color is {pic} mostly?", "What is the color of most of {pic}?", "Tell me which color dominates.",
        "Say the main color.", "What color is the most common?", "What color is the main color here?",
        "Which is the main color?", "Can you tell me the main color?", "What color covers most of it?",
        "What color is seen most in {pic}?",
    ),
    "same_shape": (
        "Is the shape the same in both?", "Are both pictures of the same shape?", "Do both show the same shape?",
        "Do we see the same shape in both pictures?", "Have the two images the same shape?",
        "Is the shape in the two pictures the same?", "Do the images show the same shape?",
    ),
    "same_colour": (
        "Is the color the same in both?", "Are both pictures of the same color?", "Do both show the same color?",
        "Do we see the same color in both pictures?", "Have the two shapes the same color?",
        "Is the color in the two pictures the same?", "Do the images show the same color?",
        "Is the color of the two shapes equal?",
    ),
    "which_picture": (
        "Tell me which image has {a}.", "Which one of the pictures has {a}?", "Which of the images shows {a}?",
        "In which of the two images is {a}?", "Say which picture has {a}.", "Where do you see {a}, first or second?",
        "Which of the pictures has {a}?", "Can you tell me which picture has {a}?",
    ),
    "nth": (
        "Say what is in the {nth} picture.", "Tell me what the {nth} picture shows.",
        "What is there in the {nth} picture?", "What can you see in the {nth} image?",
        "Can you describe the {nth} image?", "What does the {nth} image show?",
        "Say what you see in the {nth} image.", "What {thing} is in the {nth} picture?",
        "Tell me what is in the {nth} image.",
    ),
    "nth_colour": (
        "What color is in the {nth} picture?", "Say the color of the {thing} in the {nth} picture.",
        "Which color is in the {nth} image?", "What color does the {nth} picture show?",
        "Which color is shown in the {nth} picture?", "What is the color in the {nth} image?",
        "Tell me which color the {thing} in the {nth} picture has.",
    ),
    "nth_shape": (
        "Which shape does the {nth} image show?", "What shape do you see in the {nth} image?",
        "Say the shape in the {nth} image.", "Tell me which shape is in the {nth} picture.",
        "What kind of shape is in the {nth} picture?", "What is the shape in the {nth} image?",
        "Which shape is in the {nth} picture?",
    ),
    "both": (
        "Tell me what is in both pictures.", "Say what you see in both images.",
        "What can be seen in the two pictures?", "Describe both images.", "What do the two images show?",
        "What is shown in both pictures?", "Tell me what you see in the two pictures.",
        "What is there in both images?", "Say what the two pictures show.",
    ),
}  # fmt: skip

TALK: dict[str, tuple[str, ...]] = {
    "hello": (
        "Hello, good morning!", "Hi, hello", "Hey, hi", "Hello, how nice to meet you", "Hello again",
    ),
    "who": (
        "Tell me what you are.", "Say your name.", "What do people call you?", "Can you tell me who you are?",
        "Please introduce yourself.", "What is your name, model?", "Are you a model?",
    ),
    "can": (
        "What can you tell me?", "What can I do with you?", "Tell me how you can help me.", "What do you do well?",
        "What are you made for?", "How can I use you?", "What things can you do?", "What kind of help can you give?",
        "What do you do with pictures?", "Can you tell me what you can do?",
    ),
    "thanks": (
        "Ok, thanks", "Thank you, good job", "Thanks so much", "Very good, thank you!", "Ok, thank you very much",
    ),
    "bye": (
        "Ok, bye", "Bye, good night", "Goodbye, see you later", "Good bye",
    ),
    "fine": (
        "Hello, how are you?", "Are you ok?", "Are you fine?", "Hey, how is it going?", "Do you feel well?",
    ),
    "maker": (
        "Who is your maker?", "How did you learn this?", "By whom were you made?", "Who did train you?",
        "How did they make you?", "Tell me who made you.", "Where were you made?",
    ),
    "trencadis": (
        "What do you know of Trencadis?", "Can you tell me about Trencadis?", "Say what Trencadis is.",
        "Is Trencadis an engine?", "Tell me what Trencadis does.",
    ),
    "human": (
        "Are you really human?", "Is this a person?", "Are you a real human?", "Is there a human here?",
        "Am I talking to a person?",
    ),
    "size": (
        "What is the number of your parameters?", "How small is this model?", "How large is this model?",
        "Tell me how big you are.", "What number of weights do you have?", "Tell me your size.",
    ),
    "unknown": (
        "What is the capital of Germany?", "Write a song.", "Write a letter.", "What is 7 + 1?", "What is 10 - 4?",
        "Who wrote this song?", "Tell me a poem.", "Give me a book.", "Tell me the news.",
        "What is the capital of China?", "Who was the first man on the moon?", "Give me a story.",
        "How do I make bread?", "What is 5 * 6?", "Where is London?", "Who painted this?", "How tall is a tree?",
        "What should I eat today?", "Do you like music?", "What is your favorite book?",
    ),
    "missing": (
        "What does the image show?", "What color is the square?", "How many stars are there?", "Where is the heart?",
        "How many triangles do you see?", "What color is the ring?", "Where is the star?",
        "What does this picture show?", "Is there a blue square?", "What is the number in the picture?",
        "Tell me what you see.", "How many red shapes are there?", "What is on the left?",
        "What color is the background?",
    ),
}  # fmt: skip
