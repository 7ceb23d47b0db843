"""What `benchmarks.structured` asks for: ten schemas as users write them, twenty prompts each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Task:
    """A schema and what is asked under it."""

    name: str
    schema: dict[str, Any]
    asks: str
    """With a place for a subject."""
    subjects: tuple[str, ...]

    def prompts(self) -> Iterator[str]:
        """One for each subject, each of which says what keys are wanted, as users do."""
        keys = ", ".join(self.schema["properties"])
        for subject in self.subjects:
            yield f"{self.asks.format(subject)} Answer with JSON that has the keys {keys}."


def _object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _list(items: dict[str, Any], most: int) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1, "maxItems": most}


def _matching(pattern: str) -> dict[str, Any]:
    return {"type": "string", "pattern": pattern}


_TEXT: Final = {"type": "string"}
_WHOLE: Final = {"type": "integer"}
_NUMBER: Final = {"type": "number"}
_FLAG: Final = {"type": "boolean"}
_OR_NULL: Final = {"anyOf": [_WHOLE, {"type": "null"}]}

_PEOPLE: Final = (
    "a nurse from Lisbon", "a carpenter who sails", "a retired teacher", "a young chemist",
    "a bus driver in Oslo", "a baker with three shops", "a violinist", "a farmer in Kenya",
    "a software engineer", "a gardener at a palace", "a goalkeeper", "a judge in Seoul",
    "a diver who paints", "a librarian", "a pilot of small planes", "a locksmith",
    "a beekeeper", "a translator of poems", "a chef on a ship", "a geologist",
)  # fmt: skip
_REVIEWS: Final = (
    "The room was clean but the street was loud.", "Best noodles I have had in years!",
    "It broke after two days.", "Fine for the price, nothing more.", "I would buy it again.",
    "The staff ignored us for an hour.", "Arrived late and wet.", "My daughter loves it.",
    "The battery lasts all week.", "Too salty for me.", "A quiet, lovely garden.",
    "The screen is dim outdoors.", "They refunded me without asking.", "Overrated.",
    "Good sound, poor microphone.", "The seats are hard.", "Simply perfect.",
    "The manual is wrong in places.", "Warm, light, and it fits.", "Never again.",
)  # fmt: skip
_DISHES: Final = (
    "pancakes", "tomato soup", "fried rice", "an omelette", "apple pie", "lentil curry",
    "garlic bread", "a green salad", "fish tacos", "mushroom risotto", "banana bread",
    "chicken stew", "hummus", "potato gratin", "miso soup", "oat cookies", "spring rolls",
    "beef chili", "lemon tart", "vegetable lasagne",
)  # fmt: skip
_CITIES: Final = (
    "Paris", "Nairobi", "Lima", "Osaka", "Toronto", "Cairo", "Sydney", "Warsaw", "Mumbai",
    "Reykjavik", "Boston", "Hanoi", "Rome", "Quito", "Dublin", "Cape Town", "Athens", "Jakarta",
    "Helsinki", "Denver",
)  # fmt: skip
_THINGS: Final = (
    "a kettle", "a mountain bike", "wool socks", "a desk lamp", "a chess set", "a raincoat",
    "a garden hose", "a notebook", "headphones", "a coffee grinder", "a tent", "a wall clock",
    "running shoes", "a chef's knife", "a backpack", "a yoga mat", "a toaster", "a guitar",
    "a phone case", "a water bottle",
)  # fmt: skip
_OCCASIONS: Final = (
    "a book fair", "a team lunch", "a jazz concert", "a dentist's visit", "a marathon",
    "a school reunion", "a product launch", "a wedding", "a chess tournament", "a lecture on bees",
    "a job interview", "a flea market", "a fire drill", "a film night", "a board meeting",
    "a picnic", "a blood drive", "a pottery class", "a house viewing", "a science fair",
)  # fmt: skip
_GOALS: Final = (
    "move to another flat", "learn Spanish", "plan a birthday", "repair a bicycle",
    "write a thesis", "plant tomatoes", "paint a fence", "train for a race", "open a cafe",
    "clean a garage", "build a shelf", "adopt a dog", "publish a blog", "fix a leaking tap",
    "prepare a talk", "sort old photos", "bake for a fair", "buy a used car", "set up a network",
    "organise a strike",
)  # fmt: skip
_BOOKS: Final = (
    "a detective story", "a cookbook", "a history of trains", "a children's tale",
    "a guide to birds", "a space opera", "a diary from a war", "a book of riddles", "a romance",
    "a handbook of knots", "a life of a composer", "a ghost story", "a travel book on Peru",
    "a primer on algebra", "a play in verse", "a western", "essays on cities", "a spy novel",
    "a book about tea", "a saga of three families",
)  # fmt: skip
_ORDERS: Final = (
    "Turn on the lamp in the kitchen.", "Set the heating to 21 degrees.", "Play some jazz.",
    "Lock the front door.", "Wake me at six.", "Close the blinds in the office.",
    "Turn the radio off.", "Dim the hall to thirty percent.", "Start the washing machine.",
    "Make the bedroom cooler.", "Remind me to call Ann.", "Open the garage.",
    "Switch the fan to low.", "Stop the music.", "Turn everything off.", "Raise the volume.",
    "Water the garden for ten minutes.", "Is the back door locked?", "Add milk to the list.",
    "Show the camera at the gate.",
)  # fmt: skip
_TICKETS: Final = (
    "I cannot log in since the update.", "The invoice names the wrong company.",
    "The app crashes when I open maps.", "How do I change my address?", "My parcel never came.",
    "The export has empty columns.", "I was charged twice.", "Please delete my account.",
    "The page loads for a minute.", "The coupon is refused.", "Dark mode hides the buttons.",
    "I need a copy of my receipt.", "The printer is offline again.", "Two-factor codes are late.",
    "The calendar shows the wrong day.", "The video has no sound.", "My seat was given away.",
    "The search finds nothing.", "I want to upgrade my plan.", "The scanner reads blanks.",
)  # fmt: skip

TASKS: Final = (
    Task(
        "person",
        _object(name=_TEXT, age={"type": "integer", "minimum": 0, "maximum": 120}, city=_TEXT),
        "Invent {}.",
        _PEOPLE,
    ),
    Task(
        "sentiment",
        _object(
            sentiment={"enum": ["positive", "negative", "mixed", "neutral"]},
            stars={"type": "integer", "minimum": 1, "maximum": 5},
        ),
        "How does this review feel? {}",
        _REVIEWS,
    ),
    Task(
        "recipe",
        _object(
            title=_TEXT, minutes=_WHOLE,
            ingredients=_list(_object(name=_TEXT, amount=_TEXT), 5),
        ),
        "Give a short recipe for {}.",
        _DISHES,
    ),
    Task(
        "weather",
        _object(city=_TEXT, celsius=_NUMBER, sky={"enum": ["clear", "cloudy", "rain", "snow"]},
                wind=_object(speed=_NUMBER, direction=_matching("^[NESW]{1,2}$"))),
        "Make up today's weather report for {}.",
        _CITIES,
    ),
    Task(
        "product",
        _object(sku=_matching("^[A-Z]{3}-[0-9]{4}$"), name=_TEXT,
                price=_NUMBER, in_stock=_FLAG, tags=_list(_TEXT, 4)),
        "Describe {} for a shop's catalogue.",
        _THINGS,
    ),
    Task(
        "event",
        _object(title=_TEXT, date={"type": "string", "format": "date"},
                starts=_matching("^([01][0-9]|2[0-3]):[0-5][0-9]$"),
                guests=_WHOLE),
        "Write a calendar entry for {}.",
        _OCCASIONS,
    ),
    Task(
        "plan",
        _object(goal=_TEXT, steps=_list({"type": "string", "maxLength": 80}, 5)),
        "In a few steps, how does one {}?",
        _GOALS,
    ),
    Task(
        "book",
        _object(title=_TEXT, year=_WHOLE,
                author=_object(first=_TEXT, last=_TEXT, born=_OR_NULL)),
        "Invent {}.",
        _BOOKS,
    ),
    Task(
        "command",
        {
            "type": "object",
            "properties": {
                "device": {"enum": ["light", "heating", "music", "door", "blinds", "other"]},
                "action": {"enum": ["on", "off", "set", "ask"]},
                "value": {"type": ["integer", "null"]},
            },
            "required": ["device", "action"],
            "additionalProperties": False,
        },
        "Which command is this? {}",
        _ORDERS,
    ),
    Task(
        "ticket",
        _object(
            summary={"type": "string", "maxLength": 120},
            priority={"enum": ["low", "normal", "high", "urgent"]},
            labels=_list({"enum": ["billing", "bug", "account", "delivery", "question"]}, 3),
            needs_reply=_FLAG,
        ),
        "File this customer's message as a ticket: {}",
        _TICKETS,
    ),
)  # fmt: skip
