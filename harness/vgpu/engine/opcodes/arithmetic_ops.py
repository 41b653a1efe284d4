"""Emitters of arithmetic, comparison and conversion instructions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from harness.vgpu.errors import UnsupportedInstruction
from harness.vgpu.memory.access import LOCAL_WINDOW, NUMPY_KINDS, PARAM_WINDOW, SHARED_WINDOW
from harness.vgpu.ptx.parser import WIDTH, Imm, Instr, Pair, Reg, Vec

from .codegen import Writer
from .emitters import STATE_SPACES, check_modifiers, get_type, opcode
from .numeric import INFINITY


def _define_float(w: Writer, i: Instr, t: str, expr: str, n: int = 1):
    """Write a float result to the destination after applying .sat and .ftz, and count `n` flops."""
    if "sat" in i.mods:
        expr = f"nm.saturate({expr})"
    if "ftz" in i.mods and t == "f32":
        expr = f"nm.flush({expr})"
    w.flops += n
    w.define(i.args[0], NUMPY_KINDS[t], expr, float_result=True)


def _use_operand(w: Writer, i: Instr, a, t: str) -> str:
    e = w.use(a, NUMPY_KINDS[t])
    return f"nm.flush({e})" if "ftz" in i.mods and t == "f32" else e


def _apply_to_halves(w: Writer, args, f: Callable[..., str]) -> str:
    """Apply `f`, which maps bits to bits, to both halves of 32-bit operands."""
    half = []
    for shift in (0, 16):
        bits = (f"({w.use(a, 'u4')} >> {w.code.bind_constant('u4', shift)}).astype(u2)" for a in args)
        half.append(w.temp(f"({f(*bits)}).astype(u4)"))
    return f"{half[0]} | ({half[1]} << {w.code.bind_constant('u4', 16)})"


def _apply_to_packed(w: Writer, t: str, args, f: Callable[..., str]) -> str:
    """Apply `f` to both halves of f16x2 or bf16x2 operands, as float16 or float32 expressions."""

    def on_bits(*bits: str) -> str:
        if t == "f16x2":
            return f"nm.canonicalize_nan({f(*(f'{b}.view(f2)' for b in bits))}).view(u2)"
        return f"nm.f32_to_bf16({f(*(f'nm.bf16_to_f32({b})' for b in bits))})"

    return _apply_to_halves(w, args, on_bits)


def _emit_binary(w: Writer, i: Instr, t: str, f: Callable[[str, str], str]):
    """Emit a binary operation for any floating-point or integer type."""
    d, a, b = i.args
    _reject_16_bit_modifiers(i, t)
    if t in ("f16x2", "bf16x2"):
        w.flops += 2
        w.define(d, "u4", _apply_to_packed(w, t, (a, b), f))
    elif t == "bf16":
        w.flops += 1
        expr = f(f"nm.bf16_to_f32({w.use(a, 'u2')})", f"nm.bf16_to_f32({w.use(b, 'u2')})")
        w.define(d, "u2", f"nm.f32_to_bf16({expr})")
    elif t[0] == "f":
        _define_float(w, i, t, f(_use_operand(w, i, a, t), _use_operand(w, i, b, t)))
    else:
        w.define(d, NUMPY_KINDS[t], f(w.use(a, NUMPY_KINDS[t]), w.use(b, NUMPY_KINDS[t])))


def _reject_16_bit_modifiers(i: Instr, t: str):
    if t in ("f16", "bf16", "f16x2", "bf16x2") and ("ftz" in i.mods or "sat" in i.mods):
        raise UnsupportedInstruction(i, f"modifiers .ftz and .sat of {t}")


def _require_round_to_nearest(i: Instr):
    for m in ("rz", "rm", "rp"):
        if m in i.mods:
            raise UnsupportedInstruction(i, f"only rounding to nearest even, not .{m}")


# -- arithmetic ---------------------------------------------------------------------------------------------
@opcode(
    "add sub", forms="integers (wrapping, .sat for s32), f16, bf16, f16x2, bf16x2, f32, f64, .rn, .ftz, .sat"
)
def add(w: Writer, i: Instr):
    check_modifiers(i, "rn", "rz", "rm", "rp", "ftz", "sat", "cc")
    if "cc" in i.mods:
        raise UnsupportedInstruction(i, "the carry flag")
    _require_round_to_nearest(i)
    t = get_type(i)
    sign = "+" if i.op == "add" else "-"
    if t[0] in "su" and "sat" in i.mods:
        if t != "s32":
            raise UnsupportedInstruction(i, "saturation of this type")
        a, b = (w.use(x, NUMPY_KINDS[t]) for x in i.args[1:])
        wide = f"{a}.astype(i8) {sign} {b}.astype(i8)"
        w.define(i.args[0], "i4", f"np.clip({wide}, -2147483648, 2147483647).astype(i4)")
        return
    if t[0] in "su":  # same bits for signed and unsigned, but NumPy scalars warn of signed overflow
        t = "b" + t[1:]
    _emit_binary(w, i, t, lambda a, b: f"{a} {sign} {b}")


@opcode("mul", forms=".lo, .hi, .wide for integers; f16, bf16, f16x2, bf16x2, f32, f64, .rn, .ftz, .sat")
def mul(w: Writer, i: Instr):
    check_modifiers(i, "lo", "hi", "wide", "rn", "rz", "rm", "rp", "ftz", "sat")
    _require_round_to_nearest(i)
    t = get_type(i)
    if t[0] in "sub" and t[:2] != "bf":
        w.define(i.args[0], *_emit_integer_product(w, i, t, i.args[1], i.args[2]))
    else:
        _emit_binary(w, i, t, lambda a, b: f"{a} * {b}")


def _emit_integer_product(w: Writer, i: Instr, t: str, a, b) -> tuple[str, str]:
    if "sat" in i.mods:
        raise UnsupportedInstruction(i, "saturation of integers")
    k = NUMPY_KINDS[t]
    x, y = w.use(a, k), w.use(b, k)
    if "wide" in i.mods:
        wide = k[0] + str(int(k[1]) * 2)
        return wide, f"{x}.astype({wide}) * {y}.astype({wide})"
    if "hi" in i.mods:
        return k, f"nm.mulhi({x}, {y})"
    return k, f"{x} * {y}"


@opcode("mad", forms=".lo, .hi, .wide for integers; f32 and f64 as fma")
def mad(w: Writer, i: Instr):
    check_modifiers(i, "lo", "hi", "wide", "rn", "rz", "rm", "rp", "ftz", "sat")
    t = get_type(i)
    if t[0] == "f":
        fma(w, i)
        return
    kind, product = _emit_integer_product(w, i, t, i.args[1], i.args[2])
    w.define(i.args[0], kind, f"{product} + {w.use(i.args[3], kind)}")


@opcode("mul24 mad24", forms=".lo: product of the low 24 bits of 32-bit integers")
def mul24(w: Writer, i: Instr):
    check_modifiers(i, "lo")
    k = NUMPY_KINDS[get_type(i)]
    eight = w.code.bind_constant(k, 8)
    x, y = (f"(({w.use(a, k)} << {eight}) >> {eight})" for a in i.args[1:3])
    tail = f" + {w.use(i.args[3], k)}" if i.op == "mad24" else ""
    w.define(i.args[0], k, f"{x} * {y}{tail}")


@opcode("fma", forms="f16, bf16, f16x2, bf16x2, f32, f64 rounded once to nearest; .ftz, .sat, .relu")
def fma(w: Writer, i: Instr):
    check_modifiers(i, "rn", "rz", "rm", "rp", "ftz", "sat", "relu")
    _require_round_to_nearest(i)
    t = get_type(i)
    _reject_16_bit_modifiers(i, t)
    d, a, b, c = i.args
    count = 2 if t in ("f16x2", "bf16x2") else 1
    w.multiply_adds += count
    if t in ("f32", "f64"):
        operands = ", ".join(_use_operand(w, i, x, t) for x in (a, b, c))
        _define_float(w, i, t, f"nm.fma_{t}({operands})", 2)
        return
    w.flops += 2 * count

    def on_bits(*parts: str) -> str:
        return _apply_relu(i, t, _emit_16_bit_fma(t, parts) + ".view(u2)")

    if count == 2:
        w.define(d, "u4", _apply_to_halves(w, (a, b, c), on_bits))
    else:
        w.define(d, "u2", on_bits(*(w.use(x, "u2") for x in (a, b, c))))


def _emit_16_bit_fma(t: str, parts: Sequence[str]) -> str:
    if t[:3] == "f16":
        return f"nm.canonicalize_nan(nm.fma_f16({', '.join(p + '.view(f2)' for p in parts)}))"
    return f"nm.fma_bf16({', '.join(parts)})"


def _apply_relu(i: Instr, t: str, bits: str) -> str:
    return f"nm.relu_bits({bits}, {INFINITY[t.removesuffix('x2')]})" if "relu" in i.mods else bits


@opcode("div", forms="integers (toward zero); f32 and f64 .rn, .full, .approx, .ftz")
def div(w: Writer, i: Instr):
    check_modifiers(i, "rn", "rz", "rm", "rp", "full", "approx", "ftz")
    _require_round_to_nearest(i)
    t = get_type(i)
    template = (
        "nm.idiv({}, {})" if t[0] in "su" else "nm.div_approx({}, {})" if "approx" in i.mods else "{} / {}"
    )
    _emit_binary(w, i, t, template.format)


@opcode("rem", forms="integers, sign of the dividend")
def rem(w: Writer, i: Instr):
    check_modifiers(i)
    _emit_binary(w, i, get_type(i), lambda a, b: f"nm.irem({a}, {b})")


@opcode("min max", forms="integers; f16, bf16, x2, f32, f64, .ftz, .NaN; -0 below +0")
def min_or_max(w: Writer, i: Instr):
    check_modifiers(i, "ftz", "NaN", "relu")
    if "relu" in i.mods:
        raise UnsupportedInstruction(i, "modifier .relu")
    t = get_type(i)
    if t[0] in "su":
        _emit_binary(w, i, t, lambda a, b: f"np.{i.op}imum({a}, {b})")
    elif "NaN" in i.mods:
        _emit_binary(w, i, t, lambda a, b: f"nm.propagate_nan({a}, {b}, nm.f{i.op}({a}, {b}))")
    else:
        _emit_binary(w, i, t, lambda a, b: f"nm.f{i.op}({a}, {b})")


@opcode("abs neg", forms="signed integers; f16, bf16, x2, f32, f64, .ftz")
def abs_or_neg(w: Writer, i: Instr):
    check_modifiers(i, "ftz")
    t = get_type(i)
    d, a = i.args
    if t[0] == "s":
        k = NUMPY_KINDS[t]
        e = w.use(a, k)
        w.define(d, k, f"np.abs({e})" if i.op == "abs" else f"np.negative({e})")
        return
    w.flops += 1
    if t == "f64":
        w.define(d, "f8", f"nm.abs_or_neg_f64({w.use(a, 'f8')}, {i.op!r})")
    elif t in ("f16x2", "bf16x2"):
        template = f"nm.abs_or_neg_bits({{}}, {i.op!r}, {INFINITY[t[:-2]]})"
        w.define(d, "u4", _apply_to_halves(w, (a,), template.format))
    else:
        k = f"u{WIDTH[t]}"
        bits = f"nm.abs_or_neg_bits({w.use(a, k)}, {i.op!r}, {INFINITY[t]})"
        if "ftz" in i.mods and t == "f32":
            w.define(d, "f4", f"nm.flush({bits}.view(f4))")
        else:
            w.define(d, k, bits)


@opcode(
    "rcp sqrt rsqrt sin cos ex2 lg2 tanh",
    forms=".rn, .approx, .ftz for f32 and f64 (ex2 and tanh also f16, bf16 and x2); approximations are "
    "computed accurately",
)
def unary_float(w: Writer, i: Instr):
    check_modifiers(i, "rn", "rz", "rm", "rp", "approx", "ftz", "full")
    _require_round_to_nearest(i)
    t = get_type(i)
    names = {"rsqrt": "nm.rsqrt", "ex2": "np.exp2", "lg2": "np.log2"}
    f = "(1.0 / {})" if i.op == "rcp" else f"{names.get(i.op, f'np.{i.op}')}({{}})"
    d, a = i.args
    if t in ("f16x2", "bf16x2"):
        target_type = "f2" if t == "f16x2" else "f4"
        w.flops += 2
        w.define(
            d,
            "u4",
            _apply_to_packed(w, t, (a,), lambda x: f.format(f"{x}.astype(f8)") + f".astype({target_type})"),
        )
    elif t == "bf16":
        x = f"nm.bf16_to_f32({w.use(a, 'u2')}).astype(f8)"
        w.flops += 1
        w.define(d, "u2", f"nm.f64_to_bf16({f.format(x)})")
    elif t == "f64":
        gross = i.op == "rcp" and "approx" in i.mods
        _define_float(w, i, t, ("nm.rcp_approx_f64({})" if gross else f).format(w.use(a, "f8")))
    else:
        x = w.temp(f"{_use_operand(w, i, a, t)}.astype(f8)")
        _define_float(w, i, t, f"{f.format(x)}.astype({NUMPY_KINDS[t]})")


# -- single expressions --------------------------------------------------------------------------------------
class _Operand:
    """An operand of `_EXPRESSIONS`: `{1}` has the kind of its row, `{1:u4}` kind u4; `{1:int}` is an int."""

    def __init__(self, w: Writer, a, kind: str):
        self.w, self.a, self.kind = w, a, kind

    def __format__(self, kind: str) -> str:
        return str(int(self.a.value)) if kind == "int" else self.w.use(self.a, kind or self.kind)


_LOGIC = "pred, b16, b32, b64"
_COUNT = "32 and 64 bits; bfind also .shiftamt and signed"
#: Opcode -> modifiers, kind of the operands, kind of the result, expression, forms in OPCODES.md. T is the kind
#: of the instruction's type, U the unsigned kind of the same size.
_EXPRESSIONS = {
    "copysign": ((), "T", "T", "np.copysign({2}, {1})", "f32, f64: sign of the first operand, magnitude of the second"),
    "and": ((), "T", "T", "{1} & {2}", _LOGIC),
    "or": ((), "T", "T", "{1} | {2}", _LOGIC),
    "xor": ((), "T", "T", "{1} ^ {2}", _LOGIC),
    "not": ((), "T", "T", "~({1})", f"{_LOGIC}; cnot: 1 where the operand is 0"),
    "cnot": ((), "T", "T", "({1} == 0).astype({T})", f"{_LOGIC}; cnot: 1 where the operand is 0"),
    "shf": (("l", "r", "wrap", "clamp"), "u4", "u4", "nm.funnel_shift({1}, {2}, {3}, {l}, {wrap})",
            ".l and .r, .wrap and .clamp, b32"),
    "popc": (("shiftamt",), "T", "u4", "nm.popc({1})", _COUNT),
    "clz": (("shiftamt",), "T", "u4", "nm.clz({1})", _COUNT),
    "brev": (("shiftamt",), "T", "T", "nm.brev({1})", _COUNT),
    "bfind": (("shiftamt",), "T", "u4", "nm.bfind({1}, {shiftamt})", _COUNT),
    "bfe": ((), "T", "U", "nm.bfe({1}, {2:u4}, {3:u4})", "32 and 64 bits, signed and unsigned"),
    "bfi": ((), "T", "T", "nm.bfi({1}, {2}, {3:u4}, {4:u4})", "b32 and b64"),
    "lop3": (("lut",), "u4", "u4", "nm.lop3({1}, {2}, {3}, {4:int})", "b32 with an immediate table"),
    "sad": ((), "T", "T", "where({1} < {2}, {2} - {1}, {1} - {2}) + {3}",
            "sum of absolute differences, 16, 32 and 64 bits"),
    "selp": ((), "U", "U", "where({3:p}, {1}, {2})", "16, 32 and 64 bits"),
}  # fmt: skip


def _create_expression_emitter(modifiers: tuple[str, ...], operands: str, result: str, expression: str):
    """Create the emitter of an instruction that is a single expression."""

    def emitter(w: Writer, i: Instr):
        check_modifiers(i, *modifiers)
        t = get_type(i)
        kinds = {"T": NUMPY_KINDS[t], "U": f"u{WIDTH[t]}"}
        arguments = [_Operand(w, a, kinds.get(operands, operands)) for a in i.args]
        text = {m: m in i.mods for m in modifiers}
        w.define(i.args[0], kinds.get(result, result), expression.format(*arguments, **text, **kinds))

    return emitter


for _name, _row in _EXPRESSIONS.items():
    *_template, _forms = _row
    opcode(_name, forms=_forms)(_create_expression_emitter(*_template))


# -- logic and bits -----------------------------------------------------------------------------------------
@opcode(
    "shl shr", forms="16, 32 and 64 bits, amounts clamped to the width, shr of signed types keeps the sign"
)
def shift(w: Writer, i: Instr):
    check_modifiers(i)
    k = NUMPY_KINDS[get_type(i)]
    d, a, s = i.args
    e = w.use(a, k)
    if isinstance(s, Imm) and 0 <= s.value < 8 * int(k[1]):
        w.define(d, k, f"{e} {'<<' if i.op == 'shl' else '>>'} {w.code.bind_constant(k, s.value)}")
    else:
        w.define(d, k, f"nm.{i.op}({e}, {w.use(s, 'u4')})")


@opcode("prmt", forms="b32: the default mode and f4e, b4e, rc8, ecl, ecr, rc16")
def prmt(w: Writer, i: Instr):
    modes = ("f4e", "b4e", "rc8", "ecl", "ecr", "rc16")
    check_modifiers(i, *modes)
    mode = next((m for m in i.mods if m in modes), "")
    a, b, c = (w.use(x, "u4") for x in i.args[1:4])
    w.define(i.args[0], "u4", f"nm.prmt({a}, {b}, {c}, {mode!r})")


@opcode("dp4a", forms="four-byte dot product, signed and unsigned")
def dp4a(w: Writer, i: Instr):
    types = [m for m in i.mods if m in ("s32", "u32")]
    check_modifiers(i)
    a, b = (w.use(x, "u4") for x in i.args[1:3])
    c = w.use(i.args[3], NUMPY_KINDS["s32" if "s32" in types else "u32"])
    w.define(i.args[0], "i4", f"nm.dot_bytes({a}, {b}, {c}, {types[0] == 's32'}, {types[-1] == 's32'})")


# -- comparison and selection -------------------------------------------------------------------------------
_COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_COMPARE |= {"lo": "<", "ls": "<=", "hi": ">", "hs": ">="}


def _emit_comparison(w: Writer, i: Instr, t: str, cmp: str, a, b) -> str:
    if t in ("f16x2", "bf16x2"):
        raise UnsupportedInstruction(i, "comparison of packed values")
    _reject_16_bit_modifiers(i, t)
    if t == "pred":
        return f"{w.use(a, 'p')} {_COMPARE[cmp]} {w.use(b, 'p')}"
    if t == "bf16":
        x, y = (f"nm.bf16_to_f32({w.use(v, 'u2')})" for v in (a, b))
    else:
        x, y = _use_operand(w, i, a, t), _use_operand(w, i, b, t)
    if t[0] == "f" or t == "bf16":
        if cmp == "num":
            return f"({x} == {x}) & ({y} == {y})"
        if cmp == "nan":
            return f"({x} != {x}) | ({y} != {y})"
        if cmp == "ne":
            return f"({x} < {y}) | ({x} > {y})"
        if cmp == "equ":
            return f"~(({x} < {y}) | ({x} > {y}))"
        if cmp == "neu":
            return f"{x} != {y}"
        if cmp.endswith("u"):
            opposite = {"ltu": ">=", "leu": ">", "gtu": "<=", "geu": "<"}[cmp]
            return f"~({x} {opposite} {y})"
    if cmp not in _COMPARE:
        raise UnsupportedInstruction(i, f"comparison .{cmp}")
    return f"{x} {_COMPARE[cmp]} {y}"


@opcode(
    "setp set",
    forms="all comparisons (ordered, unordered, num, nan) of integers, f16, bf16, f32, f64; combined with "
    ".and .or .xor",
)
def setp(w: Writer, i: Instr):
    cmp = i.mods[0]
    combine = next((m for m in i.mods[1:] if m in ("and", "or", "xor")), None)
    check_modifiers(i, cmp, "and", "or", "xor", "ftz")
    t = get_type(i)
    d, a, b = i.args[:3]
    test = w.temp(_emit_comparison(w, i, t, cmp, a, b))
    sign = {"and": "&", "or": "|", "xor": "^", None: ""}[combine]
    extra = w.use(i.args[3], "p") if combine else ""
    result = f"{test} {sign} {extra}" if combine else test
    if i.op == "set":
        kind = next(m for m in i.mods if m in WIDTH)
        if kind not in ("u32", "s32", "b32", "f32"):
            raise UnsupportedInstruction(i, f"a result of type .{kind}")
        k = "f4" if kind == "f32" else "i4"
        w.define(d, k, f"{'' if kind == 'f32' else '-'}(({result}).astype({k}))")
    elif isinstance(d, Pair):
        w.define(d.first, "p", result, fresh=bool(combine))
        w.define(d.second, "p", f"~{test} {sign} {extra}" if combine else f"~{test}")
    else:
        w.define(d, "p", result)


@opcode("slct", forms="a where c >= 0, else b; c is s32 or f32")
def slct(w: Writer, i: Instr):
    check_modifiers(i, "ftz")
    types = [m for m in i.mods if m in WIDTH]
    k = f"u{WIDTH[types[0]]}"
    c = w.use(i.args[3], NUMPY_KINDS[types[1]])
    w.define(i.args[0], k, f"where({c} >= 0, {w.use(i.args[1], k)}, {w.use(i.args[2], k)})")


@opcode("testp", forms="finite, infinite, number, notanumber, normal, subnormal; f32 and f64")
def testp(w: Writer, i: Instr):
    test = i.mods[0]
    k = NUMPY_KINDS[get_type(i)]
    x = w.use(i.args[1], k)
    tiny = f"np.abs({x}) < np.finfo({k}).tiny"
    tests = {
        "finite": f"np.isfinite({x})",
        "infinite": f"np.isinf({x})",
        "number": f"{x} == {x}",
        "notanumber": f"{x} != {x}",
        "normal": f"np.isfinite({x}) & ~({tiny})",
        "subnormal": f"({tiny}) & ({x} != 0)",
    }
    if test not in tests:
        raise UnsupportedInstruction(i, f"test .{test}")
    w.define(i.args[0], "p", tests[test])


# -- moves and conversions ----------------------------------------------------------------------------------
@opcode("mov", forms="all types; addresses of variables; packing and unpacking of 2, 4 and 8 parts")
def mov(w: Writer, i: Instr):
    check_modifiers(i)
    t = get_type(i)
    d, a = i.args
    if isinstance(a, Vec):
        k = f"u{WIDTH[t]}"
        step = WIDTH[t] // len(a.items)
        first, *others = (f"{w.use(x, f'u{step}')}.astype({k})" for x in a.items)
        shifted = (f"({p} << {w.code.bind_constant(k, 8 * step * n)})" for n, p in enumerate(others, 1))
        w.define(d, k, " | ".join([first, *shifted]))
    elif isinstance(d, Vec):
        k = f"u{WIDTH[t]}"
        source = w.temp(w.use(a, k))
        step = WIDTH[t] // len(d.items)
        for n, x in enumerate(d.items):
            if isinstance(x, Reg) and x.name == "_":
                continue
            part = f"({source} >> {w.code.bind_constant(k, 8 * step * n)})" if n else source
            w.define(x, f"u{step}", f"{part}.astype(u{step})")
    elif isinstance(a, Reg) and (a.name.startswith("sp_clock") or "globaltimer" in a.name):
        k = f"u{w.get_width(d.name)}"
        w.define(d, k, f"{k}(m.get_clock())")
    else:
        k = NUMPY_KINDS[t] if t == "pred" else f"u{WIDTH[t]}"
        w.define(d, k, w.use(a, k), fresh=False)


@opcode(
    "cvta",
    forms=".to from generic addresses, and without .to to generic ones: global, shared, local, param and "
    "const",
)
def cvta(w: Writer, i: Instr):
    window = 0
    for m in i.mods:
        if m.startswith("shared"):
            window = SHARED_WINDOW
        elif m == "local":
            window = LOCAL_WINDOW
        elif m.startswith("param"):
            window = PARAM_WINDOW
    check_modifiers(i, "to", *STATE_SPACES)
    e = w.use(i.args[1], "u8")
    if window:
        sign = "-" if "to" in i.mods else "+"
        w.define(i.args[0], "u8", f"{e} {sign} {w.code.bind_constant('u8', window)}")
    else:
        w.define(i.args[0], "u8", e, fresh=False)


@opcode("isspacep", forms="global, shared, local, const, param")
def isspacep(w: Writer, i: Instr):
    space = i.mods[0].split("::")[0]
    e = w.use(i.args[1], "u8")
    if space in ("global", "const"):
        w.define(i.args[0], "p", f"{e} < {w.code.bind_constant('u8', SHARED_WINDOW)}")
    else:
        low = {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW, "param": PARAM_WINDOW}[space]
        w.define(i.args[0], "p", f"({e} >> u8({low.bit_length() - 1})) == u8(1)")


_ROUND = ("rn", "rz", "rm", "rp", "rna", "rni", "rzi", "rmi", "rpi")


@opcode(
    "cvt",
    forms="between all integer widths, f16, bf16, f32, f64, tf32 and packed f16x2 / bf16x2; all roundings, "
    ".sat, .ftz, .relu",
)
def cvt(w: Writer, i: Instr):
    check_modifiers(i, *_ROUND, "sat", "ftz", "relu", "satfinite")
    types = [m for m in i.mods if m in WIDTH]
    if len(types) != 2 or ("satfinite" in i.mods and "tf32" not in types):
        raise UnsupportedInstruction(i)
    target_type, source_type = types
    mode = next((m for m in i.mods if m in _ROUND), None)
    if target_type in ("f16x2", "bf16x2"):
        high, low = (
            _emit_round_to_16_bits(w, i, target_type[:-2], w.use(a, "f4"), mode) for a in i.args[1:3]
        )
        high, low = w.temp(f"{high}.astype(u4)"), w.temp(f"{low}.astype(u4)")
        w.define(i.args[0], "u4", f"({high} << {w.code.bind_constant('u4', 16)}) | {low}")
        return
    d, a = i.args
    if target_type == "tf32":
        options = f"{mode or 'rn'!r}, {'relu' in i.mods}, {'satfinite' in i.mods}"
        w.define(d, "u4", f"nm.to_tf32({w.use(a, 'u4')}, {options})")
        return
    source_float = source_type[0] == "f" or source_type == "bf16"
    target_float = target_type[0] == "f" or target_type == "bf16"
    x = f"nm.bf16_to_f32({w.use(a, 'u2')})" if source_type == "bf16" else w.use(a, NUMPY_KINDS[source_type])
    if "ftz" in i.mods and source_type == "f32":
        x = f"nm.flush({x})"
    if source_float and target_float:
        _emit_float_to_float(w, i, target_type, source_type, x, mode)
    elif source_float:
        x = f"nm.round_int({x}, {mode or 'rzi'!r})"
        w.define(d, NUMPY_KINDS[target_type], f"nm.to_int({x}, {NUMPY_KINDS[target_type]})")
    elif target_float:
        if target_type == "bf16":
            if mode not in (None, "rn"):
                raise UnsupportedInstruction(i)
            w.define(d, "u2", f"nm.int_to_bf16({x})")
        elif mode in (None, "rn") and target_type != "f16":
            w.define(d, NUMPY_KINDS[target_type], f"{x}.astype({NUMPY_KINDS[target_type]})")
        else:
            w.define(
                d,
                NUMPY_KINDS[target_type],
                f"nm.int_to_float({x}, {NUMPY_KINDS[target_type]}, {mode or 'rn'!r})",
            )
    else:
        _emit_int_to_int(w, i, target_type, source_type, x)


def _emit_round_to_16_bits(w: Writer, i: Instr, target_type: str, x: str, mode: str | None) -> str:
    if target_type == "f16":
        out = f"nm.canonicalize_nan(nm.narrow({x}, f2, {mode or 'rn'!r})).view(u2)"
    elif mode not in (None, "rn", "rz"):
        raise UnsupportedInstruction(i, f"rounding .{mode} to bf16")
    else:
        out = f"nm.f32_to_bf16_rz({x})" if mode == "rz" else f"nm.f32_to_bf16({x})"
    return _apply_relu(i, target_type, out)


def _emit_float_to_float(w: Writer, i: Instr, target_type: str, source_type: str, x: str, mode: str | None):
    d = i.args[0]
    if mode in ("rni", "rzi", "rmi", "rpi"):
        x = f"nm.round_int({x}, {mode!r})"
    if target_type == "bf16":
        if source_type == "f64":
            if mode not in (None, "rn"):
                raise UnsupportedInstruction(i, f"rounding .{mode} to bf16")
            w.define(d, "u2", f"nm.cvt_f64_to_bf16({x})")
        else:
            w.define(d, "u2", _emit_round_to_16_bits(w, i, "bf16", f"{x}.astype(f4)", mode))
        return
    k = NUMPY_KINDS[target_type]
    if "ftz" in i.mods and source_type == "f32":
        x = f"nm.canonicalize_nan({x})"
    if source_type == "f64" and target_type == "f16":
        x = f"nm.quiet_nan({x})"
    if WIDTH[target_type] < WIDTH[source_type] and mode in ("rz", "rm", "rp"):
        x = f"nm.narrow({x}, {k}, {mode!r})"
    elif target_type != source_type:
        x = f"{x}.astype({k})"
    if source_type == "f16" and target_type == "f64":
        x = f"nm.quiet_nan({x})"
    if "sat" in i.mods:
        x = f"nm.saturate({x})"
    if "relu" in i.mods:
        x = f"nm.relu_bits({x}.view(u{k[1]}), {INFINITY[target_type]}).view({k})"
    if "ftz" in i.mods and target_type == "f32":
        x = f"nm.flush({x})"
    # NaNs become canonical, except that conversions from or to float64 keep the payload.
    w.define(
        d,
        k,
        x,
        fresh=x.endswith(")"),
        float_result="f64" not in (target_type, source_type)
        and (source_type, target_type) != ("bf16", "f32"),
    )


def _emit_int_to_int(w: Writer, i: Instr, target_type: str, source_type: str, x: str):
    k = NUMPY_KINDS[target_type]
    if "sat" in i.mods:
        w.define(i.args[0], k, f"nm.clamp_int({x}, {k})")
    elif NUMPY_KINDS[source_type] == k:
        w.define(i.args[0], k, x, fresh=False)
    else:
        w.define(i.args[0], k, f"{x}.astype({k})")


@opcode("szext", forms="sign or zero extension of the low bits, .wrap and .clamp")
def szext(w: Writer, i: Instr):
    check_modifiers(i, "wrap", "clamp")
    t = get_type(i)
    size = w.use(i.args[2], "u4")
    size = f"({size} & u4(31))" if "wrap" in i.mods else f"np.minimum({size}, u4(32))"
    w.define(i.args[0], "u4", f"nm.bfe({w.use(i.args[1], NUMPY_KINDS[t])}, u4(0), {size})")
