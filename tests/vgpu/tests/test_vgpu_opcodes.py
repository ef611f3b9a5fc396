"""Every arithmetic, logic, comparison, selection and conversion form against its reference."""

import pytest
import vgpu
from reference_kernels import Case, check
from vgpu.opcodes import FORMS

BASES = {
    "add", "sub", "mul", "mad", "neg", "abs", "min", "max", "div", "rem", "sad", "fma", "rcp",
    "sqrt", "rsqrt", "copysign", "sin", "cos", "lg2", "ex2", "tanh", "and", "or", "xor", "not",
    "cnot", "shl", "shr", "shf", "popc", "clz", "bfind", "brev", "bfe", "bfi", "prmt", "dp4a",
    "setp", "set", "selp", "slct", "testp", "mov", "cvt",
}
TESTED = [form for form in FORMS if form.split(".")[0] in BASES and ".cc." not in form]
IMMEDIATES = [
    *(Case("lop3.b32", (table,)) for table in (0, 0x80, 0x96, 0xE8, 0xCA, 0xFE, 0x1B, 0x7F, 0xFF)),
    *(Case(form, (count,)) for form in ("shl.b16", "shl.b32", "shl.b64", "shr.u32", "shr.s32",
                                        "shr.s64", "shr.u16") for count in (0, 1, 31, 32, 33, 64)),
    *(Case("bfe.u32", fields) for fields in ((0, 8), (8, 8), (28, 8))),
    *(Case("prmt.b32", (selector,)) for selector in (0x3210, 0x7531, 0xBA98)),
    *(Case(f"{form}.s32", (constant,)) for form in ("add", "mul.lo", "div", "rem", "min", "setp.lt")
      for constant in (1, -7, 2**31 - 1)),
]


def batches(forms, size=120):
    cases = [Case(form) for form in forms]
    return [cases[start:start + size] for start in range(0, len(cases), size)]


def name_of(cases):
    return f"{cases[0].form}-{cases[-1].form}"


@pytest.mark.parametrize("cases", batches(TESTED), ids=name_of)
def test_forms(cases):
    assert not check(cases)


def test_immediate_operands():
    assert not check(IMMEDIATES)


APPROXIMATE = [form for form in TESTED if ".approx" in form or ".full" in form]


def test_hostile_approximations_stay_within_their_bounds():
    with vgpu.options(approx="hostile"):
        assert not check([Case(form) for form in APPROXIMATE])
