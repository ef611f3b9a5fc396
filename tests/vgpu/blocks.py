"""Basic blocks: splitting a program at control flow, and joining what can run as one."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from .inline import Program, registers_of
from .report import VirtualGPUError
from .syntax import Guard, Instruction, Label


@dataclass(slots=True, eq=False)
class BasicBlock:
    """kind: "jump", "branch", "exit", "barrier" or "warp"; None while it is being filled.

    guard       predicate of a branch: `target` if it holds, else `other`
    terminator  the branch, exit, barrier or (first) warp instruction
    size        number of PTX instructions
    """

    instructions: list[Instruction] = field(default_factory=list)
    kind: str | None = None
    target: "BasicBlock | None" = None
    other: "BasicBlock | None" = None
    guard: Guard | None = None
    terminator: Instruction | None = None
    size: int = 0

    def end(self, kind: str, terminator: Instruction | None, target: "BasicBlock | None" = None,
            other: "BasicBlock | None" = None, guard: Guard | None = None) -> None:
        self.kind, self.terminator, self.guard = kind, terminator, guard
        self.target, self.other = target, other
        if guard and guard.negated:
            self.target, self.other = other, target

    def successors(self) -> list["BasicBlock"]:
        return [block for block in (self.target, self.other) if block is not None]

    def absorb(self, following: "BasicBlock") -> None:
        """Append the only successor, keeping a warp block a warp block."""
        warp = self.terminator if self.kind == "warp" else None
        self.instructions += following.instructions
        self.size += following.size
        self.kind, self.terminator = following.kind, following.terminator
        self.target, self.other = following.target, following.other
        self.guard = following.guard
        if warp:
            self.kind, self.terminator = "warp", warp


def basic_blocks(program: Program, kind_of: Callable[[Instruction], str],
                 mask_of: Callable[[Instruction], object]) -> list[BasicBlock]:
    """The blocks of a program in program order; the first is the entry.

    kind_of  instruction -> "plain", "warp", "barrier", "branch" or "exit"
    mask_of  warp instruction -> its member mask operand, None if the whole warp takes part
    """
    blocks = _split(program, kind_of)
    _skip_empty(blocks)
    blocks = _reachable(blocks)
    _join(blocks, mask_of)
    return _reachable(blocks)


def _split(program: Program, kind_of: Callable[[Instruction], str]) -> list[BasicBlock]:
    kinds = {}
    targets: dict[str, BasicBlock] = {}
    for item in program.body:
        if isinstance(item, Instruction):
            kind = kinds.get(item.opcode) or kinds.setdefault(item.opcode, kind_of(item))
            if kind == "branch":
                targets.setdefault(item.operands[0].name, BasicBlock())
    current = BasicBlock()
    blocks = [current]
    guarded = after = None  # the block of the guarded instructions just seen, and its successor

    def start(block: BasicBlock) -> BasicBlock:
        blocks.append(block)
        return block

    placed = set()
    for item in program.body:
        if isinstance(item, Label):
            if item.name in targets:
                placed.add(item.name)
                current.end("jump", None, targets[item.name])
                current = start(targets[item.name])
            continue
        kind, guard = kinds[item.opcode], item.guard
        if kind == "branch":
            current.size += 1
            target, following = targets[item.operands[0].name], BasicBlock()
            if guard:
                current.end("branch", item, target, following, guard)
            else:
                current.end("jump", None, target)
            current = start(following)
        elif not guard:
            current = _append(current, item, kind, start)
        elif (current is after and not current.size and kind == "plain"
              and guarded.kind == "jump" and guard == guarded.instructions[-1].guard
              and guard.register not in registers_of(guarded.instructions[-1].operands[:1])):
            guarded.instructions.append(item)
            guarded.size += 1
        else:
            guarded, after = BasicBlock(), BasicBlock()
            current.end("branch", item, guarded, after, guard)
            last = _append(start(guarded), item, kind, start)
            if last.kind is None:
                last.end("jump", None, after)
            current = start(after)
    current.end("exit", None)  # the end of the text returns
    if missing := targets.keys() - placed:
        raise VirtualGPUError("not supported", f"branch to unknown label {min(missing)}")
    return blocks


def _append(block: BasicBlock, item: Instruction, kind: str,
            start: Callable[[BasicBlock], BasicBlock]) -> BasicBlock:
    """Add an instruction that does not branch; returns the block that the next one belongs to."""
    if kind == "warp" and block.size:
        alone = BasicBlock()
        block.end("jump", None, alone)
        block = start(alone)
    block.instructions.append(item)
    block.size += 1
    if kind == "plain":
        return block
    if kind == "exit":
        block.end("exit", item)
        return start(BasicBlock())
    following = BasicBlock()
    block.end(kind, item, following)
    return start(following)


def _skip_empty(blocks: list[BasicBlock]) -> None:
    def final(block: BasicBlock | None) -> BasicBlock | None:
        seen = set()
        while (block is not None and block.kind == "jump" and not block.instructions
               and block not in seen):
            seen.add(block)
            block = block.target
        return block

    for block in blocks:
        block.target, block.other = final(block.target), final(block.other)
        if block.kind == "branch" and block.target is block.other:
            block.end("jump", None, block.target)


def _reachable(blocks: list[BasicBlock]) -> list[BasicBlock]:
    seen, stack = {blocks[0]}, [blocks[0]]
    while stack:
        for block in stack.pop().successors():
            if block not in seen:
                seen.add(block)
                stack.append(block)
    return [block for block in blocks if block in seen]


def _join(blocks: list[BasicBlock], mask_of: Callable[[Instruction], object]) -> None:
    predecessors = Counter(block for source in blocks for block in source.successors())
    predecessors[blocks[0]] += 1  # the entry
    gone = set()
    for block in blocks:
        while (block not in gone and block.kind in ("jump", "warp")
               and (following := block.target) is not block and predecessors[following] == 1
               and _one_block(block, following, mask_of)):
            gone.add(following)
            block.absorb(following)


def _one_block(block: BasicBlock, following: BasicBlock,
               mask_of: Callable[[Instruction], object]) -> bool:
    """Whether the lanes that run a block run its only successor with the same member mask."""
    if block.kind == "jump":
        return following.kind != "warp"
    if following.kind != "warp":
        return following.kind == "jump"
    mask = mask_of(block.terminator)
    written = registers_of(tuple(item.operands[0] for item in block.instructions if item.operands))
    return mask == mask_of(following.terminator) and not registers_of((mask,)) & written
