"""The errors: what they say, and that they survive a process boundary."""

import pickle

import pytest
from vgpu.report import PtxError, UnknownOpcode, VirtualGPUError


def test_an_error_says_where_it_happened(tmp_path):
    source = tmp_path / "kernels.py"
    source.write_text("def kernel(a):\n    a[i] = 1\n")
    error = VirtualGPUError(
        "out of bounds", "store of 4 bytes", kernel="kernel", block=(1, 0, 0), thread=(3, 2, 0),
        ptx_line=7, ptx_text="\tst.global.u32 [%rd1], 1;", source=(str(source), 2))
    assert str(error).split("\n") == [
        "out of bounds: store of 4 bytes",
        "  kernel kernel, block (1, 0, 0), thread (3, 2, 0)",
        "  PTX line 7: st.global.u32 [%rd1], 1;",
        f'  File "{source}", line 2',
        "    a[i] = 1",
    ]
    assert str(VirtualGPUError("trap", "gave up")) == "trap: gave up"


def test_unknown_kinds_are_refused():
    with pytest.raises(ValueError, match="unknown kind of error: 'oops'"):
        VirtualGPUError("oops", "detail")


@pytest.mark.parametrize("error", [
    VirtualGPUError("trap", "gave up", kernel="k", thread=(1, 2, 3)),
    PtxError("PTX line 2: unknown", ptx_line=2), UnknownOpcode("frob"),
])
def test_errors_can_be_pickled(error):
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))
