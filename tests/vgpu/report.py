"""The errors of the virtual GPU."""

import linecache

KINDS = frozenset({
    "out of bounds",
    "use after free",
    "misaligned",
    "uninitialised read",
    "shared-memory race",
    "global race",
    "barrier divergence",
    "missing lanes",
    "missing cp.async wait",
    "read-only load of written memory",
    "bad launch",
    "bad driver call",
    "stream capture",
    "memory leak",
    "trap",
    "deadlock",
    "not supported",
})


class VirtualGPUError(RuntimeError):
    """A mistake of the program under test, or something the virtual GPU cannot do.

    kind       one of KINDS
    detail     what happened, in one line
    kernel     readable kernel name
    block      (x, y, z) of the CTA; thread: (x, y, z) inside the CTA
    ptx_line   1-based line in the PTX text, and that line as ptx_text
    source     (file, line) of the Python source
    """

    def __init__(
        self,
        kind: str,
        detail: str,
        *,
        kernel: str | None = None,
        block: tuple[int, int, int] | None = None,
        thread: tuple[int, int, int] | None = None,
        ptx_line: int | None = None,
        ptx_text: str | None = None,
        source: tuple[str, int] | None = None,
    ):
        if kind not in KINDS:
            raise ValueError(f"unknown kind of error: {kind!r}")
        super().__init__(kind, detail)
        self.kind = kind
        self.detail = detail
        self.kernel = kernel
        self.block = block
        self.thread = thread
        self.ptx_line = ptx_line
        self.ptx_text = ptx_text
        self.source = source

    def __str__(self) -> str:
        lines = [f"{self.kind}: {self.detail}"]
        where = [
            f"{name} {value}"
            for name, value in
            (("kernel", self.kernel), ("block", self.block), ("thread", self.thread))
            if value is not None
        ]
        if where:
            lines.append("  " + ", ".join(where))
        if self.ptx_line is not None:
            lines.append(f"  PTX line {self.ptx_line}: {(self.ptx_text or '').strip()}")
        if self.source is not None:
            file, number = self.source
            lines.append(f'  File "{file}", line {number}')
            if text := linecache.getline(file, number).strip():
                lines.append("    " + text)
        return "\n".join(lines)


class PtxError(VirtualGPUError):
    """PTX text that the parser does not know."""

    def __init__(self, detail: str, **place):
        super().__init__("not supported", detail, **place)
        self.args = (detail,)  # what unpickling calls the class with


class UnknownOpcode(VirtualGPUError):
    """An opcode form that is not in the table."""

    def __init__(self, detail: str, **place):
        super().__init__("not supported", detail, **place)
        self.args = (detail,)
