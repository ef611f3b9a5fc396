"""The story grammar: generator, exact recogniser, and the promises about its texts."""

import hashlib
import math
import re
import statistics

import pytest

from andrea_numba import stories
from andrea_numba.stories import Choice, Draw, Literal, Reference

GOLDEN = "3439acd1efdc04b2461f842063e47be27e3d7f723758acdd36dfd402e0a672a5"
PRONOUNS = re.compile(r"\b(he|him|his|she|her)\b")


@pytest.fixture(scope="module")
def grammar() -> stories.Grammar:
    return stories.load_grammar()


@pytest.fixture(scope="module")
def corpus() -> list[stories.Story]:
    return stories.generate_stories(400_000)


def all_options(grammar):
    """Every place where the grammar chooses."""

    def inside(options):
        yield options
        for nodes, _ in options:
            for node in nodes:
                if isinstance(node, Choice):
                    yield from inside(node.options)

    yield from grammar.lists.values()
    for lists in grammar.keyed.values():
        yield from lists.values()
    for patterns, following in grammar.states.values():
        yield following
        yield from inside(patterns)


def test_same_text_everywhere():
    text = " ".join(s.text for s in stories.generate_stories(100_000))[:100_000]
    assert hashlib.sha256(text.encode("ascii")).hexdigest() == GOLDEN


def test_seed_decides(corpus):
    again = stories.generate_stories(20_000)
    assert again == corpus[: len(again)]
    assert stories.generate_stories(20_000, seed=1)[0] != again[0]


def test_as_many_characters_as_asked_for():
    made = stories.generate_stories(5_000)
    sizes = [len(s.text) for s in made]
    assert sum(sizes) >= 5_000 > sum(sizes[:-1])


def test_plain_ascii_paragraphs(corpus):
    for text, _ in corpus:
        assert text.isascii() and text.isprintable()
        assert "  " not in text and text[-1] in '.!?"' and not re.search(r"[{}<>\[\]|@=]", text)
        assert not re.search(r"\b[Aa] [aeiou]|\b[Aa]n [^aeiou]", text)


def test_vocabulary_and_patterns(grammar):
    text = " ".join(s.text.lower() for s in stories.generate_stories(2_000_000))
    assert len(set(re.findall(r"[a-z]+", text))) >= 1_500
    assert sum(len(state.patterns.items) for state in grammar.states.values()) >= 100


def test_every_story_the_grammar_can_tell_has_60_to_200_words(grammar):
    """Shortest and longest path through the chain, counting words as the spaces between them."""
    sources = {}
    for options in all_options(grammar):
        for item in options.items:
            for node in item if isinstance(item, tuple) else ():
                if isinstance(node, Draw) and node.name:
                    sources[node.name] = node

    def spaces(node, pick):
        match node:
            case Literal(text):
                return text.count(" ")
            case Reference(name, field, style):
                draw = sources[name]
                return spaces(Draw(draw.source, draw.key, None, field, style), pick)
            case Draw(source, key, _, field, style):
                lists = grammar.keyed[source].values() if key else [grammar.lists[source]]
                rows = [row for options in lists for row in options.items]
                return pick(row[field].count(" ") for row in rows) + (style in ("a", "A"))
            case Choice(options):
                return pick(total(nodes, pick) for nodes in options.items)

    def total(nodes, pick):
        return sum(spaces(node, pick) for node in nodes)

    def words(state, pick):
        patterns, following = grammar.states[state]
        here = 1 + pick(total(nodes, pick) for nodes in patterns.items)
        return here + pick(words(after, pick) if after else 0 for after in following.items)

    assert words(grammar.start, min) >= 60
    assert words(grammar.start, max) <= 200


def test_probabilities_are_normalised(grammar):
    for options in all_options(grammar):
        assert math.isclose(sum(math.exp(lp) for lp in options.log_p), 1.0, abs_tol=1e-12)


def test_recogniser_agrees_with_generator_and_finds_one_derivation(corpus, grammar):
    for text, log_p in corpus[:300]:
        recognised, count = grammar.parse(text)
        assert count == 1
        assert abs(recognised - log_p) < 1e-9


def test_texts_the_grammar_cannot_produce(corpus):
    text = corpus[0].text
    for wrong in (
        "",
        text + " ",
        text[:-1],
        text.replace(" and ", " und ", 1),
        text.replace(text.split()[-2], "xyzzy", 1),
        re.sub(r"(\. )", r".\1", text, count=1),
    ):
        assert wrong != text
        assert stories.log_probability(wrong) == -math.inf
        assert stories.derivations(wrong) == 0


def test_wrong_pronoun_or_name_is_not_a_story(corpus, grammar):
    swapped = {"his": "her", "her": "his", "he": "she", "she": "he", "him": "her"}
    with_pronoun = [s.text for s in corpus if re.search(r"(?<=\w )(his|her|he|she)\b", s.text)]
    for text in with_pronoun[:20]:
        wrong = re.sub(r"(?<=\w )(his|her|he|she)\b", lambda m: swapped[m[0]], text, count=1)
        assert stories.log_probability(wrong) == -math.inf
    names = [row["word"] for row in grammar.lists["cast"].items]
    for text, _ in corpus[:20]:
        hero = next(name for name in names if re.search(rf"\b{name}\b", text))
        other = next(name for name in names if name != hero)
        at = text.rindex(hero)
        assert stories.log_probability(text[:at] + other + text[at + len(hero) :]) == -math.inf


def test_characters_stay_the_same(corpus, grammar):
    cast = {row["word"]: row for row in grammar.lists["cast"].items}
    pals = {row["word"]: row for row in grammar.lists["pals"].items}
    assert not cast.keys() & pals.keys()
    for text, _ in corpus:
        words = set(re.findall(r"\w+", text))
        heroes, friends = words & cast.keys(), words & pals.keys()
        assert len(heroes) == 1 and len(friends) == 1
        hero, friend = cast[heroes.pop()], pals[friends.pop()]
        assert hero["kind"] in text and friend["kind"] in text
        allowed = {who[form] for who in (hero, friend) for form in ("he", "him", "his")}
        assert set(PRONOUNS.findall(text)) <= allowed


def test_expected_entropy_matches_the_stories(corpus, grammar):
    nats, chars = grammar.expected()
    surprise = [-s.log_probability for s in corpus]
    sizes = [len(s.text) for s in corpus]
    root_n = math.sqrt(len(corpus))
    assert abs(statistics.mean(surprise) - nats) < 4 * statistics.stdev(surprise) / root_n
    assert abs(statistics.mean(sizes) - chars) < 4 * statistics.stdev(sizes) / root_n


def test_floor(corpus, grammar):
    floor = stories.entropy_per_character(corpus)
    assert 0.35 <= floor <= 0.70
    nats, chars = grammar.expected()
    assert math.isclose(floor, nats / chars, rel_tol=0.01)


def test_an_ambiguous_grammar_sums_its_derivations():
    words = {"lists": {"one": "ab, a*3", "two": "c, bc"}, "tables": {}, "keyed": {}}
    ambiguous = stories.Grammar(
        words, {"phrases": {}, "states": {"only": {"patterns": "{one}{two}"}}}
    )
    log_p, count = ambiguous.parse("abc")  # ab+c and a+bc
    assert count == 2 and math.isclose(math.exp(log_p), 1 / 8 + 3 / 8)


@pytest.mark.parametrize("pattern", ["{oops", "[a|b", "a|b", "{x=nowhere}", "{a b c}"])
def test_broken_patterns_are_refused(pattern):
    words = {"lists": {"one": "a, b"}, "tables": {}, "keyed": {}}
    with pytest.raises(ValueError):
        stories.Grammar(words, {"phrases": {}, "states": {"only": {"patterns": pattern}}})


def test_repeated_words_are_refused():
    words = {"lists": {"one": "a, b, a"}, "tables": {}, "keyed": {}}
    with pytest.raises(ValueError, match="repeated"):
        stories.Grammar(words, {"phrases": {}, "states": {"only": {"patterns": "{one}"}}})
