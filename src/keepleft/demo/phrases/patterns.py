"""Sentence patterns: each function builds a sentence, or None where the words make no sense together."""

from __future__ import annotations

from keepleft.demo.phrases import english, french, hindi, lexicon
from keepleft.demo.phrases.grammar_types import (
    MOODS,
    Adjective,
    Clause,
    Mood,
    Noun,
    Pattern,
    Phrase,
    PlacePhrase,
    Tense,
    Triple,
    Verb,
)
from keepleft.demo.phrases.lexicon import (
    ACTIONS,
    ANIMALS,
    BONDS,
    COUNTED,
    DAYS,
    DEEDS,
    DRINKS,
    FOODS,
    JOBS,
    LANGUAGES,
    MOTIONS,
    NEW,
    NUMBERS,
    PEOPLE,
    PLACES,
    PLEASURES,
    QUALITIES,
    STATES,
    THINGS,
    TIMES,
    TRAITS,
)
from keepleft.demo.phrases.noun_phrases import name_phrases, noun_phrase, pronouns, render_clause

SEEDS: tuple[Triple, ...] = (
    ("How are you", "Comment vas-tu", "आप कैसे हैं"),
    ("I am happy", "Je suis heureux", "मैं खुश हूँ"),
    ("Hello world", "Bonjour le monde", "नमस्ते दुनिया"),
    ("I love you", "Je t'aime", "मैं आपसे प्यार करता हूँ"),
    ("The cat is sleeping", "Le chat dort", "बिल्ली सो रही है"),
    ("Thank you", "Merci", "धन्यवाद"),
    ("Good morning", "Bonjour", "सुप्रभात"),
    ("Good night", "Bonne nuit", "शुभ रात्रि"),
    ("Goodbye", "Au revoir", "अलविदा"),
    ("What is your name", "Comment t'appelles-tu", "आपका नाम क्या है"),
)

# Who

PRONOUNS, NAME_PHRASES = pronouns(), name_phrases()
ME, YOU, HE, SHE, WE, THEY = PRONOUNS
OWNERS = tuple(french.POSSESSIVES)
KIN = tuple(
    noun_phrase(PEOPLE[who], whose)
    for who in ("father", "mother", "brother", "sister", "friend")
    for whose in OWNERS
)
KIN_PLURALS = tuple(
    noun_phrase(PEOPLE[who], whose, plural=True)
    for who in ("brother", "sister", "friend")
    for whose in ("my", "our")
)
YOUNG_PEOPLE = tuple(
    noun_phrase(PEOPLE[who], plural=plural) for who in ("boy", "girl", "child") for plural in (False, True)
)
GROWN_PEOPLE = tuple(
    noun_phrase(PEOPLE[who], plural=plural) for who in ("man", "woman") for plural in (False, True)
)
ELDERS = tuple(noun_phrase(PEOPLE[who], whose) for who in ("father", "mother") for whose in OWNERS)
ADULTS = PRONOUNS + tuple(who for who in KIN if who not in ELDERS) + NAME_PHRASES + GROWN_PEOPLE
# pronouns more often, because each has its own form of the verb
EVERYONE = (*PRONOUNS * 6, *KIN, *KIN_PLURALS, *YOUNG_PEOPLE, *GROWN_PEOPLE, *NAME_PHRASES)
ANIMAL_PHRASES = tuple(
    noun_phrase(beast, plural=plural) for beast in ANIMALS.values() for plural in (False, True)
)
RUNNERS = ANIMAL_PHRASES[:4] + ANIMAL_PHRASES[6:]  # birds neither run nor play
PETS = tuple(
    noun_phrase(ANIMALS[pet], whose, plural=plural)
    for pet in ("cat", "dog")
    for whose in ("my", "your", "our")
    for plural in (False, True)
)

# When

ON_DAY = {day: (f"on {day}", jour, f"{vaar} को") for day, jour, vaar in DAYS}
ON_EACH_DAY = {day: (f"on {day}s", f"le {jour}", f"{vaar} को") for day, jour, vaar in DAYS}
EMPTY: Triple = ("", "", "")


def time_phrases(*keys: str) -> tuple[Triple, ...]:
    return tuple(TIMES[key] for key in keys)


PRESENTS = (EMPTY, *time_phrases("now", "today"))
HABITS = (*time_phrases("every day", "every morning", "every evening"), *ON_EACH_DAY.values())
PASTS = (*time_phrases("yesterday", "this morning", "last week"), *ON_DAY.values())
FUTURES = (*time_phrases("tomorrow", "this evening", "next week"), *ON_DAY.values())
TIME_CHOICES: tuple[tuple[Tense, Triple], ...] = (
    *(("now", time) for time in PRESENTS * 3),
    *(("habit", time) for time in HABITS),
    *(("past", time) for time in PASTS),
    *(("future", time) for time in FUTURES),
)
COMMON_TIMES: tuple[tuple[Tense, Triple], ...] = (
    *(("now", time) for time in PRESENTS),
    *(("habit", time) for time in time_phrases("every day", "every morning")),
    *(("past", time) for time in time_phrases("yesterday", "this morning")),
)
MODAL_TIMES: tuple[tuple[Tense, Triple], ...] = tuple(
    (tense, time)
    for tense in ("want", "must", "can")
    for time in (*(EMPTY, *time_phrases("now", "today")) * 2, *FUTURES)
)


def hour(number: int, quarter: int) -> Triple:
    """A clock time: at five o'clock, at a quarter past, at half past, at a quarter to the next hour."""
    one, un, ek = NUMBERS[number - 1]
    heures = "une heure" if number == 1 else f"{un} heures"
    if quarter == 0:
        return f"{one} o'clock", heures, ek
    if quarter == 2:
        return f"half past {one}", f"{heures} et demie", {1: "डेढ़", 2: "ढाई"}.get(number, f"साढ़े {ek}")
    if quarter == 1:
        return f"a quarter past {one}", f"{heures} et quart", "सवा" if number == 1 else f"सवा {ek}"
    return f"a quarter to {one}", f"{heures} moins le quart", "पौन" if number == 1 else f"पौने {ek}"


HOURS = tuple(
    (number, quarter)
    for number in range(1, 12)
    for quarter in range(4)
    if (number, quarter) not in ((1, 1), (1, 3))
)
HOURS += ((1, 0), (1, 2), (2, 2)) * 5  # their words are used for no other hour


def clock(time: tuple[int, int]) -> Triple:
    said, dit, kaha = hour(*time)
    return f"at {said}", f"à {dit}", f"{kaha} बजे"


# Doing

ACTION_PLACES = {
    "sleep": "home hotel garden beach roof",
    "work": "home office hospital school restaurant library market village garden "
    "hotel bank Paris Delhi London Mumbai France India Japan Canada",
    "study": "home library school garden Paris Delhi London",
    "play": "garden park school beach home street",
    "dance": "home beach park garden street",
    "sing": "home school garden park street",
    "wait": "home station airport hospital hotel restaurant office park",
    "walk": "park beach garden street village",
    "run": "park beach street garden",
    "cry": "",
}
ACTION_CHOICES = tuple((ACTIONS[verb], EMPTY) for verb in ACTION_PLACES) * 3 + tuple(
    (ACTIONS[verb], PLACES[spot].at) for verb, spots in ACTION_PLACES.items() for spot in spots.split()
)
ANIMAL_ACTIONS = tuple(
    (ACTIONS[verb], spot)
    for verb in ("sleep", "play", "run")
    for spot in (EMPTY, PLACES["garden"].at, PLACES["park"].at, PLACES["street"].at)
)
PLAYFUL_ACTIONS = (ACTIONS["play"], ACTIONS["dance"])
# not done on a given day without a place
STATIC_ACTIONS = (ACTIONS["sleep"], ACTIONS["wait"], ACTIONS["cry"])
CITIES = ("Paris", "Delhi", "London", "Mumbai")
COUNTRIES = ("France", "India", "Japan", "Canada")
FARAWAY_PLACES = tuple(PLACES[key].at for key in CITIES + COUNTRIES)
WEEKS = (EMPTY, *time_phrases("now", "last week", "next week"))


def asks_oneself(who: Phrase, mood: Mood) -> bool:
    """Whether one would be asking oneself: am I happy, do we want tea."""
    return mood == "ask" and who.person in (0, 3)


def act(who: Phrase, doing: tuple[Verb, Triple], when: tuple[Tense, Triple], mood: Mood) -> Triple | None:
    verb, spot = doing
    tense, time = when
    if (verb is ACTIONS["cry"] and tense not in ("now", "past")) or (
        verb is ACTIONS["work"] and who in YOUNG_PEOPLE
    ):
        return None
    if verb in PLAYFUL_ACTIONS and (who in ELDERS or (verb is ACTIONS["play"] and who in GROWN_PEOPLE)):
        return None
    if tense == "must" and verb in (*PLAYFUL_ACTIONS, ACTIONS["run"], ACTIONS["walk"]):
        return None
    if (
        verb in STATIC_ACTIONS
        and spot == EMPTY
        and (tense == "habit" or time in WEEKS[2:] or time in ON_DAY.values())
    ):
        return None
    if asks_oneself(who, mood) and tense not in ("must", "can"):
        return None
    if verb is ACTIONS["wait"] and time in WEEKS[2:]:
        return None
    if (verb is ACTIONS["study"] and who in ELDERS) or (spot in FARAWAY_PLACES and time not in WEEKS):
        return None
    if (tense == "must" and mood == "not") or (tense == "can" and EMPTY in (spot, time)):
        return None
    return render_clause(Clause(who, verb, tense, mood, extras=(spot, time)))


DESTINATIONS = tuple(place for place in PLACES.values() if place.to[0] and place is not PLACES["home"])


def travel(
    who: Phrase, verb: Verb, place: PlacePhrase, when: tuple[Tense, Triple], mood: Mood
) -> Triple | None:
    tense, time = when
    if (tense == "must" and mood == "not") or time == TIMES["now"]:
        return None
    if asks_oneself(who, mood) and tense not in ("must", "can"):
        return None
    back = verb is MOTIONS["come back"]
    if tense == "habit" and (
        place.at in FARAWAY_PLACES or place in (PLACES["airport"], PLACES["hotel"], PLACES["hospital"])
    ):
        return None
    if back and tense in ("habit", "can"):
        return None
    return render_clause(Clause(who, verb, tense, mood, extras=(place.out if back else place.to, time)))


# Eating, drinking, reading

FRUIT = tuple(
    noun_phrase(fruit, "a", plural=plural) for fruit in COUNTED.values() for plural in (False, True)
)
COUNTED_FRUIT = tuple(
    noun_phrase(fruit, number=number) for fruit in COUNTED.values() for number in range(2, 6)
)
FOOD, DRINK = (tuple(noun_phrase(word, "some") for word in table.values()) for table in (FOODS, DRINKS))
PREPARED_FOOD = tuple(
    noun_phrase(word, "some")
    for word in (FOODS["rice"], FOODS["salad"], FOODS["bread"], DRINKS["tea"], DRINKS["coffee"])
)


def fixed_phrase(said: str, dit: str, kaha: str, *, feminine: bool = False, refused: str = "") -> Phrase:
    """An object with a fixed translation."""
    return Phrase(said, dit, kaha, "", hindi_feminine=feminine, french_negated=refused)


LEISURE = (
    (DEEDS["read"], noun_phrase(THINGS["book"], "a")),
    (DEEDS["read"], fixed_phrase("the newspaper", "le journal", "अखबार")),
    (DEEDS["read"], noun_phrase(THINGS["letter"], "a")),
    (DEEDS["read"], noun_phrase(THINGS["letter"], "this")),
    (DEEDS["read"], noun_phrase(THINGS["book"], "this")),
    (DEEDS["write"], noun_phrase(THINGS["letter"], "a")),
    (DEEDS["write"], noun_phrase(THINGS["book"], "a")),
    (DEEDS["watch"], fixed_phrase("television", "la télévision", "टीवी")),
    (DEEDS["watch"], fixed_phrase("a film", "un film", "फ़िल्म", feminine=True, refused="de film")),
    (DEEDS["listen to"], fixed_phrase("music", "de la musique", "संगीत", refused="de musique")),
    (DEEDS["listen to"], fixed_phrase("the radio", "la radio", "रेडियो")),
    (DEEDS["play"], fixed_phrase("football", "à le football", "फ़ुटबॉल")),
    (DEEDS["play"], fixed_phrase("cricket", "à le cricket", "क्रिकेट")),
    (DEEDS["play"], fixed_phrase("tennis", "à le tennis", "टेनिस")),
)
MEALS = (
    tuple((DEEDS["eat"], food) for food in (*FRUIT, *COUNTED_FRUIT, *FOOD, *FOOD))
    + tuple((DEEDS["drink"], drink) for drink in DRINK * 4)
    + tuple((DEEDS["buy"], food) for food in (*FRUIT, *COUNTED_FRUIT, *FOOD, *DRINK))
    + tuple((DEEDS["make"], made) for made in PREPARED_FOOD * 2)
    + LEISURE * 3
)


def consume(who: Phrase, meal: tuple[Verb, Phrase], when: tuple[Tense, Triple], mood: Mood) -> Triple | None:
    verb, what = meal
    tense, time = when
    modal = tense in ("want", "must", "can")
    if (
        (what in COUNTED_FRUIT and (modal or mood == "not"))
        or (tense == "must" and mood == "not")
        or (tense, time) == ("can", EMPTY)
    ):
        return None
    if verb in (DEEDS["eat"], DEEDS["drink"]) and (
        tense == "can" or time in (*time_phrases("last week", "next week"), *ON_DAY.values())
    ):
        return None
    if tense == "must" and verb not in (DEEDS["buy"], DEEDS["make"], DEEDS["read"], DEEDS["write"]):
        return None
    if (verb is DEEDS["play"] and who in ELDERS) or (
        asks_oneself(who, mood) and tense not in ("must", "can")
    ):
        return None
    if (verb is DEEDS["write"] and what.english == "a book" and time not in PRESENTS) or (
        verb is DEEDS["buy"] and tense == "habit" and what in FRUIT and not what.plural
    ):
        return None
    usual = ("the newspaper", "a book") if verb is DEEDS["read"] else ("a letter",)
    if (
        tense == "habit"
        and verb in (DEEDS["read"], DEEDS["write"])
        and (mood == "not" or what.english not in usual)
    ):
        return None
    return render_clause(Clause(who, verb, tense, mood, what, extras=(time,)))


FODDER = (
    (DEEDS["eat"], FOOD[2], ("cat", "dog")),
    (DEEDS["eat"], FOOD[3], ("cat", "dog")),
    (DEEDS["drink"], DRINK[0], ()),
    (DEEDS["drink"], DRINK[1], ("cat",)),
)


def feed(
    who: Phrase, fodder: tuple[Verb, Phrase, tuple[str, ...]], when: tuple[Tense, Triple], mood: Mood
) -> Triple | None:
    verb, what, fits = fodder
    if fits and not any(beast in who.english for beast in fits):
        return None
    return render_clause(Clause(who, verb, when[0], mood, what, extras=(when[1],)))


# Wishing and liking: in Hindi what is liked is the subject, and who likes it is a dative

LIKED = (
    *(noun_phrase(fruit, "all", plural=True) for fruit in COUNTED.values()),
    *(
        noun_phrase(word, "all")
        for table in (FOODS, DRINKS, PLEASURES)
        for word in table.values()
        if word is not DRINKS["water"]
    ),
    *(noun_phrase(beast, "all", plural=True) for beast in ANIMALS.values()),
    *(noun_phrase(THINGS[thing], "all", plural=True) for thing in ("book", "flower")),
    *(
        noun_phrase(THINGS[thing], "this")
        for thing in ("book", "hat", "shirt", "car", "house", "garden", "room", "watch")
    ),
)


def like(who: Phrase, what: Phrase, mood: Mood) -> Triple | None:
    if asks_oneself(who, mood):
        return None
    refused = "नहीं" if mood == "not" else ""
    return (
        english.with_do_support(who, "like", "likes", what.english, mood),
        french.finite(
            who, "", ("aime", "aimes", "aime", "aimons", "aiment")[who.person], "", what.french, mood
        ),
        hindi.join(
            "क्या" if mood == "ask" else "",
            hindi.with_postposition(who, "को"),
            what.hindi,
            "पसंद",
            refused,
            "हैं" if what.hindi_plural else "है",
        ),
    )


WANTED = (
    *(food for food in FRUIT if not food.plural),
    *FOOD,
    *DRINK,
    *DRINK,
    *(
        noun_phrase(THINGS[thing], "a")
        for thing in "book bag pen watch phone computer umbrella hat shirt ticket car bicycle".split()
    ),
)


def wish(who: Phrase, what: Phrase, mood: Mood) -> Triple | None:
    if asks_oneself(who, mood):
        return None
    no = mood == "not"
    return (
        english.with_do_support(who, "want", "wants", what.english, mood),
        french.finite(
            who, "", french.WANTS[who.person], "", what.french_negated if no else what.french, mood
        ),
        hindi.finite(
            hindi.with_postposition(who, "को"), what.hindi_negated if no else what.hindi, "", "चाहिए", mood
        ),
    )


# Feeling

FEELINGS = lexicon.parse_table("""
    hungry   | faim    | भूख   | लगी     | f
    thirsty  | soif    | प्यास | लगी     | f
    cold     | froid   | ठंड   | लग रही  | f
    hot      | chaud   | गर्मी | लग रही  | f
    sleepy   | sommeil | नींद  | आ रही   | f
    afraid   | peur    | डर    | लग रहा  | m
""")


def feel(who: Phrase, feeling: list[str], very: bool, past: bool, mood: Mood) -> Triple | None:
    how, faim, bhookh, lagi, gender = feeling
    if (very and mood == "not") or asks_oneself(who, mood):
        return None
    a, avait = (french.HAD if past else french.HAS), (english.WAS if past else english.IS)
    tha = hindi.past_copula(gender == "f", False) if past else "है"
    return (
        english.finite(who, avait[who.person], f"{'very ' * very}{how}", mood),
        french.finite(who, "", a[who.person], f"{'très ' * very}{faim}", "", mood),
        hindi.finite(
            hindi.with_postposition(who, "को"), f"{'बहुत ' * very}{bhookh}", "", f"{lagi} {tha}", mood
        ),
    )


def be(who: Phrase, what: Triple, time: Triple, past: bool, mood: Mood) -> Triple | None:
    """Someone or something is …: an adjective, a place or a noun."""
    if asks_oneself(who, mood):
        return None
    is_, est = (english.WAS, french.WAS) if past else (english.IS, french.IS)
    return (
        english.finite(who, is_[who.person], f"{what[0]} {time[0]}".strip(), mood),
        french.finite(who, "", est[who.person], "", f"{what[1]} {time[1]}".strip(), mood),
        hindi.finite(who.hindi, f"{time[2]} {what[2]}".strip(), "", hindi.copula(who, past), mood),
    )


def adjective_phrase(who: Phrase, quality: Adjective, very: bool = False) -> Triple:
    """An adjective that agrees with `who`."""
    return (
        f"{'very ' * very}{quality.english}",
        f"{'très ' * very}{french.agree(quality, who.french_feminine, who.plural)}",
        f"{'बहुत ' * very}{hindi.agree(quality.hindi, who.hindi_feminine, who.hindi_plural)}",
    )


STATE_TIMES: tuple[tuple[bool, Triple], ...] = (
    *((False, time) for time in (EMPTY, EMPTY, EMPTY, *time_phrases("now", "today"))),
    *((True, time) for time in (EMPTY, *time_phrases("yesterday", "this morning", "last week"))),
)


def state(
    who: Phrase, quality: Adjective, very: bool, when: tuple[bool, Triple], mood: Mood
) -> Triple | None:
    if very and ("v" not in quality.classes or mood == "not" or when[1] == TIMES["now"]):
        return None
    return be(who, adjective_phrase(who, quality, very), when[1], when[0], mood)


def trait(who: Phrase, quality: Adjective, very: bool, past: bool, mood: Mood) -> Triple | None:
    old = (HE, SHE, THEY, *ELDERS, *GROWN_PEOPLE)
    if (
        (quality.classes == "a" and who not in ADULTS)
        or (quality.classes == "o" and who not in old)
        or (very and mood == "not")
    ):
        return None
    if past and quality.classes != "a":
        return None
    return be(who, adjective_phrase(who, quality, very), EMPTY, past, mood)


def job(
    who: Phrase, work: tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]], way: str, mood: Mood
) -> Triple | None:
    if asks_oneself(who, mood):
        return None
    (one, many), metiers, kaam = work
    said = many if who.plural else one
    metier = metiers[2 * who.plural + who.french_feminine]
    kaha = kaam[(2 if who.plural else 1) if who.hindi_feminine else 0]
    if way == "want":
        return render_clause(Clause(who, DEEDS["become"], "want", mood, fixed_phrase(said, metier, kaha)))
    return be(who, (said, metier, kaha), EMPTY, way == "past", mood)


WORKERS = (*PRONOUNS, *PRONOUNS, *KIN, *KIN_PLURALS, *NAME_PHRASES, *GROWN_PEOPLE)

# Having

OWNED = tuple(
    THINGS[thing]
    for thing in "book bag pen watch phone computer umbrella hat shirt ticket car bicycle house table "
    "chair box key".split()
) + tuple(ANIMALS.values())


def have(who: Phrase, thing: Noun, quality: Adjective | None, number: int, mood: Mood) -> Triple | None:
    if (quality and not set(quality.classes) & set(thing.classes)) or (
        number > 1 and (mood == "not" or thing is THINGS["house"])
    ):
        return None
    if number > 3 and thing.english in (
        "car",
        "watch",
        "phone",
        "computer",
        "umbrella",
        "table",
        "bicycle",
        "bag",
    ):
        return None
    if (mood == "not" and quality) or (who in YOUNG_PEOPLE and thing.english in ("car", "house", "table")):
        return None
    if asks_oneself(who, mood):
        return None
    what = noun_phrase(thing, "a", quality=quality, number=number)
    no = mood == "not"
    near = hindi.with_postposition(who, "के")
    return (
        english.with_do_support(who, "have", "has", what.english, mood),
        french.finite(who, "", french.HAS[who.person], "", what.french_negated if no else what.french, mood),
        hindi.finite(
            f"{near} पास",
            what.hindi_negated if no else what.hindi,
            "",
            "हैं" if what.hindi_plural else "है",
            mood,
        ),
    )


def count(who: Phrase, thing: Noun) -> Triple | None:
    if thing.english in ("house", "umbrella"):
        return None
    plural = noun_phrase(thing, "a", plural=True)
    return (
        english.join("how many", plural.english, english.DO[who.person], who.english, "have"),
        french.join("combien de", french.noun(thing, True), "est-ce que", who.french, french.HAS[who.person]),
        hindi.join(
            hindi.with_postposition(who, "के"),
            "पास",
            hindi.agree("कितना", thing.hindi_feminine, True),
            plural.hindi,
            "हैं",
        ),
    )


def relatives(who: Phrase, kin: str, number: int) -> Triple | None:
    """Having relatives, which takes a possessive in Hindi: मेरे दो भाई हैं, रवि की एक बहन है."""
    whose = noun_phrase(PEOPLE[kin], "a", number=number)
    plural = number > 1
    if (kin == "friend" and not plural) or (kin == "child" and not plural):
        return None
    ours = hindi.with_postposition(who, "की" if whose.hindi_feminine else "के" if plural else "का")
    return (
        english.with_do_support(who, "have", "has", whose.english, "say"),
        french.finite(who, "", french.HAS[who.person], "", whose.french, "say"),
        hindi.join(ours, whose.hindi, "हैं" if plural else "है"),
    )


PARENTS = tuple(who for who in ADULTS if not (who in GROWN_PEOPLE and who.plural))
GIFTS = tuple(
    THINGS[thing] for thing in "book bag pen watch phone umbrella hat shirt ticket flower letter".split()
)


def give(
    who: Phrase,
    receiver: Phrase,
    thing: Noun,
    quality: Adjective | None,
    when: tuple[Tense, Triple],
    mood: Mood,
) -> Triple | None:
    if quality and (mood == "not" or not set(quality.classes) & set(thing.classes)):
        return None
    if (
        same_person(who, receiver)
        or when[0] not in ("past", "future")
        or asks_oneself(who, mood)
        or (quality and quality.classes in "hw")
    ):
        return None
    return render_clause(
        Clause(
            who, DEEDS["give"], when[0], mood, noun_phrase(thing, "a", quality=quality), receiver, (when[1],)
        )
    )


TRADED = tuple(
    THINGS[thing]
    for thing in "book bag pen watch phone computer umbrella hat shirt ticket car bicycle house table "
    "chair bed".split()
)


def trade(
    who: Phrase,
    verb: Verb,
    determiner: str,
    thing: Noun,
    quality: Adjective | None,
    when: tuple[Tense, Triple],
    mood: Mood,
) -> Triple | None:
    """Buying, selling and looking for: a thing without an owner, or one's own."""
    if quality and (mood == "not" or not set(quality.classes) & set(thing.classes)):
        return None
    tense, time = when
    big = thing.english in ("house", "car", "bed", "table")
    if tense == "habit" or (verb is DEEDS["look for"] and (tense != "now" or (big and determiner == "own"))):
        return None
    if (
        (verb is DEEDS["buy"] and determiner == "own")
        or asks_oneself(who, mood)
        or (quality and quality.classes in "hw")
    ):
        return None
    if tense == "now" and verb is not DEEDS["look for"] and time == TIMES["now"]:
        return None
    mine = determiner == "own"
    if mine and quality in (NEW, QUALITIES["expensive"]):
        return None
    what = noun_phrase(thing, possessive(who) if mine else "a", quality=quality, own=mine)
    return render_clause(Clause(who, verb, tense, mood, what, extras=(time,)))


def possessive(who: Phrase) -> str:
    """The possessive that refers to `who`."""
    return ("my", "your", "her" if who.french_feminine else "his", "our", "their")[who.person]


def same_person(who: Phrase, other: Phrase) -> bool:
    """Whether a pronoun would repeat the subject: I … me, we … me, they … them."""
    mine = {0, 3}
    return who is other or (who.person in mine and other.person in mine)


# Things, and where they are

DETERMINERS = (*OWNERS, "the", "the", "this")
QUALIFIED = tuple(
    (thing, quality)
    for table in (THINGS, ANIMALS)
    for thing in table.values()
    for quality in QUALITIES.values()
    if set(quality.classes) & set(thing.classes)
)


def describe(
    determiner: str, pair: tuple[Noun, Adjective], plural: bool, very: bool, past: bool, mood: Mood
) -> Triple | None:
    thing, quality = pair
    who = noun_phrase(thing, determiner, plural=plural)
    if (very and (set(quality.classes) & set("ck") or mood == "not")) or (
        past and not set(quality.classes) & set("hx")
    ):
        return None
    if thing.english in ("bird", "horse", "tree") and determiner not in ("the", "this"):
        return None
    return be(who, adjective_phrase(who, quality, very), EMPTY, past, mood)


def describe_owned(owner: Phrase, pair: tuple[Noun, Adjective], mood: Mood) -> Triple | None:
    thing, quality = pair
    if thing.english in ("bird", "tree", "flower", "window", "door", "glass"):
        return None
    who = noun_phrase(thing, owner=owner)
    return be(who, adjective_phrase(who, quality), EMPTY, False, mood)


RELATIONS = {
    "on": ("sur", "पर"),
    "under": ("sous", "के नीचे"),
    "in": ("dans", "में"),
    "near": ("près de", "के पास"),
    "behind": ("derrière", "के पीछे"),
    "in front of": ("devant", "के सामने"),
}
LANDMARKS = tuple(
    (relation, thing)
    for relation, things in (
        ("on", "table chair bed box"),
        ("under", "table chair bed tree car"),
        ("in", "bag box room car house garden"),
        ("near", "window door bed table chair tree house car"),
        ("behind", "door tree house car"),
        ("in front of", "house door window car"),
    )
    for thing in things.split()
)
SMALL_THINGS = tuple(
    THINGS[thing] for thing in "book bag pen key watch phone hat shirt ticket letter umbrella".split()
)


def relative_location(relation: str, landmark: str) -> Triple:
    place = noun_phrase(THINGS[landmark])
    sur, par = RELATIONS[relation]
    return f"{relation} {place.english}", f"{sur} {place.french}", f"{place.oblique} {par}"


def locate(
    determiner: str, thing: Noun, plural: bool, spot: tuple[str, str], past: bool, mood: Mood
) -> Triple | None:
    if spot[1] == thing.english or (spot == ("on", "box") and thing is THINGS["umbrella"]):
        return None
    if thing in SMALL_THINGS and (
        spot[0] == "in front of" or (spot[1] in ("tree", "house") and spot[0] != "in")
    ):
        return None
    if thing in SMALL_THINGS and spot[1] == "car" and spot[0] != "in":
        return None
    if spot == ("in", "box") and thing.english in ("bag", "umbrella"):
        return None
    if thing not in SMALL_THINGS and spot[1] == "bag":
        return None
    return be(noun_phrase(thing, determiner, plural=plural), relative_location(*spot), EMPTY, past, mood)


LOCATED = (*SMALL_THINGS, ANIMALS["cat"], ANIMALS["dog"])


def whereabouts(who: Phrase, place: PlacePhrase, when: tuple[bool, Triple], mood: Mood) -> Triple | None:
    return be(who, place.at, when[1], when[0], mood)


def ask_where(who: Phrase, past: bool) -> Triple:
    is_, est = (english.WAS, french.WAS) if past else (english.IS, french.IS)
    pronoun = who in PRONOUNS
    dit = ("est-ce que", who.french, est[who.person]) if pronoun else (est[who.person], who.french)
    return (
        english.join("where", is_[who.person], who.english),
        french.join("où", *dit),
        hindi.join(who.hindi, "कहाँ", hindi.copula(who, past)),
    )


LOST = (
    *EVERYONE,
    *ANIMAL_PHRASES,
    *PETS,
    *(
        noun_phrase(thing, whose, plural=plural)
        for thing in SMALL_THINGS
        for whose in (*OWNERS, "the")
        for plural in (False, True)
    ),
    *(
        noun_phrase(THINGS[thing], whose)
        for thing in ("car", "bicycle", "computer", "house", "room")
        for whose in OWNERS
    ),
)

NEARBY = tuple(
    Phrase(
        english=place.at[0].partition(" ")[2],
        french=place.at[1].partition(" ")[2],
        hindi=place.to[2],
        oblique=place.to[2],
    )
    for key, place in PLACES.items()
    if key in ("market", "office", "hospital", "library", "station", "restaurant", "hotel", "bank", "park")
)


def show(
    determiner: str, owner: Phrase | None, thing: Noun, plural: bool, quality: Adjective | None, mood: Mood
) -> Triple | None:
    """This is my book, these are Paul's books."""
    if quality and (mood != "say" or not set(quality.classes) & set(thing.classes)):
        return None
    what = noun_phrase(thing, determiner, plural=plural, quality=quality, owner=owner)
    this, is_, yah, hai = ("these", "are", "ये", "हैं") if plural else ("this", "is", "यह", "है")
    dit = "ce sont" if plural else "c'est"
    if mood == "not":
        dit = "ce ne sont pas" if plural else "ce n'est pas"
    said = {"say": (this, is_), "not": (this, is_, "not"), "ask": (is_, this)}[mood]
    return (
        english.join(*said, what.english),
        french.join("est-ce que" if mood == "ask" else "", dit, what.french),
        hindi.finite(yah, what.hindi, "", hai, mood),
    )


SHOWN = tuple(
    THINGS[thing]
    for thing in "book bag pen key watch phone computer umbrella hat shirt ticket letter car bicycle "
    "house chair room".split()
) + tuple(ANIMALS[pet] for pet in ("cat", "dog", "horse"))

# People to people


def bond(who: Phrase, verb: Verb, whom: Phrase, mood: Mood) -> Triple | None:
    """Someone loves, knows, helps … another; a relative may be the subject's own."""
    if same_person(who, whom) or asks_oneself(who, mood) or (verb is BONDS["know"] and who.possessive):
        return None
    tense: Tense = "habit" if verb.english[0] in ("love", "know", "understand") else "now"
    return render_clause(Clause(who, verb, tense, mood, whom))


def bond_later(
    who: Phrase, verb: Verb, whom: Phrase, when: tuple[Tense, Triple], mood: Mood
) -> Triple | None:
    tense, time = when
    if (
        same_person(who, whom)
        or verb.english[0] in ("love", "know", "understand")
        or tense not in ("future", "want", "can")
    ):
        return None
    if tense != "future" and time != EMPTY:
        return None
    return render_clause(Clause(who, verb, tense, mood, whom, extras=(time,)))


def bond_kin(who: Phrase, verb: Verb, kin: str, determiner: str, mood: Mood) -> Triple | None:
    if (who.possessive and (kin in who.english or who.possessive == determiner)) or verb is BONDS[
        "understand"
    ]:
        return None
    own = possessive(who)
    if (determiner == own and verb is BONDS["know"]) or (verb is BONDS["love"] and mood == "not"):
        return None
    third = determiner in ("his", "her", "their") and who.person in (2, 4)
    if determiner != own and (verb is BONDS["love"] or who.possessive or third):
        return None
    if {determiner, own} == {"my", "our"}:
        return None
    return bond(who, verb, noun_phrase(PEOPLE[kin], determiner, own=determiner == own), mood)


# Small talk

WEATHER = lexicon.parse_table("""
    be hot           | faire chaud   | गर्मी       | f |
    be cold          | faire froid   | ठंड         | f |
    be good          | faire beau    | मौसम अच्छा  | m | the weather
    be bad           | faire mauvais | मौसम खराब   | m | the weather
    rain             | pleut pleuvait pleuvra | बारिश | f |
    snow             | neige neigeait neigera | बर्फ़ | f |
""")


def weather(what: list[str], place: Triple, when: tuple[Tense, Triple], mood: Mood) -> Triple | None:
    sky, ciel, aasman, gender, subject = what
    tense, time = when
    if tense not in ("now", "past", "future"):
        return None
    if sky == "snow" and place in (
        PLACES["beach"].at,
        PLACES["Delhi"].at,
        PLACES["Mumbai"].at,
        PLACES["India"].at,
    ):
        return None
    step = {"now": 0, "past": 1, "future": 2}[tense]
    feminine = gender == "f"
    it = Phrase(subject or "it", "il", "", "")
    if sky.startswith("be "):
        how = f"{sky[3:]} {place[0]} {time[0]}"
        said = english.finite(it, ("is", "was", "will")[step], f"be {how}" if step == 2 else how, mood)
        verb, after = ("fait", "faisait", "fera")[step], ciel.partition(" ")[2]
        hai = ("है", hindi.past_copula(feminine, False), hindi.agree("होगा", feminine, False))[step]
    else:
        said = english.finite(
            it, ("is", "was", "will")[step], f"{sky + 'ing' * (step < 2)} {place[0]} {time[0]}", mood
        )
        verb, after = ciel.split()[step], ""
        falls = "हो" if sky == "rain" else "पड़"
        hai = (f"{falls} रही है", f"{falls} रही थी", "होगी" if sky == "rain" else "पड़ेगी")[step]
    return (
        " ".join(said.split()),
        french.finite(it, "", verb, after, f"{place[1]} {time[1]}".strip(), mood),
        hindi.finite(f"{time[2]} {place[2]}".strip(), aasman, "", hai, mood),
    )


SKIES = (
    EMPTY,
    *(PLACES[key].at for key in "village beach Paris Delhi London Mumbai France India Japan Canada".split()),
)


def tell_time(time: tuple[int, int]) -> Triple:
    said, dit, kaha = hour(*time)
    return english.join("it is", said), french.join("il est", dit), hindi.join(kaha, "बजे हैं")


def appointment(who: Phrase, verb: Verb, time: tuple[int, int], tense: Tense, mood: Mood) -> Triple | None:
    if (mood == "not" and tense == "past") or asks_oneself(who, mood):
        return None
    return render_clause(Clause(who, verb, tense, mood, extras=(clock(time),)))


TRAVELLERS = tuple(
    Phrase(*said, oblique="", hindi_feminine=she, french_feminine=False)
    for said, she in (
        (("the train", "le train", "ट्रेन"), True),
        (("the bus", "le bus", "बस"), True),
        (("the plane", "le avion", "हवाई जहाज़"), False),
    )
)
DOORS = tuple(
    Phrase(*said, oblique="", french_feminine=la, hindi_feminine=she)
    for said, la, she in (
        (("the shop", "le magasin", "दुकान"), False, True),
        (("the bank", "la banque", "बैंक"), True, False),
        (("the library", "la bibliothèque", "पुस्तकालय"), True, False),
        (("the market", "le marché", "बाज़ार"), False, False),
        (("the restaurant", "le restaurant", "रेस्तराँ"), False, False),
        (("the office", "le bureau", "दफ़्तर"), False, False),
    )
)


def language(who: Phrase, verb: Verb, tongue: list[str], tense: Tense, mood: Mood) -> Triple | None:
    name, bare, french_name, naam = tongue
    if (verb.english[0] == "learn" and tense == "habit") or (
        verb.english[0] != "learn" and tense not in ("habit", "want")
    ):
        return None
    if (tense == "must" and mood == "not") or (asks_oneself(who, mood) and tense != "must"):
        return None
    if tense == "want" and verb is DEEDS["understand"]:
        return None
    what = fixed_phrase(name, bare if verb is DEEDS["speak"] else french_name, naam, feminine=True)
    return render_clause(Clause(who, verb, tense, mood, what))


def age(who: Phrase, number: int, mood: Mood) -> Triple | None:
    one, un, ek = NUMBERS[number - 1]
    least, most = (
        (22, 24)
        if who in ELDERS
        else (20, 24)
        if who in GROWN_PEOPLE
        else (5, 17)
        if who in YOUNG_PEOPLE
        else (5, 21)
    )
    if who in PRONOUNS or who in NAME_PHRASES:
        most = 24
    if who.plural or asks_oneself(who, mood) or not least <= number <= most:
        return None
    saal = hindi.agree("का", who.hindi_feminine, who.hindi_plural)
    return (
        english.finite(who, english.IS[who.person], f"{one} years old", mood),
        french.finite(who, "", french.HAS[who.person], "", f"{un} ans", mood),
        hindi.finite(who.hindi, f"{ek} साल {saal}", "", hindi.copula(who), mood),
    )


def how_old(who: Phrase) -> Triple | None:
    if who.plural or who is ME:
        return None
    asked = "quel âge est-ce que" if who in PRONOUNS else "quel âge a"
    return (
        english.join("how old", english.IS[who.person], who.english),
        french.join(asked, who.french, french.HAS[who.person] if who in PRONOUNS else ""),
        hindi.join(
            who.hindi, "कितने साल", hindi.agree("का", who.hindi_feminine, who.hindi_plural), hindi.copula(who)
        ),
    )


def how_are(who: Phrase, time: Triple) -> Triple | None:
    if who in (ME, WE):
        return None
    va = MOTIONS["go"].present[who.person]
    asked = f"{va}-{'t-' * (who.person == 2)}{who.french}" if who in PRONOUNS else f"{va} {who.french}"
    return (
        english.join("how", english.IS[who.person], who.english, time[0]),
        french.join("comment", asked, time[1]),
        hindi.join(
            who.hindi, time[2], hindi.agree("कैसा", who.hindi_feminine, who.hindi_plural), hindi.copula(who)
        ),
    )


def live(who: Phrase, place: PlacePhrase, tense: Tense, mood: Mood) -> Triple | None:
    if asks_oneself(who, mood):
        return None
    return render_clause(Clause(who, MOTIONS["live"], tense, mood, extras=(place.at,)))


HOMES = tuple(PLACES[key] for key in (*CITIES, *COUNTRIES))
GREETINGS = lexicon.parse_table("""
    hello         | bonjour    | नमस्ते
    good morning  | bonjour    | सुप्रभात
    good evening  | bonsoir    | शुभ संध्या
    good night    | bonne nuit | शुभ रात्रि
    goodbye       | au revoir  | अलविदा
    thank you     | merci      | धन्यवाद
""")
ADDRESSED = (
    *NAME_PHRASES,
    Phrase("my friend", "mon ami", "मेरे दोस्त", ""),
    Phrase("my brother", "mon frère", "मेरे भाई", ""),
    Phrase("my sister", "ma sœur", "मेरी बहन", ""),
    Phrase("children", "les enfants", "बच्चो", ""),
    Phrase("my friends", "mes amis", "मेरे दोस्तो", ""),
    Phrase("father", "papa", "पिताजी", ""),
    Phrase("mother", "maman", "माँ", ""),
)


def greet(greeting: list[str], who: Phrase) -> Triple:
    said, dit, kaha = greeting
    return english.join(said, who.english), french.join(dit, who.french), hindi.join(kaha, who.hindi)


def name_is(who: Phrase, name: Phrase, mood: Mood) -> Triple | None:
    """My name is Ravi, my sister's name is not Meera, is her name Sarah."""
    if who.plural or (name.french_feminine != who.french_feminine and who not in (ME, YOU)):
        return None
    if asks_oneself(who, mood):
        return None
    whose = f"{possessive(who)} name" if who in PRONOUNS else f"{who.english}'s name"
    named = Phrase(whose, "", f"{hindi.with_postposition(who, 'का')} नाम", "")
    return (
        english.finite(named, "is", name.english, mood),
        french.finite(
            who,
            french.REFLEXIVES[who.person],
            ("appelle", "appelles", "appelle")[who.person],
            "",
            name.french,
            mood,
        ),
        hindi.finite(named.hindi, name.hindi, "", "है", mood),
    )


TIMETABLE: tuple[Tense, ...] = ("habit", "past", "future")
LATE = tuple(time for time in HOURS if time[0] > 1)  # one o'clock alone takes बजा है
EARLY = tuple(time for time in HOURS if 5 <= time[0] <= 9)
YES_NO = (False, True)
ADJECTIVE_CHOICES: tuple[Adjective | None, ...] = (*(None,) * 8, NEW, *QUALITIES.values())
TRADERS = tuple(who for who in EVERYONE if who not in YOUNG_PEOPLE)
BOND, STATE, TRAIT = (tuple(table.values()) for table in (BONDS, STATES, TRAITS))
GO_VERBS = (MOTIONS["go"], MOTIONS["go"], MOTIONS["come back"])
RELATIVES = ("brother", "sister", "son", "daughter", "friend", "child")
TRADES = (DEEDS["buy"], DEEDS["sell"], DEEDS["look for"])
TONGUES = (DEEDS["speak"], DEEDS["learn"], DEEDS["understand"])

PATTERNS = (
    Pattern("act", 2600, act, (EVERYONE, ACTION_CHOICES, TIME_CHOICES, MOODS)),
    Pattern("act later", 1000, act, (EVERYONE, ACTION_CHOICES, MODAL_TIMES, MOODS)),
    Pattern("beasts act", 250, act, (RUNNERS + PETS, ANIMAL_ACTIONS, COMMON_TIMES, MOODS)),
    Pattern("feed", 250, feed, (ANIMAL_PHRASES + PETS, FODDER, COMMON_TIMES, MOODS)),
    Pattern("travel", 1400, travel, (EVERYONE, GO_VERBS, DESTINATIONS, TIME_CHOICES, MOODS)),
    Pattern("travel later", 500, travel, (EVERYONE, GO_VERBS, DESTINATIONS, MODAL_TIMES, MOODS)),
    Pattern("consume", 3000, consume, (EVERYONE, MEALS, TIME_CHOICES, MOODS)),
    Pattern("consume later", 1100, consume, (EVERYONE, MEALS, MODAL_TIMES, MOODS)),
    Pattern("like", 900, like, (EVERYONE, LIKED, MOODS)),
    Pattern("wish", 700, wish, (EVERYONE, WANTED, MOODS)),
    Pattern("feel", 600, feel, (EVERYONE, tuple(FEELINGS), YES_NO, YES_NO, MOODS)),
    Pattern("beasts feel", 80, feel, (ANIMAL_PHRASES + PETS, tuple(FEELINGS[:2]), YES_NO, YES_NO, MOODS)),
    Pattern("state", 1100, state, (EVERYONE, STATE, YES_NO, STATE_TIMES, MOODS)),
    Pattern("trait", 800, trait, (EVERYONE, TRAIT, YES_NO, YES_NO, MOODS)),
    Pattern("job", 800, job, (WORKERS, tuple(JOBS), ("is", "is", "past", "want"), MOODS)),
    Pattern("have", 1000, have, (EVERYONE, OWNED, ADJECTIVE_CHOICES, (1, 1, 1, 2, 3, 4, 5), MOODS)),
    Pattern("count", 200, count, (EVERYONE, OWNED)),
    Pattern("relatives", 300, relatives, (PARENTS, RELATIVES, (1, 2, 3, 4, 5))),
    Pattern("give", 600, give, (EVERYONE, PRONOUNS, GIFTS, ADJECTIVE_CHOICES, TIME_CHOICES, MOODS)),
    Pattern(
        "trade", 1100, trade, (TRADERS, TRADES, ("a", "own"), TRADED, ADJECTIVE_CHOICES, TIME_CHOICES, MOODS)
    ),
    Pattern("describe", 1200, describe, (DETERMINERS, QUALIFIED, YES_NO, YES_NO, YES_NO, MOODS)),
    Pattern("describe owned", 300, describe_owned, (NAME_PHRASES, QUALIFIED, MOODS)),
    Pattern("locate", 1200, locate, (DETERMINERS[:-1], LOCATED, YES_NO, LANDMARKS, YES_NO, MOODS)),
    Pattern("whereabouts", 700, whereabouts, (EVERYONE, tuple(PLACES.values()), STATE_TIMES, MOODS)),
    Pattern("ask where", 300, ask_where, (LOST, YES_NO)),
    Pattern("ask the way", 20, ask_where, (NEARBY, (False,))),
    Pattern("show", 600, show, (OWNERS, (None,), SHOWN, YES_NO, ADJECTIVE_CHOICES, MOODS)),
    Pattern("show owned", 300, show, (("the",), NAME_PHRASES + KIN[::6], SHOWN, YES_NO, (None,), MOODS)),
    Pattern("bond", 700, bond, (EVERYONE, BOND, PRONOUNS, MOODS)),
    Pattern("bond later", 400, bond_later, (EVERYONE, BOND, PRONOUNS, TIME_CHOICES + MODAL_TIMES, MOODS)),
    Pattern(
        "bond kin",
        400,
        bond_kin,
        (EVERYONE, BOND, ("father", "mother", "brother", "sister", "friend"), OWNERS, MOODS),
    ),
    Pattern("weather", 500, weather, (tuple(WEATHER), SKIES, TIME_CHOICES, MOODS)),
    Pattern("tell time", 50, tell_time, (LATE,)),
    Pattern("get up", 300, appointment, (EVERYONE, (ACTIONS["get up"],), EARLY, TIMETABLE, MOODS)),
    Pattern(
        "trains",
        250,
        appointment,
        (TRAVELLERS, (MOTIONS["leave"], MOTIONS["arrive"]), HOURS, TIMETABLE, MOODS),
    ),
    Pattern(
        "shops",
        250,
        appointment,
        (DOORS, (MOTIONS["open"], MOTIONS["close"]), HOURS, ("habit", "future"), MOODS),
    ),
    Pattern(
        "language",
        500,
        language,
        (EVERYONE, TONGUES, tuple(LANGUAGES), ("now", "habit", "habit", "want", "must"), MOODS),
    ),
    Pattern("age", 450, age, (EVERYONE, tuple(range(5, 25)), MOODS)),
    Pattern("how old", 60, how_old, (EVERYONE,)),
    Pattern("how are", 120, how_are, ((*EVERYONE, *PETS), PRESENTS)),
    Pattern("live", 400, live, (EVERYONE, HOMES, ("habit", "habit", "want"), MOODS)),
    Pattern("greet", 100, greet, (tuple(GREETINGS), ADDRESSED)),
    Pattern("called", 250, name_is, ((ME, YOU, HE, SHE, *KIN), NAME_PHRASES, MOODS)),
)
