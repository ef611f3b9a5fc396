"""Small children's stories from a probabilistic grammar whose exact entropy is known.

The grammar is data: `story_grammar.toml` holds the sentence patterns, `story_words.toml` the words.
A story is a walk along a chain of sentence kinds ("states"); each state picks one of its patterns
and fills it in. Because every choice is explicit, each story comes with its exact log-probability,
and the mean per character is the floor that no language model trained on the corpus can beat.

Pattern syntax
    {list}        a word drawn from the list         {x}  {x.f}  the remembered word, or its field f
    {x=list}      draw, and remember the word as x   {list@x.f}  draw from the list that belongs to
    {x=list.f}    draw, remember, but write field f              field f (default: word) of x
    [a|b|]        one alternative, equally likely    {^...}      capitalised
    <phrase>      an entry of the [phrases] table    {a ...}     with its article, a or an ({A ...})
A list of several columns is a table; its column `word` is the one written by default. Words of
[rare] extend the list of the same name, at 1/COMMON of the frequency.
"""

from __future__ import annotations

import math
import random
import re
import tomllib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import accumulate
from typing import NamedTuple

COMMON = 150  # weight of a word of [lists] where one of [rare] has 1

Row = dict[str, str]  # field -> text
Bound = dict[str, Row]  # what a story has fixed so far


class Story(NamedTuple):
    text: str  # plain ASCII, one paragraph
    log_probability: float  # nats, of this text under the grammar


class Options:
    """Weighted alternatives; probabilities are weight / total, weights are whole numbers."""

    def __init__(self, items: Sequence, weights: Sequence[int]):
        self.items = list(items)
        self.total = sum(weights)
        self.cumulative = list(accumulate(weights))
        self.log_p = [math.log(w / self.total) for w in weights]

    def draw(self, rng: random.Random) -> tuple:
        index = bisect_right(self.cumulative, int(rng.random() * self.total))
        return self.items[index], self.log_p[index]

    def entropy(self) -> float:
        return -sum(math.exp(lp) * lp for lp in self.log_p)

    def __iter__(self) -> Iterator[tuple[object, float]]:
        return zip(self.items, self.log_p, strict=True)


@dataclass(frozen=True)
class Literal:
    text: str


@dataclass(frozen=True)
class Reference:
    name: str
    field: str
    style: str


@dataclass(frozen=True)
class Draw:
    source: str
    key: tuple[str, str] | None  # (name, field) whose text selects the list, or None
    name: str | None  # remember the row under this name
    field: str
    style: str


@dataclass(frozen=True, eq=False)
class Choice:
    options: Options  # of node tuples


Node = Literal | Reference | Draw | Choice


def _styled(text: str, style: str) -> str:
    if style == "^":
        return text[0].upper() + text[1:]
    if style in ("a", "A"):
        return style + ("n " if text[0] in "aeiou" else " ") + text
    return text


def _fixed_text(node: Literal | Reference, bound: Bound) -> str:
    if isinstance(node, Literal):
        return node.text
    return _styled(bound[node.name][node.field], node.style)


_SLOT = re.compile(r"(\^|a |A )?(?:(\w+)=)?(\w+)(?:@(\w+)(?:\.(\w+))?)?(?:\.(\w+))?")


def _parse(pattern: str, lists: set[str]) -> tuple[Node, ...]:
    """Pattern text -> nodes; nested [...] groups become Choice nodes."""

    def slot(source: str) -> Node:
        match = _SLOT.fullmatch(source)
        if not match:
            raise ValueError(f"cannot read slot {{{source}}} in {pattern!r}")
        style, name, head, key, key_field, field = match.groups()
        if name is None and head not in lists:
            return Reference(head, field or "word", (style or "").strip())
        if head not in lists:
            raise ValueError(f"no list named {head!r} in {pattern!r}")
        by = (key, key_field or "word") if key else None
        return Draw(head, by, name, field or "word", (style or "").strip())

    tokens = re.findall(r"\{[^}]*\}|[\[\]|]|[^\[\]|{}]+", pattern)
    if "".join(tokens) != pattern:
        raise ValueError(f"unbalanced braces in {pattern!r}")
    stack: list[list[list[Node]]] = [[[]]]  # open groups; each a list of alternatives
    for token in tokens:
        if token == "[":
            stack.append([[]])
        elif token == "|":
            stack[-1].append([])
        elif token == "]":
            alternatives = [tuple(nodes) for nodes in stack.pop()]
            stack[-1][-1].append(Choice(Options(alternatives, [1] * len(alternatives))))
        else:
            node = slot(token[1:-1]) if token[0] == "{" else Literal(token)
            stack[-1][-1].append(node)
    if len(stack) != 1 or len(stack[0]) != 1:
        raise ValueError(f"unbalanced brackets in {pattern!r}")
    return tuple(stack[0][0])


def _weighted(entry: str) -> tuple[str, int]:
    text, star, weight = entry.rpartition("*")
    return (text.strip(), int(weight)) if star else (entry.strip(), 1)


def _word_options(text: str, fields: Sequence[str], rare: str | None = None) -> Options:
    """Comma-separated entries; with several fields the columns of an entry are split at spaces."""
    entries = [_weighted(" ".join(entry.split())) for entry in text.split(",")]
    if rare:
        entries = [(word, COMMON * weight) for word, weight in entries]
        entries += [_weighted(" ".join(entry.split())) for entry in rare.split(",")]
    rows = []
    for entry, _ in entries:
        columns = entry.split(" ") if len(fields) > 1 else [entry]
        rows.append(dict(zip(fields, columns, strict=True)))
    words = [row["word"] for row in rows]
    if len(set(words)) != len(words) or "" in words:
        raise ValueError(f"empty or repeated entry among {sorted(words)}")
    return Options(rows, [weight for _, weight in entries])


def _log_add(a: float, b: float) -> float:
    """log(exp(a) + exp(b)); exact in the unambiguous case, where one of the two is -inf."""
    low, high = sorted((a, b))
    return high + math.log1p(math.exp(low - high)) if low > -math.inf else high


class State(NamedTuple):
    patterns: Options  # of node tuples
    following: Options  # of state names; "" ends the story


class Grammar:
    """The compiled grammar: generator, exact recogniser, and exact expectations."""

    def __init__(self, words: dict, grammar: dict):
        self.lists = {
            name: _word_options(text, ["word"], words.get("rare", {}).get(name))
            for name, text in words["lists"].items()
        }
        for name, table in words["tables"].items():
            self.lists[name] = _word_options(table["rows"], table["fields"].split())
        self.keyed = {
            name: {key: _word_options(text, ["word"]) for key, text in table.items()}
            for name, table in words["keyed"].items()
        }
        names = set(self.lists) | set(self.keyed)
        self.states: dict[str, State] = {}
        for name, state in grammar["states"].items():
            text = re.sub(r"<(\w+)>", lambda m: grammar["phrases"][m[1]], state["patterns"])
            lines = re.sub(r"\n\s+", " ", text.strip("\n")).split("\n")
            entries = [_weighted(line) for line in lines]
            patterns = [_parse(text, names) for text, _ in entries]
            following = state.get("next", {"": 1})
            self.states[name] = State(
                Options(patterns, [weight for _, weight in entries]),
                Options(list(following), list(following.values())),
            )
        self.start = next(iter(self.states))

    def options(self, draw: Draw, bound: Bound) -> Options:
        if draw.key is None:
            return self.lists[draw.source]
        name, field = draw.key
        return self.keyed[draw.source][bound[name][field]]

    def story(self, rng: random.Random) -> Story:
        sentences, bound, total, state = [], {}, 0.0, self.start
        while state:
            out: list[str] = []
            patterns, following = self.states[state]
            nodes, pattern_lp = patterns.draw(rng)
            nodes_lp = self._write(nodes, bound, rng, out)
            sentences.append("".join(out))
            state, next_lp = following.draw(rng)
            total += pattern_lp + nodes_lp + next_lp
        return Story(" ".join(sentences), total)

    def _write(self, nodes: Sequence[Node], bound: Bound, rng: random.Random, out: list) -> float:
        total = 0.0
        for node in nodes:
            match node:
                case Literal() | Reference():
                    out.append(_fixed_text(node, bound))
                case Draw(_, _, name, field, style):
                    row, log_p = self.options(node, bound).draw(rng)
                    total += log_p
                    if name:
                        bound[name] = row
                    out.append(_styled(row[field], style))
                case Choice(options):
                    chosen, log_p = options.draw(rng)
                    total += log_p + self._write(chosen, bound, rng, out)
        return total

    def _match(
        self, nodes: tuple[Node, ...], text: str, at: int, bound: Bound
    ) -> Iterator[tuple[int, Bound, float]]:
        """Every way in which `nodes` can produce text[at:end]: (end, bindings, log-probability)."""
        if not nodes:
            yield at, bound, 0.0
            return
        node, rest = nodes[0], nodes[1:]
        match node:
            case Literal() | Reference():
                piece = _fixed_text(node, bound)
                if text.startswith(piece, at):
                    yield from self._match(rest, text, at + len(piece), bound)
            case Draw(_, _, name, field, style):
                for row, log_p in self.options(node, bound):
                    piece = _styled(row[field], style)
                    if text.startswith(piece, at):
                        after = {**bound, name: row} if name else bound
                        for end, last, lp in self._match(rest, text, at + len(piece), after):
                            yield end, last, log_p + lp
            case Choice(options):
                for chosen, log_p in options:
                    for end, last, lp in self._match(chosen + rest, text, at, bound):
                        yield end, last, log_p + lp

    def parse(self, text: str) -> tuple[float, int]:
        """(log-probability over all derivations, their number); (-inf, 0) if there is none."""
        # A hypothesis is (position, state, bindings); positions only grow, so the hypotheses are
        # processed in order of position and equal ones merge before they are extended.
        pending: dict[int, dict[tuple, tuple[Bound, float, int]]] = {}

        def add(at: int, state: str, bound: Bound, log_p: float, count: int) -> None:
            key = (state, *sorted((name, row["word"]) for name, row in bound.items()))
            group = pending.setdefault(at, {})
            _, old, n = group.get(key, (bound, -math.inf, 0))
            group[key] = (bound, _log_add(old, log_p), n + count)

        total, derivations = -math.inf, 0
        add(0, self.start, {}, 0.0, 1)
        while pending:
            at = min(pending)
            for (state, *_), (bound, log_p, count) in pending.pop(at).items():
                for nodes, pattern_lp in self.states[state].patterns:
                    for end, after, lp in self._match(nodes, text, at, bound):
                        for following, next_lp in self.states[state].following:
                            path = log_p + pattern_lp + lp + next_lp
                            if following and text.startswith(" ", end):
                                add(end + 1, following, after, path, count)
                            elif not following and end == len(text):
                                total = _log_add(total, path)
                                derivations += count
        return total, derivations

    def expected(self) -> tuple[float, float]:
        """(entropy in nats, length in characters) of a story, exactly.

        A choice depends on earlier ones only through keyed lists, and each key's distribution is
        that of the list it was drawn from, so expectations are sums over the chain of states.
        """
        drawn: dict[str, Draw] = {}  # remembered name -> the one draw that fixes it
        for state in self.states.values():
            for node in _flatten(state.patterns):
                if isinstance(node, Draw) and node.name:
                    first = drawn.setdefault(node.name, node)
                    if (first.source, first.key) != (node.source, node.key):
                        raise ValueError(f"{node.name!r} is drawn from more than one list")

        @cache
        def lists_for(source: str, key: tuple[str, str] | None) -> list[tuple[float, Options]]:
            if key is None:
                return [(1.0, self.lists[source])]
            name, field = key
            return [(p, self.keyed[source][row[field]]) for p, row in rows_of(drawn[name])]

        def rows_of(draw: Draw) -> list[tuple[float, Row]]:
            return [
                (p * math.exp(lp), row)
                for p, options in lists_for(draw.source, draw.key)
                for row, lp in options
            ]

        def length(draw: Draw, field: str, style: str) -> float:
            return sum(p * len(_styled(row[field], style)) for p, row in rows_of(draw))

        def measure(nodes: Sequence[Node]) -> tuple[float, float]:
            nats, size = 0.0, 0.0
            for node in nodes:
                match node:
                    case Literal(text):
                        size += len(text)
                    case Reference(name, field, style):
                        size += length(drawn[name], field, style)
                    case Draw(source, key, _, field, style):
                        nats += sum(p * o.entropy() for p, o in lists_for(source, key))
                        size += length(node, field, style)
                    case Choice(options):
                        more = mixture(options)
                        nats, size = nats + more[0], size + more[1]
            return nats, size

        def mixture(options: Options) -> tuple[float, float]:
            parts = [(math.exp(lp), measure(nodes)) for nodes, lp in options]
            return (
                options.entropy() + sum(p * nats for p, (nats, _) in parts),
                sum(p * size for p, (_, size) in parts),
            )

        @cache
        def rest(name: str) -> tuple[float, float]:
            patterns, following = self.states[name]
            nats, size = mixture(patterns)
            nats += following.entropy()
            for state, lp in following:
                if state:
                    more = rest(state)
                    nats += math.exp(lp) * more[0]
                    size += math.exp(lp) * (1 + more[1])  # one space between sentences
            return nats, size

        return rest(self.start)


def _flatten(options: Options) -> Iterator[Node]:
    for nodes, _ in options:
        for node in nodes:
            yield node
            if isinstance(node, Choice):
                yield from _flatten(node.options)


@cache
def load_grammar() -> Grammar:
    """The built-in grammar, read from the package's data files."""
    folder = resources.files("andrea_numba")
    words = tomllib.loads((folder / "story_words.toml").read_text("ascii"))
    grammar = tomllib.loads((folder / "story_grammar.toml").read_text("ascii"))
    return Grammar(words, grammar)


def generate_stories(n_chars: int = 2_000_000, seed: int = 0) -> list[Story]:
    """Stories whose texts together have at least `n_chars` characters; same seed, same stories."""
    grammar, rng = load_grammar(), random.Random(seed)
    stories, size = [], 0
    while size < n_chars:
        stories.append(grammar.story(rng))
        size += len(stories[-1].text)
    return stories


def log_probability(text: str) -> float:
    """Exact log-probability of `text` in nats, over all its derivations; -inf if it has none."""
    return load_grammar().parse(text)[0]


def derivations(text: str) -> int:
    """Number of ways in which the grammar produces `text`."""
    return load_grammar().parse(text)[1]


def entropy_per_character(stories: Sequence[Story]) -> float:
    """Floor of any model's loss on these stories, in nats per character."""
    return -sum(s.log_probability for s in stories) / sum(len(s.text) for s in stories)
