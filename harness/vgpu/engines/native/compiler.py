"""A small compiler: Python functions on NumPy numbers to the text of LLVM IR.

It knows the part of Python in which the generated code of basic blocks (codegen.py), the arithmetic of
instructions (numeric.py) and the runtime of this engine (runtime.py) are written, so that each of them is
defined once. A `Value` is a number that is known when the code runs, of one of NumPy's kinds ("u4", "f8", "p"
for a truth value); everything else, ints, strings, dtypes, tuples, is known now and is computed here. Types
are promoted as NumPy does it. A function is compiled once for each combination of the kinds of its arguments
and of what is known of them.

What it does not know raises `Refused`: the launch then goes to the NumPy engine.
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import operator
import textwrap
from collections.abc import Callable
from typing import Any

import numpy as np

from harness.vgpu.memory.access import DTYPE

from .values import KINDS, TYPES, Refused, Slot, Turns, Value, kind_named, kind_of

_PYTHON = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow, ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_, ast.BitXor: operator.xor, ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.In: lambda a, b: a in b,
    ast.Is: operator.is_, ast.IsNot: operator.is_not,
}  # fmt: skip
_INTEGER = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.BitAnd: "and",
    ast.BitOr: "or",
    ast.BitXor: "xor",
}
_FLOAT = {ast.Add: "fadd", ast.Sub: "fsub", ast.Mult: "fmul", ast.Div: "fdiv"}
_COMPARE = {ast.Eq: "eq", ast.NotEq: "ne", ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge"}


class Lambda:
    """A lambda of the source; its body is compiled where it is called."""

    def __init__(self, node: ast.Lambda, frame: Frame):
        self.node, self.frame = node, frame


class Unit:
    """One LLVM module: the functions compiled so far, as text."""

    def __init__(self, intrinsics: dict[Any, Callable]):
        self.intrinsics = intrinsics  # Python function -> what writes its IR: f(frame, *arguments)
        self.functions: list[str] = []
        self.declared: dict[str, str] = {}
        self.compiled: dict[tuple, tuple[str, Any]] = {}  # (function, arguments) -> (name, what it returns)

    def declare(self, returns: str, name: str, arguments: str) -> str:
        """Declare an LLVM intrinsic or a library's function."""
        self.declared[name] = f"declare {returns} @{name}({arguments})"
        return name

    def text(self) -> str:
        """The whole module."""
        weights = '!0 = !{!"branch_weights", i32 1, i32 100000}'
        return "\n".join([*sorted(self.declared.values()), *self.functions, weights]) + "\n"

    def specialise(self, function: Callable, given: tuple) -> tuple[str, Any]:
        """The name of `function`, compiled for these arguments, and the kind, tuple of kinds or None that it
        returns."""
        key = (function, tuple(("value", k) if (k := kind_of(x)) else ("known", _key(x)) for x in given))
        entry = self.compiled.get(key)
        if entry is None:
            name = f"{function.__name__.strip('_')}.{len(self.compiled)}"
            self.compiled[key] = entry = (name, None)  # recursion would see no result
            entry = self.compiled[key] = name, Frame.of_function(self, name, function, given)
        return entry


def _key(x):
    if isinstance(x, (tuple, list)):
        return tuple(_key(y) for y in x)
    return x if isinstance(x, (int, float, str, bool, type(None), type, np.dtype)) else id(x)


@functools.cache
def _source(function: Callable) -> ast.FunctionDef:
    node = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(node, ast.FunctionDef)
    return node


@functools.cache
def _branches(function: Callable) -> bool:
    """Whether a function has branches or loops that numbers decide: then its names are variables."""
    return any(isinstance(node, ast.While) for node in ast.walk(_source(function))) or hasattr(
        function, "variables"
    )


class Frame:
    """One LLVM function while it is written: instructions so far, and what the names of the source stand
    for."""

    def __init__(self, unit: Unit, names: dict[str, Any], known: dict[str, Any], variables: bool = False):
        self.unit, self.names, self.globals = unit, names, known
        self.variables = variables  # whether names that hold numbers are places on the stack
        self.lines: list[str] = []
        self.slots: list[str] = []
        self.count = 0
        self.ended = False  # the block that is being written has its terminator
        self.loops: list[tuple[str, str]] = []
        self.returns: Any = None
        self.result: Any = None

    # -- functions ------------------------------------------------------------------------------------------
    @classmethod
    def of_function(cls, unit: Unit, name: str, function: Callable, given: tuple):
        """Compile a Python function; returns the kinds of its result."""
        node = _source(function)
        names: dict[str, Any] = {}
        defaults = function.__defaults__ or ()
        parameters = [a.arg for a in node.args.args]
        given = (
            (*given, *defaults[len(defaults) - (len(parameters) - len(given)) :])
            if len(given) < len(parameters)
            else given
        )
        frame = cls(unit, names, function.__globals__, _branches(function))
        signature = []
        for parameter, x in zip(parameters, given, strict=True):
            kind = kind_of(x)
            if kind is None:
                names[parameter] = x
            else:
                signature.append(f"{KINDS[kind]} %a.{parameter}")
                names[parameter] = Value(kind, f"%a.{parameter}")
        if frame.variables:
            for parameter, x in list(names.items()):
                if isinstance(x, Value):
                    frame.assign(parameter, x)
        frame.statements(node.body)
        if not frame.ended:
            if frame.returns is not None:
                raise Refused(f"{name} ends without a result")
            frame.emit("ret void")
        returns = frame.returns
        shape = _shape(returns)
        attributes = "noinline cold" if getattr(function, "cold", False) else "alwaysinline"
        if getattr(function, "exported", False):
            head = f"define {shape} @{function.__name__}({', '.join(signature)}) nounwind {{"
        else:
            head = f'define internal {shape} @"{name}"({", ".join(signature)}) {attributes} nounwind {{'
        unit.functions.append("\n".join([head, "entry:", *frame.slots, *frame.lines, "}"]))
        return returns

    def call(self, function: Callable, given: tuple) -> Any:
        """Call a Python function that is compiled for these arguments."""
        name, returns = self.unit.specialise(function, given)
        if getattr(function, "exported", False):
            name = function.__name__
        arguments = ", ".join(self.value(x).typed for x in given if kind_of(x))
        if returns is None:
            self.emit(f'call void @"{name}"({arguments})')
            return None
        result = self.temp(f'call {_shape(returns)} @"{name}"({arguments})')
        if isinstance(returns, str):
            return Value(returns, result)
        return tuple(
            Value(k, self.temp(f"extractvalue {_shape(returns)} {result}, {n}"))
            for n, k in enumerate(returns)
        )

    # -- writing --------------------------------------------------------------------------------------------
    def emit(self, line: str):
        """Append one instruction."""
        if not self.ended:
            self.lines.append("  " + line)

    def temp(self, expression: str) -> str:
        """A new name for the result of an instruction."""
        self.count += 1
        self.emit(f"%t{self.count} = {expression}")
        return f"%t{self.count}"

    def op(self, kind: str, expression: str) -> Value:
        """The result of an instruction as a value of this kind."""
        return Value(kind, self.temp(expression))

    def label(self, name: str = "L") -> str:
        """A new name for a block."""
        self.count += 1
        return f"{name}{self.count}"

    def begin(self, label: str):
        """The instructions that follow belong to this block."""
        if not self.ended:
            self.emit(f"br label %{label}")
        self.ended = False
        self.lines.append(f"{label}:")

    def end(self, line: str):
        """Write the terminator of the block."""
        self.emit(line)
        self.ended = True

    # -- values ---------------------------------------------------------------------------------------------
    def value(self, x, kind: str | None = None) -> Value:
        """Anything as a value; a number without a type of its own gets `kind`."""
        if isinstance(x, Value):
            return x
        own = kind_of(x)
        if own is not None:
            return self.constant(own, x)
        if kind is not None and isinstance(x, (bool, int, float)):
            return self.constant(kind, DTYPE[kind](x))
        raise Refused(f"no value: {x!r}")

    def constant(self, kind: str, x) -> Value:
        """A constant; floats by their bits."""
        if kind == "p":
            return Value("p", "true" if x else "false")
        if kind[0] == "f":
            bits = int(np.asarray(x).view(f"u{kind[1]}"))
            return self.op(kind, f"bitcast i{8 * int(kind[1])} {bits} to {KINDS[kind]}")
        return Value(kind, str(int(x)))

    def view(self, x, kind) -> Value:
        """The same bits as another kind of the same size."""
        kind, x = kind_named(kind), self.value(x)
        if KINDS[kind] == KINDS[x.kind]:
            return Value(kind, x.text)
        if x.size != int(kind[1]):
            raise Refused("a view of another size")
        return self.op(kind, f"bitcast {x.typed} to {KINDS[kind]}")

    def cast(self, x, kind) -> Value:
        """`x.astype(kind)`."""
        kind, x = kind_named(kind), self.value(x)
        frm, to = x.kind, kind
        if frm == to:
            return x
        if to == "p":
            return self.op(
                "p",
                f"{'fcmp une' if frm[0] == 'f' else 'icmp ne'} {x.typed}, {'0.0' if frm[0] == 'f' else 0}",
            )
        if frm[0] == "f" and to[0] == "f":
            return self._float_cast(x, to)
        if frm[0] == "f":
            if frm == "f2":
                x = self.cast(x, "f4")
            return self.op(to, f"fpto{'si' if to[0] == 'i' else 'ui'} {x.typed} to {KINDS[to]}")
        if to[0] == "f":
            sign = "si" if frm[0] == "i" else "ui"
            if to == "f2":
                return self.cast(self.cast(x, "f4"), "f2")
            return self.op(to, f"{sign}tofp {x.typed} to {KINDS[to]}")
        if x.size == int(to[1]) and frm != "p":
            return Value(to, x.text)
        if frm == "p" or x.size < int(to[1]):
            return self.op(to, f"{'sext' if frm[0] == 'i' else 'zext'} {x.typed} to {KINDS[to]}")
        return self.op(to, f"trunc {x.typed} to {KINDS[to]}")

    def _float_cast(self, x: Value, to: str) -> Value:
        if x.kind == "f8" and to == "f2":  # once: rounded to odd on the way, LLVM would call a library
            from harness.vgpu.engines.opcodes import numeric

            return self._float_cast(self.call(numeric._narrow_to_odd, (x,)), "f2")
        if x.kind == "f2" and to == "f8":
            x = self._float_cast(x, "f4")
        wider = int(to[1]) > x.size
        return self.op(to, f"{'fpext' if wider else 'fptrunc'} {x.typed} to {KINDS[to]}")

    def alike(self, *many) -> list[Value]:
        """Operands promoted to one kind, as NumPy promotes them."""
        kinds = [k for x in many if (k := kind_of(x))]
        common: str = kinds[0]
        for kind in kinds[1:]:
            if kind != common:
                common = kind_named(np.promote_types(_np(common), _np(kind)))
        if common == "p" and any(type(x) is int for x in many):
            common = "i8"
        if common[0] != "f" and any(type(x) is float for x in many):
            raise Refused("an integer with a float")
        return [self.cast(x, _np(common)) if kind_of(x) else self.value(x, common) for x in many]

    def binary(self, op: type, x, y) -> Any:
        """`x op y`."""
        if not isinstance(x, Value) and not isinstance(y, Value):
            with np.errstate(all="ignore"):
                return _PYTHON[op](x, y)
        a, b = self.alike(x, y)
        kind = a.kind
        if op in (ast.LShift, ast.RShift):
            return self._shift(op, a, b, y)
        if kind[0] == "f":
            if op not in _FLOAT:
                raise Refused(f"{op.__name__} of floats")
            if kind == "f2":
                wide = (self.cast(a, "f4"), self.cast(b, "f4"))
                return self.cast(self.binary(op, *wide), "f2")
            return self.op(kind, f"{_FLOAT[op]} {a.typed}, {b.text}")
        if op in _INTEGER and (kind != "p" or op in (ast.BitAnd, ast.BitOr, ast.BitXor)):
            return self.op(kind, f"{_INTEGER[op]} {a.typed}, {b.text}")
        if op in (ast.FloorDiv, ast.Mod) and kind[0] == "u":
            return self.op(kind, f"{'udiv' if op is ast.FloorDiv else 'urem'} {a.typed}, {b.text}")
        raise Refused(f"{op.__name__} of {kind}")

    def _shift(self, op: type, a: Value, b: Value, given) -> Value:
        bits = 8 * a.size
        word = "shl" if op is ast.LShift else "ashr" if a.kind[0] == "i" else "lshr"
        if not isinstance(given, Value) and 0 <= int(given) < bits:
            return self.op(a.kind, f"{word} {a.typed}, {b.text}")
        # NumPy: beyond the width 0, or the sign. LLVM gives nothing that can be relied upon.
        small = self.op("p", f"icmp ult {b.typed}, {bits}")
        amount = self.op(
            a.kind, f"select {small.typed}, {b.typed}, {KINDS[a.kind]} {bits - 1 if word == 'ashr' else 0}"
        )
        out = self.op(a.kind, f"{word} {a.typed}, {amount.text}")
        return (
            out
            if word == "ashr"
            else self.op(a.kind, f"select {small.typed}, {out.typed}, {KINDS[a.kind]} 0")
        )

    def compare(self, op: type, x, y) -> Any:
        """`x op y` for a comparison."""
        if not isinstance(x, Value) and not isinstance(y, Value):
            return _PYTHON[op](x, y)
        a, b = self.alike(x, y)
        word = _COMPARE[op]
        if a.kind[0] == "f":
            return self.op("p", f"fcmp {'une' if word == 'ne' else 'o' + word} {a.typed}, {b.text}")
        if word not in ("eq", "ne"):
            word = ("s" if a.kind[0] == "i" else "u") + word
        return self.op("p", f"icmp {word} {a.typed}, {b.text}")

    def select(self, condition, x, y) -> Any:
        """`np.where`."""
        if not isinstance(condition, Value):
            return x if condition else y
        a, b = self.alike(x, y) if kind_of(x) or kind_of(y) else (self.value(x, "i8"), self.value(y, "i8"))
        return self.op(a.kind, f"select {self.cast(condition, bool).typed}, {a.typed}, {b.typed}")

    # -- expressions ----------------------------------------------------------------------------------------
    def expression(self, node) -> Any:
        """What an expression stands for."""
        return getattr(self, "_" + type(node).__name__, self._unknown)(node)

    def _unknown(self, node):
        raise Refused(f"{type(node).__name__} in the source")

    def _Constant(self, node):
        return node.value

    def _Name(self, node):
        name = node.id
        value = self.names.get(name, self)
        if value is self:
            value = self.globals.get(name, self)
        if value is self:
            value = getattr(builtins, name, self)
        if value is self:
            raise Refused(f"the name {name}")
        if isinstance(value, Slot):
            return self.op(value.kind, f"load {KINDS[value.kind]}, ptr {value.place}")
        return value

    def _BinOp(self, node):
        return self.binary(type(node.op), self.expression(node.left), self.expression(node.right))

    def _UnaryOp(self, node):
        x = self.expression(node.operand)
        if not isinstance(x, Value):
            if isinstance(node.op, ast.Not):
                return not x
            return {ast.Invert: operator.invert, ast.USub: operator.neg, ast.UAdd: operator.pos}[
                type(node.op)
            ](x)
        if isinstance(node.op, (ast.Invert, ast.Not)):
            return self.op(x.kind, f"xor {x.typed}, {'true' if x.kind == 'p' else -1}")
        if isinstance(node.op, ast.USub):
            if x.kind[0] == "f":
                return self.op(x.kind, f"fneg {x.typed}")
            return self.op(x.kind, f"sub {KINDS[x.kind]} 0, {x.text}")
        return self._unknown(node)

    def _Compare(self, node):
        if len(node.ops) != 1:
            return self._unknown(node)
        return self.compare(
            type(node.ops[0]), self.expression(node.left), self.expression(node.comparators[0])
        )

    def _BoolOp(self, node):
        """`and` and `or`: what is known now decides first; of numbers both sides are computed."""
        out = None
        for part in node.values:
            x = self.expression(part)
            if not isinstance(x, Value):
                if bool(x) == isinstance(node.op, ast.Or):
                    return x
                continue
            out = (
                x
                if out is None
                else self.binary(ast.BitAnd if isinstance(node.op, ast.And) else ast.BitOr, out, x)
            )
        return isinstance(node.op, ast.And) if out is None else out

    def _IfExp(self, node):
        test = self.expression(node.test)
        if isinstance(test, Value):
            return self.select(test, self.expression(node.body), self.expression(node.orelse))
        return self.expression(node.body if test else node.orelse)

    def _Tuple(self, node):
        return tuple(self.expression(x) for x in node.elts)

    _List = _Tuple

    def _Dict(self, node):
        return {self.expression(k): self.expression(v) for k, v in zip(node.keys, node.values, strict=True)}

    def _Lambda(self, node):
        return Lambda(node, self)

    def _Attribute(self, node):
        x = self.expression(node.value)
        if isinstance(x, Value):
            if node.attr == "dtype":
                return np.dtype(_np(x.kind))
            if node.attr == "ndim":
                return 0
            return functools.partial(self._method, x, node.attr)
        if isinstance(x, np.generic) and node.attr in ("astype", "view"):
            return functools.partial(self._method, x, node.attr)
        return getattr(x, node.attr)

    def _method(self, x, name: str, *arguments):
        if name == "astype" and len(arguments) == 1:
            return self.cast(x, arguments[0])
        if name == "view" and len(arguments) == 1:
            return self.view(x, arguments[0])
        raise Refused(f"the method {name}")

    def _Subscript(self, node):
        return self.expression(node.value)[self.expression(node.slice)]

    def _Call(self, node):
        function = self.expression(node.func)
        arguments: list[Any] = []
        for a in node.args:
            if isinstance(a, ast.Starred):
                arguments += self.expression(a.value)
            else:
                arguments.append(self.expression(a))
        if node.keywords:
            return self._unknown(node)
        return self.apply(function, tuple(arguments))

    def apply(self, function, arguments: tuple) -> Any:
        """Call something: a lambda, an intrinsic, a NumPy type, a method, or a Python function."""
        if isinstance(function, Lambda):
            names = dict(zip((a.arg for a in function.node.args.args), arguments, strict=True))
            saved = {k: self.names.get(k) for k in names}
            self.names.update(names)
            out = self.expression(function.node.body)
            self.names.update(saved)
            return out
        try:
            write = self.unit.intrinsics.get(function)
        except TypeError:
            write = None
        if write is not None:
            return write(self, *arguments)
        dynamic = any(isinstance(x, Value) for x in arguments)
        if isinstance(function, type) and function in TYPES:
            if dynamic:
                return self.cast(arguments[0], function)
            with np.errstate(all="ignore"):
                return function(*arguments)
        if isinstance(function, functools.partial) or inspect.ismethod(function):
            return function(*arguments)
        if inspect.isfunction(function) and any(kind_of(x) for x in arguments):
            return self.call(function, arguments)
        if dynamic:
            raise Refused(f"a call of {getattr(function, '__name__', function)}")
        return function(*arguments)

    # -- statements -----------------------------------------------------------------------------------------
    def statements(self, nodes):
        """Compile statements in order."""
        for node in nodes:
            if self.ended:
                return
            getattr(self, "_" + type(node).__name__, self._unknown)(node)

    def assign(self, name: str, x):
        """Give a name what it stands for from now on."""
        kind = kind_of(x)
        old = self.names.get(name)
        if self.variables and kind is not None:
            if not isinstance(old, Slot):
                old = self.names[name] = Slot(kind, f"%{name}.{self.label('v')}")
                self.slots.append(f"  {old.place} = alloca {KINDS[kind]}")
            self.emit(f"store {self.cast(x, _np(old.kind)).typed}, ptr {old.place}")
        elif isinstance(old, Slot):
            self.emit(f"store {self.value(x, old.kind).typed}, ptr {old.place}")
        else:
            self.names[name] = x

    def _Assign(self, node):
        x = self.expression(node.value)
        for target in node.targets:
            self._assign_to(target, x)

    def _assign_to(self, target, x):
        if isinstance(target, ast.Tuple):
            for part, value in zip(target.elts, x, strict=True):
                self._assign_to(part, value)
        elif isinstance(target, ast.Name):
            self.assign(target.id, x)
        else:
            self._unknown(target)

    def _AugAssign(self, node):
        old = self.expression(node.target)
        self._assign_to(node.target, self.binary(type(node.op), old, self.expression(node.value)))

    def _Expr(self, node):
        if not isinstance(node.value, ast.Constant):
            self.expression(node.value)

    def _Pass(self, node):
        pass

    def _Return(self, node):
        x = self.expression(node.value) if node.value is not None else None
        if x is None:
            self.end("ret void")
            return
        if isinstance(x, tuple):
            values = [self.value(v) for v in x]
            kinds: Any = tuple(v.kind for v in values)
            whole = "undef"
            for n, v in enumerate(values):
                whole = self.temp(f"insertvalue {_shape(kinds)} {whole}, {v.typed}, {n}")
        else:
            v = self.value(x)
            kinds, whole = v.kind, v.text
        if self.returns not in (None, kinds):
            raise Refused(f"results of several kinds: {self.returns}, {kinds}")
        self.returns = kinds
        self.end(f"ret {_shape(kinds)} {whole}")

    def _If(self, node):
        test = self.expression(node.test)
        if not isinstance(test, Value):
            self.statements(node.body if test else node.orelse)
            return
        yes, no, after = self.label("yes"), self.label("no"), self.label("after")
        self.branch(test, yes, no if node.orelse else after, _is_unlikely(node.test))
        self.begin(yes)
        self.statements(node.body)
        joins = not self.ended or not node.orelse
        if not self.ended:
            self.end(f"br label %{after}")
        if node.orelse:
            self.begin(no)
            self.statements(node.orelse)
            joins = joins or not self.ended
        if joins:
            self.begin(after)

    def branch(self, test: Value, yes: str, no: str, unlikely: bool = False):
        """End the block with a conditional branch."""
        self.end(
            f"br {self.cast(test, bool).typed}, label %{yes}, label %{no}"
            + (", !prof !0" if unlikely else "")
        )

    def _While(self, node):
        head, body, after = self.label("head"), self.label("body"), self.label("done")
        self.begin(head)
        test = self.expression(node.test)
        if isinstance(test, Value):
            self.branch(test, body, after)
            self.begin(body)
        self.loops.append((head, after))
        self.statements(node.body)
        self.loops.pop()
        if not self.ended:
            self.end(f"br label %{head}")
        self.begin(after)

    def _Break(self, node):
        self.end(f"br label %{self.loops[-1][1]}")

    def _Continue(self, node):
        self.end(f"br label %{self.loops[-1][0]}")

    def _For(self, node):
        turns = self.expression(node.iter)
        if isinstance(turns, Turns):
            self._count(node, turns)
            return
        for x in turns:
            self._assign_to(node.target, x)
            self.statements(node.body)

    def _count(self, node, turns: Turns):
        """A loop over numbers that are known when the code runs."""
        head, body, inside, following, after = map(self.label, ("head", "body", "inside", "next", "done"))
        counter = Slot("u8", f"%{self.label('counter')}")
        self.slots.append(f"  {counter.place} = alloca i64")
        self.emit(f"store i64 0, ptr {counter.place}")
        self.begin(head)
        k = self.op("u8", f"load i64, ptr {counter.place}")
        self.branch(self.compare(ast.Lt, k, turns.count), body, after)
        self.begin(body)
        if turns.mask is not None:
            bit = self.binary(ast.BitAnd, self.binary(ast.RShift, turns.mask, k), np.uint64(1))
            self.branch(bit, inside, following)
            self.begin(inside)
        self._assign_to(node.target, k)
        self.loops.append((following, after))
        self.statements(node.body)
        self.loops.pop()
        self.begin(following)
        self.emit(f"store i64 {self.binary(ast.Add, k, np.uint64(1)).text}, ptr {counter.place}")
        self.end(f"br label %{head}")
        self.begin(after)


def _is_unlikely(node) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "unlikely"


def _np(kind: str):
    return DTYPE[kind]


def _shape(kinds) -> str:
    if kinds is None:
        return "void"
    return KINDS[kinds] if isinstance(kinds, str) else "{ " + ", ".join(KINDS[k] for k in kinds) + " }"
