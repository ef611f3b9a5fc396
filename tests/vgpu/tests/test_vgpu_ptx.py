"""The PTX parser: every construct it knows, and that it refuses all others by line and text."""

import pytest
from vgpu.ptx import (
    Address,
    Guard,
    Immediate,
    Instruction,
    Label,
    Negated,
    Pair,
    Register,
    Sink,
    Special,
    Symbol,
    Vector,
    parse,
)
from vgpu.report import PtxError

HEADER = ".version 8.7\n.target sm_90\n.address_size 64\n"
REGISTERS = ".reg .pred %p<4>; .reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .f32 %f<9>;\n"


def entry(body: str) -> str:
    return f"{HEADER}.visible .entry k()\n{{\n{REGISTERS}{body}\n}}\n"


def instructions(body: str) -> list[Instruction]:
    items = parse(entry(body)).functions["k"].body
    return [item for item in items if isinstance(item, Instruction)]


def operands(text: str) -> tuple:
    (instruction,) = instructions(f"op {text};")
    return instruction.operands


def test_module_header():
    module = parse(".version 9.5\n.target sm_90a, debug\n.address_size 64\n"
                   '.file 1 "/a b/k.py"\n.file 2 "m.py", 1234, 56\n')
    assert (module.version, module.target) == ("9.5", "sm_90a")
    assert module.files == {1: "/a b/k.py", 2: "m.py"}
    assert module.lines[1] == ".target sm_90a, debug"


@pytest.mark.parametrize("text, expected", [
    ("%r1", Register("%r1")),
    ("%tid.x", Special("%tid.x")),
    ("%laneid", Special("%laneid")),
    ("name$1", Symbol("name$1")),
    ("_", Sink()),
    ("!%p1", Negated(Register("%p1"))),
    ("%p1|%p2", Pair(Register("%p1"), Register("%p2"))),
    ("_|%p2", Pair(Sink(), Register("%p2"))),
    ("{%f1, %f2}", Vector((Register("%f1"), Register("%f2")))),
    ("{%f1, 0f3F800000}", Vector((Register("%f1"), Immediate(0x3F800000, "f32")))),
    ("[%rd1]", Address(Register("%rd1"), 0)),
    ("[%rd1+8]", Address(Register("%rd1"), 8)),
    ("[%rd1+-8]", Address(Register("%rd1"), -8)),
    ("[%rd1 + 0x10]", Address(Register("%rd1"), 16)),
    ("[symbol+4]", Address(Symbol("symbol"), 4)),
    ("[symbol]", Address(Symbol("symbol"), 0)),
    ("[64]", Address(None, 64)),
    ("0", Immediate(0, "int")),
    ("-2147483648", Immediate(-(1 << 31), "int")),
    ("0xFFU", Immediate(255, "int")),
    ("0f3F800000", Immediate(0x3F800000, "f32")),
    ("0d3FF0000000000000", Immediate(0x3FF0000000000000, "f64")),
    ("WARP_SZ", Immediate(32, "int")),
])
def test_operand(text, expected):
    assert operands(text) == (expected,)


@pytest.mark.parametrize("text", ["017", "1.5", "0f3F80", "%r1 %r2", "[%rd1", "[%rd1*2]", "", "%",
                                  "{%f1", "a+b", "[%rd1+%rd2]", "-%r1", "&x"])
def test_unknown_operand(text):
    with pytest.raises(PtxError, match="PTX line 8: unknown operand") as caught:
        parse(entry(f"add.s32 %r1, %r2, %r3;\nop %r1, {text};"))
    assert caught.value.ptx_line == 8
    assert caught.value.ptx_text == f"op %r1, {text};"


def test_instructions_with_guard_and_line():
    body = "ret;\n@%p1 bra $L__BB0_2;\n  @!%p2\n\tmov.b32 %r1,\n%r2;\n$L__BB0_2:\nexit;"
    assert [(i.opcode, i.guard, i.line) for i in instructions(body)] == [
        ("ret", None, 7), ("bra", Guard("%p1", False), 8), ("mov.b32", Guard("%p2", True), 9),
        ("exit", None, 13)]


def test_source_lines_come_from_loc():
    body = (".loc 1 8 0\nret;\n.loc 1 0 1\nret;\n"
            ".loc 2 5 3, function_name $L__info_string0, inlined_at 1 9 1\nret;\n"
            ".loc 3 7 1\nret;")
    module = parse(entry(body) + '.file 1 "a.py"\n.file 2 "b.py"\n')
    assert [i.source for i in module.functions["k"].body] == [
        ("a.py", 8), ("a.py", 8), ("b.py", 5), ("b.py", 5)]


def test_comments_and_pragmas_are_skipped():
    assert instructions('// a;\n/* b;\n */ .pragma "nounroll";\nret; // c') == [
        Instruction("ret", (), None, 10, None)]


def test_scopes_rename_registers_labels_and_parameters():
    body = """
    { .reg .b32 t; .reg .pred %p1;
      again:
      @%p1 bra again;
      bra outer;
      { .reg .b32 t; mov.b32 t, %r1; again: bra again; }
      mov.b32 t, %r2; }
    outer:
    { .param .b64 param0; st.param.b64 [param0+0], %rd1; }
    mov.b32 %r3, t;"""
    function = parse(entry(body)).functions["k"]
    found = [item.name if isinstance(item, Label) else (item.guard, item.operands)
             for item in function.body]
    assert found == [
        "again@1",
        (Guard("%p1@1", False), (Symbol("again@1"),)),
        (None, (Symbol("outer"),)),
        (None, (Register("t@2"), Register("%r1"))),
        "again@2",
        (None, (Symbol("again@2"),)),
        (None, (Register("t@1"), Register("%r2"))),
        "outer",
        (None, (Address(Symbol("param0@3"), 0), Register("%rd1"))),
        (None, (Register("%r3"), Symbol("t"))),
    ]
    assert function.registers["t@1"] == "b32" and function.registers["%p1@1"] == "pred"


def test_entry_parameters_and_directives():
    text = HEADER + """
    .visible .entry k(
        .param .u64 .ptr .align 1 k_param_0,
        .param .align 8 .b8 k_param_1[16],
        .param .u64 .ptr .global .align 4 k_param_2,
        .param .f32 k_param_3
    )
    .maxntid 8, 8, 1
    .minnctapersm 2
    .reqntid 64
    { ret; }"""
    function = parse(text).functions["k"]
    assert function.entry and function.defined
    assert [(v.name, v.type, v.align, v.size) for v in function.parameters] == [
        ("k_param_0", "u64", 8, 8), ("k_param_1", "b8", 8, 16),
        ("k_param_2", "u64", 8, 8), ("k_param_3", "f32", 4, 4)]
    assert function.directives == {
        "maxntid": (8, 8, 1), "minnctapersm": (2,), "reqntid": (64,)}


def test_functions_declarations_and_calls():
    text = HEADER + """
    .extern .func (.param .b32 r) outside (.param .b64 a, .param .b64 b) ;
    .weak .func (.param .b64 retval) f (.param .b64 p);
    .func g() .noreturn { trap; exit; }
    .weak .func (.param .b64 retval) f (.param .b64 p) { ret; }
    .weak .func (.param .b64 retval) f (.param .b64 p) { trap; }
    .entry k() {
      { .param .b64 param0; .param .b64 retval0;
        call.uni (retval0),
        f,
        (
        param0
        ); }
      call.uni g, ();
      call g; }"""
    functions = parse(text).functions
    assert not functions["outside"].defined
    assert [v.size for v in functions["outside"].parameters] == [8, 8]
    assert functions["f"].defined and functions["f"].body[0].opcode == "ret"
    assert functions["g"].directives == {"noreturn": ()}
    assert [(i.opcode, i.operands) for i in functions["k"].body] == [
        ("call.uni", (Vector((Symbol("retval0@1"),)), Symbol("f"),
                      Vector((Symbol("param0@1"),)))),
        ("call.uni", (Symbol("g"), Vector(()))),
        ("call", (Symbol("g"),)),
    ]


def test_variables():
    module = parse(HEADER + """
    .global .align 4 .b8 bytes[4] = {1, 255, 0x10};
    .const .align 8 .f32 floats[2] = {0f3F800000, 0f00000000};
    .visible .global .align 4 .u32 number = 5;
    .common .global .align 8 .u64 shared_by_all;
    .extern .shared .align 16 .b8 dynamic[];
    .shared .align 4 .b8 grid[4][8];
    .entry k() { .local .align 8 .b8 depot[40]; .shared .align 2 .u16 tile[3]; }""")
    variables = module.variables
    assert variables["bytes"].initializer == b"\x01\xff\x10\0"
    assert variables["floats"].initializer == b"\0\0\x80\x3f\0\0\0\0"
    assert variables["number"].initializer == b"\x05\0\0\0"
    assert variables["shared_by_all"].initializer is None
    dynamic = variables["dynamic"]
    assert (dynamic.space, dynamic.align, dynamic.size, dynamic.extern) == ("shared", 16, 0, True)
    assert variables["grid"].size == 32
    assert [(v.name, v.space, v.align, v.size) for v in module.functions["k"].variables] == [
        ("depot", "local", 8, 40), ("tile", "shared", 2, 6)]


def test_debug_sections_are_skipped():
    module = parse(entry("$L__func_begin0:\nret;\n$L__tmp0:") + """
    .section .debug_loc
    {
    $L__debug_loc0:
    .b64 $L__tmp0
    .b8 7
    }
    .section .debug_macinfo { }
    .global .b8 after;""")
    assert "after" in module.variables


@pytest.mark.parametrize("text, message", [
    (".alias a, b;", "PTX line 4: unknown syntax: '.alias a, b;'"),
    (".section .text { }", "unknown syntax"),
    (".address_size 32", "unknown syntax"),
    (".global .attribute(.managed) .b8 x[4];", "unknown syntax"),
    (".global .b128 x;", "variable x of type .b128"),
    (".global .u64 x[1] = {generic(y)};", "initializer 'generic.y.' is not a number"),
    (".global .b8 x[1] = {1, 2};", "initializer is longer"),
    (".global .b8 x;\n.global .b8 x;", "PTX line 5: variable x is defined twice"),
    (".local .b8 x;", ".local variable outside a function"),
    (".entry k(.texref t) {}", "unknown parameter '.texref t'"),
    (".entry k() .explicitcluster {}", "unknown syntax: '.explicitcluster {}'"),
    (".entry k() {}\n.entry k() {}", "function k is defined twice"),
])
def test_refused_in_a_module(text, message):
    with pytest.raises(PtxError, match=message):
        parse(HEADER + text)


@pytest.mark.parametrize("body, message", [
    (".branchtargets a, b;", "PTX line 7: unknown syntax: '.branchtargets a, b;'"),
    ("ret", "unknown syntax: 'ret'"),
    (".reg .b128 %q;", "register of type .b128"),
    (".reg .b8 %q;", "register of type .b8"),
    (".reg .b32 %r1;", "%r1 is declared twice"),
    (".reg .b32 %q-1;", "unknown register declaration"),
    ("a:\na:", "PTX line 8: label a is defined twice"),
    ("@%q bra a;", "guard %q is not a register"),
    (".global .b8 x;", ".global variable x inside a function"),
    (".local .b8 x; .local .b8 x;", "x is declared twice"),
    ("Add.s32 %r1, %r2, %r3;", "unknown syntax"),
])
def test_refused_in_a_body(body, message):
    with pytest.raises(PtxError, match=message):
        parse(entry(body))


def test_an_unfinished_body_or_header_is_refused():
    with pytest.raises(PtxError, match="unknown syntax"):
        parse(HEADER + ".entry k() { ret;")
    with pytest.raises(PtxError, match=r"no \.version or \.target"):
        parse("")
