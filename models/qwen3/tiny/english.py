"""Plain English for the tiny model: facts, short stories and number agreement, each with one right continuation."""

from __future__ import annotations

from random import Random
from typing import NamedTuple


class Sentence(NamedTuple):
    """`text` continues with `answer` and nothing else; `key` names what is asked, whatever surrounds it."""

    text: str
    answer: str
    key: str


class Relation(NamedTuple):
    templates: tuple[str, ...]
    pairs: dict[str, str]


def _pairs(text: str) -> dict[str, str]:
    return dict(item.split(":") for item in text.split(","))


RELATIONS: dict[str, Relation] = {
    "capital": Relation(
        (
            "The capital of {} is",
            "The capital city of {} is",
            "In {} the capital is",
            "The government of {} sits in",
            "The seat of government in {} is",
            "If you visit the capital of {}, you are in",
        ),
        _pairs(
            "France:Paris,Italy:Rome,Spain:Madrid,Germany:Berlin,Japan:Tokyo,Egypt:Cairo,Norway:Oslo,Greece:Athens,"
            "Kenya:Nairobi,Cuba:Havana,Peru:Lima,Chile:Santiago,Canada:Ottawa,Poland:Warsaw,Austria:Vienna,"
            "Ireland:Dublin,Portugal:Lisbon,Sweden:Stockholm,Finland:Helsinki,Denmark:Copenhagen,Hungary:Budapest,"
            "Turkey:Ankara,Thailand:Bangkok,Vietnam:Hanoi"
        ),
    ),
    "opposite": Relation(
        (
            "The opposite of {} is",
            "Something that is not {} is",
            "What is the opposite of {}? It is",
            "Not {} but",
            "The word that means the reverse of {} is",
            "It was {} before and now it is",
        ),
        _pairs(
            "hot:cold,big:small,tall:short,fast:slow,light:dark,wet:dry,full:empty,early:late,happy:sad,rich:poor,"
            "hard:soft,open:closed,old:new,near:far,strong:weak,thick:thin,clean:dirty,loud:quiet,sweet:sour,"
            "wide:narrow"
        ),
    ),
    "plural": Relation(
        (
            "One {}, two",
            "The plural of {} is",
            "I saw a {} and then I saw many",
            "There was a single {} and now there are ten",
            "She drew one {} and he drew three",
            "More than one {} are called",
        ),
        _pairs(
            "mouse:mice,foot:feet,tooth:teeth,goose:geese,man:men,woman:women,child:children,leaf:leaves,"
            "knife:knives,wolf:wolves,box:boxes,city:cities,story:stories,wife:wives"
        ),
    ),
    "past": Relation(
        (
            "Today I {} and yesterday I",
            "The past tense of {} is",
            "We {} every day and last week we",
            "They {} now and long ago they",
            "You {} today as you always",
            "Before, people did not {}, but then they",
        ),
        _pairs(
            "go:went,see:saw,eat:ate,run:ran,sing:sang,write:wrote,take:took,give:gave,come:came,speak:spoke,"
            "drink:drank,swim:swam,begin:began,teach:taught,think:thought,buy:bought"
        ),
    ),
    "young": Relation(
        (
            "A young {} is called a",
            "The baby of a {} is a",
            "A small {} that was just born is a",
            "Before it is a grown {}, it is a",
            "The mother {} looks after her",
            "The farmer has a {} and its",
        ),
        _pairs(
            "dog:puppy,cat:kitten,cow:calf,sheep:lamb,duck:duckling,pig:piglet,lion:cub,frog:tadpole,swan:cygnet,"
            "deer:fawn,owl:owlet,seal:pup"
        ),
    ),
}

NAMES = "Anna Ben Clara David Emma Frank Grace Henry Julia Kevin Laura Martin Nina Oscar Peter Rosa".split()
COLOURS = "red blue green yellow white black brown grey pink golden".split()
THINGS = "ball kite car book hat cup lamp boat drum coat chair bell".split()
PLACES = "garden kitchen school market forest library station castle".split()

# one of them, several of them, what one does, what several do
CREATURES = (
    ("dog", "dogs", "barks", "bark"),
    ("bird", "birds", "sings", "sing"),
    ("cat", "cats", "sleeps", "sleep"),
    ("horse", "horses", "runs", "run"),
    ("child", "children", "plays", "play"),
    ("teacher", "teachers", "reads", "read"),
    ("farmer", "farmers", "works", "work"),
    ("fish", "fishes", "swims", "swim"),
    ("baker", "bakers", "bakes", "bake"),
    ("painter", "painters", "paints", "paint"),
    ("baby", "babies", "cries", "cry"),
    ("singer", "singers", "dances", "dance"),
)
THINGS_NEAR = (("house", "houses"), ("tree", "trees"), ("river", "rivers"), ("bridge", "bridges"), ("wall", "walls"))
NEAR = ("near", "behind", "beside", "by", "under")
QUALITIES = ("old", "big", "small", "green")


def fact(rng: Random) -> Sentence:
    """A fact of the world, in one of several wordings."""
    relation = rng.choice(tuple(RELATIONS))
    template = rng.randrange(len(RELATIONS[relation].templates))
    return fact_in(relation, template, rng.choice(tuple(RELATIONS[relation].pairs)))


def fact_in(relation: str, template: int, subject: str) -> Sentence:
    """The fact about `subject` in the wording `template`."""
    templates, pairs = RELATIONS[relation]
    return Sentence(templates[template].format(subject), f"{pairs[subject]}.", f"fact|{relation}|{template}|{subject}")


def agreement(rng: Random) -> Sentence:
    """A verb that agrees with its subject, though another noun stands between them."""
    one, many, verb_one, verb_many = rng.choice(CREATURES)
    plural = rng.random() < 0.5
    thing = rng.choice(THINGS_NEAR)[rng.random() < 0.5]
    text = f"The {many if plural else one} {rng.choice(NEAR)} the {rng.choice(QUALITIES)} {thing}"
    return Sentence(text, f"{verb_many if plural else verb_one}.", f"agreement|{text}")


def story(rng: Random) -> Sentence:
    """Who has what, or who is where: the answer stands in the text."""
    names = rng.sample(NAMES, rng.randint(2, 5))
    asked = rng.randrange(len(names))
    if rng.random() < 0.3:
        places = rng.sample(PLACES, len(names))
        told = [f"{name} is in the {place}." for name, place in zip(names, places, strict=True)]
        question, answer = f"To find {names[asked]}, go to the", places[asked]
    else:
        colours, things = rng.sample(COLOURS, len(names)), rng.sample(THINGS, len(names))
        told = [f"{n} has a {c} {t}." for n, c, t in zip(names, colours, things, strict=True)]
        name, colour, thing = names[asked], colours[asked], things[asked]
        question, answer = rng.choice(
            ((f"The {thing} is", colour), (f"{name} has a {colour}", thing), (f"The {colour} {thing} belongs to", name))
        )
    return Sentence(" ".join((*told, question)), f"{answer}.", f"story|{' '.join(sorted(told))}")


def sentence(rng: Random) -> Sentence:
    """Any of the three; half are stories, whose answers are the hardest to find."""
    return rng.choices((fact, agreement, story), (0.3, 0.2, 0.5))[0](rng)


def vocabulary() -> list[str]:
    """Text for a tokenizer to learn its words from: every fact in every wording, and the stories' words."""
    facts = [
        f"{s.text} {s.answer}"
        for relation, (templates, pairs) in RELATIONS.items()
        for template in range(len(templates))
        for s in (fact_in(relation, template, subject) for subject in pairs)
    ]
    words = [*NAMES, *COLOURS, *THINGS, *PLACES, *NEAR, *QUALITIES, *(w for row in CREATURES for w in row)]
    words += [w for row in THINGS_NEAR for w in row]
    return facts + [f"The {w} {w}." for w in words for _ in range(8)]
