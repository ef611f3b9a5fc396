"""Loops that are written out before they are compiled.

    def make(n):
        @unrolled
        def add(sums, values):
            for i in unroll(n):
                sums[2 * i] += values[i]

An array whose indexes are all constants lies in registers; one that is indexed by the variable of
a loop lies in memory. The compiler unrolls short loops only, and which are short changes from one
version to the next.
"""

import ast
import copy
import inspect
import operator
import textwrap
from collections.abc import Callable
from types import CodeType, FunctionType

from .cuda import device_function

unroll = range  # `unrolled` replaces loops over it
_ARITHMETIC = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
               ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.LShift: operator.lshift,
               ast.RShift: operator.rshift, ast.BitXor: operator.xor}


def unrolled(function: Callable) -> Callable:
    """A device function with n copies of the body of each loop over `unroll(n)`.

    n is made of constants, and of the variables of such loops. What the function calls must be
    defined before it.
    """
    code = function.__code__
    cells = function.__closure__ or ()
    names = function.__globals__ | {name: cell.cell_contents for name, cell
                                    in zip(code.co_freevars, cells, strict=True)}
    integers = {name: names[name] for name in (*code.co_freevars, *code.co_names)
                if type(names.get(name)) is int and name not in code.co_varnames}
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    tree.body[0].decorator_list = []
    tree = ast.fix_missing_locations(_Unroll(integers).visit(tree))
    ast.increment_lineno(tree, code.co_firstlineno - 1)
    module = compile(tree, code.co_filename, "exec")
    written = next(part for part in module.co_consts if isinstance(part, CodeType))
    return device_function(FunctionType(written, names, function.__name__))


class _Unroll(ast.NodeTransformer):
    """Puts numbers for names and computes with them: that is faster than to let numba do it."""

    def __init__(self, integers: dict[str, int]):
        self.integers = integers

    def visit_For(self, node: ast.For) -> ast.For | list[ast.stmt]:
        node.iter = self.visit(node.iter)
        if not (isinstance(node.iter, ast.Call) and ast.unparse(node.iter.func) == "unroll"):
            return self.generic_visit(node)
        written = []
        for i in range(node.iter.args[0].value):
            inside = _Unroll({**self.integers, node.target.id: i})
            written += inside.visit(ast.Module(copy.deepcopy(node.body), [])).body
        return written

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(self.integers[node.id]) if node.id in self.integers else node

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        compute = _ARITHMETIC.get(type(node.op))
        if compute and isinstance(node.left, ast.Constant) and isinstance(node.right, ast.Constant):
            return ast.Constant(compute(node.left.value, node.right.value))
        return node
