"""Parse PTX text, as written by the Mojo compiler, into module variables, functions and instructions.

Unknown opcodes are accepted here, so that a kernel runs if it never executes its unsupported instructions.
Every instruction stores its PTX line and, with line tables (`-g1`), its chain of source locations: innermost
first, then the call sites it was inlined into.
"""

from __future__ import annotations

import math
import re
import struct
from dataclasses import dataclass, field
from typing import NoReturn

WIDTH = {"pred": 0, "b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2}
WIDTH |= {"b32": 4, "u32": 4, "s32": 4, "f32": 4, "f16x2": 4, "bf16x2": 4, "tf32": 4}
WIDTH |= {"b64": 8, "u64": 8, "s64": 8, "f64": 8, "b128": 16}


class PtxError(ValueError):
    """Raised for invalid or unsupported PTX; the message contains the line number."""


@dataclass(frozen=True, slots=True)
class Location:
    """A source position; `caller` is the position it was inlined into, or None."""

    file: str
    line: int
    column: int
    caller: Location | None = None

    def list_frames(self) -> list[Location]:
        """Return this location and its callers, innermost first."""
        frames, location = [], self
        while location is not None and len(frames) < 64:
            frames.append(location)
            location = location.caller
        return frames


@dataclass(frozen=True, slots=True)
class Reg:
    """A register operand; `negated` for `!%p1`."""

    name: str
    negated: bool = False


@dataclass(frozen=True, slots=True)
class Imm:
    """A literal: `value` is a Python int or float; `bits` is set for 0f... and 0d... literals."""

    value: int | float
    bits: int | None = None


@dataclass(frozen=True, slots=True)
class Sym:
    """A label, variable or function name, with an optional byte offset."""

    name: str
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Mem:
    """An address in brackets: base register, variable or None (absolute), plus a byte offset."""

    base: Reg | Sym | None
    offset: int = 0


@dataclass(frozen=True, slots=True)
class TensorMem:
    """A TMA tile operand, `[map, {x, y}]`: a tensor map's address, and coordinates, innermost first."""

    map: Mem
    coordinates: tuple


@dataclass(frozen=True, slots=True)
class Vec:
    """A vector operand in braces, or a call's operand list in parentheses."""

    items: tuple


@dataclass(frozen=True, slots=True)
class Pair:
    """A pair of destinations: `%p1|%p2`."""

    first: Operand
    second: Operand


Operand = Reg | Imm | Sym | Mem | TensorMem | Vec | Pair


@dataclass(slots=True)
class Instr:
    """One instruction: `op` is the base opcode, `mods` the dotted modifiers after it."""

    op: str
    mods: tuple[str, ...]
    args: tuple
    pred: Reg | None
    line: int
    loc: Location | None

    @property
    def name(self) -> str:
        """The whole opcode as written, `st.global.b32`."""
        return ".".join((self.op, *self.mods))


@dataclass(slots=True)
class Variable:
    """A module, shared, local or parameter variable; `nbytes` is 0 if the size is set at launch (extern shared)."""

    name: str
    space: str
    nbytes: int
    align: int
    data: bytes = b""
    line: int = 0
    pointers: list[tuple[int, str, int]] = field(default_factory=list)  # (offset, symbol, addend) in `data`


@dataclass(slots=True)
class Function:
    """One `.entry` or `.func`: parameters, declared variables, instructions and label positions."""

    name: str
    is_entry: bool
    params: list[Variable] = field(default_factory=list)
    returns: list[Variable] = field(default_factory=list)
    regs: dict[str, str] = field(default_factory=dict)  # register -> type
    variables: dict[str, Variable] = field(default_factory=dict)
    body: list[Instr] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    tables: dict[str, list[str]] = field(default_factory=dict)  # .branchtargets
    max_threads: int = 0
    max_registers: int = 0  # .maxnreg
    min_blocks: int = 0  # .minnctapersm
    has_body: bool = False
    line: int = 0


@dataclass(slots=True)
class Module:
    """A parsed PTX module."""

    version: tuple[int, int] = (0, 0)
    target: str = ""
    variables: dict[str, Variable] = field(default_factory=dict)
    functions: dict[str, Function] = field(default_factory=dict)


_NUMBER = re.compile(
    r"[+-]?(?:0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}|0[xX][0-9a-fA-F]+U?|0[bB][01]+U?|\d+\.\d*"
    r"(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+|\d+U?)$"
)
_LOC = re.compile(r"\s*\.loc\s+(\d+)\s+(\d+)\s+(\d+)(?:.*inlined_at\s+(\d+)\s+(\d+)\s+(\d+))?")
_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"((?:[^"\\]|\\.)*)"', re.M)
_OCTAL = re.compile(r"(?:\\[2-3][0-7]{2})+")
_COMMENT = re.compile(r"/\*.*?\*/", re.S)
_LINE_COMMENT = re.compile(r"^([^\"\n]*?)//[^\"\n]*$", re.M)
_TOKEN = re.compile(
    r"""\s*+(?:
        (?P<line>\.(?:loc|file|version|target|address_size)[ \t][^\n]*)
      | (?P<section>\.section\b[^{]*\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})
      | (?P<header>(?:\.(?:visible|weak|extern|common)\s+)*\.(?:entry|func)\b[^;{]*[;{])
      | (?P<label>[A-Za-z_$%.][\w$]*\s*:(?!:)(?:\s*\.(?:branchtargets|callprototype|calltargets)\b[^;]*;)?)
      | (?P<brace>[{}])
      | (?P<statement>[^;]*+;)
    )""",
    re.X,
)
"""The tokens of PTX text; a function's declaration ends at `;`, its definition opens with `{`."""
_ARRAY = re.compile(r"(.*?)((?:\[\d*\])*)$", re.S)


def decode_file_names(text: str) -> str:
    """Decode the non-ASCII characters of `.file` names, which the compiler writes as octal escapes."""
    return _FILE.sub(lambda line: _OCTAL.sub(_decode_octal_escapes, line[0]), text)


def _decode_octal_escapes(escapes: re.Match) -> str:
    octets = bytes(int(octal, 8) for octal in escapes[0].split("\\")[1:])
    try:
        return octets.decode()
    except UnicodeDecodeError:
        return escapes[0]


def parse(text: str) -> Module:
    """Parse one PTX module. Raises PtxError with the line if the text is not PTX."""
    if isinstance(text, bytes):
        text = text.decode("utf-8", "replace")
    text = text.rstrip("\0 \n")
    if ".version" not in text:
        raise PtxError("this is not PTX text: there is no .version line")
    return _Parser(text).run()


def parse_number(text: str) -> Imm:
    """Parse the literal `text` ("12", "0x1f", "0f3F800000", "1.5")."""
    sign = -1 if text.startswith("-") else 1
    body = text.lstrip("+-")
    if body[:2] in ("0f", "0F", "0d", "0D") and len(body) in (10, 18):
        return Imm(0, int(body[2:], 16))
    body = body.rstrip("U")
    if body[:2] in ("0x", "0X"):
        return Imm(sign * int(body, 16))
    if body[:2] in ("0b", "0B"):
        return Imm(sign * int(body, 2))
    if "." in body or "e" in body or "E" in body:
        return Imm(sign * float(body))
    return Imm(sign * (int(body, 8) if len(body) > 1 and body[0] == "0" else int(body)))


def split_commas(text: str) -> list[str]:
    """Split at commas that are not inside brackets, braces or parentheses."""
    if not any(c in text for c in "{[("):
        return [part.strip() for part in text.split(",")] if text.strip() else []
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        if c in "{[(":
            depth += 1
        elif c in "}])":
            depth -= 1
        elif c == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    last = text[start:].strip()
    return [*parts, last] if last else parts


class _Parser:
    """A single-pass parser."""

    def __init__(self, text: str):
        text = _COMMENT.sub(lambda m: "\n" * m.group().count("\n"), text)
        self.text = _LINE_COMMENT.sub(r"\1", text)
        self.module = Module()
        # LLVM writes .file lines at the end: collect them first.
        files = _FILE.finditer(decode_file_names(text))
        self.files = {int(m[1]): re.sub(r'\\(["\\])', r"\1", m[2]) for m in files}
        self.loc: Location | None = None
        self.locations: dict[tuple[int, int, int], Location] = {}
        self.operands: dict[str, object] = {}
        self.function: Function | None = None
        self.scopes: list[dict[str, str]] = []
        self.starts: list[int] = []  # index of each scope's first instruction in the function's body

    def raise_error(self, line: int, reason: str) -> NoReturn:
        raise PtxError(f"PTX line {line}: {reason}")

    def run(self) -> Module:
        position, counted_position, line = 0, 0, 1
        while m := _TOKEN.match(self.text, position):
            assert m.lastgroup is not None  # every alternative of the pattern has a name
            line += self.text.count("\n", counted_position, m.start(m.lastgroup))
            position, counted_position = m.end(), m.start(m.lastgroup)
            self.parse_token(m.lastgroup, m[m.lastgroup], line)
        if self.function is not None or self.text[position:].strip():
            rest = self.text[position:]
            line += self.text.count("\n", counted_position, position + len(rest) - len(rest.lstrip()))
            self.raise_error(line, "the text ends inside a statement or function")
        return self.module

    def parse_token(self, kind: str, text: str, line: int):
        if kind == "line":
            self.parse_line_directive(text, line)
        elif kind == "section":
            return
        elif kind == "header" and self.function is None:
            self.parse_header(text[:-1], text[-1] == "{", line)
        elif kind in ("header", "statement"):
            parse = self.parse_module_variable if self.function is None else self.parse_statement
            parse(text[:-1].strip(), line)
        elif self.function is None:
            self.raise_error(line, f"'{text[:60]}' is not a module declaration")
        elif kind == "label":
            name, _, table = text.partition(":")
            if ".branchtargets" in table:
                names = split_commas(table.strip().removeprefix(".branchtargets").rstrip(";"))
                self.function.tables[name.strip()] = names
            elif not table:
                self.parse_label(name.strip(), line)
        elif text == "{":
            self.scopes.append({})
            self.starts.append(len(self.function.body))
        else:
            self.scopes.pop()
            self.starts.pop()
            if not self.scopes:
                self.function = None

    def parse_line_directive(self, text: str, line: int):
        """Parse a directive that ends with its line, not with a semicolon."""
        word, value = text.split(None, 1)
        if word == ".loc":
            self.parse_loc(text)
        elif word == ".version":
            major, _, minor = value.strip().partition(".")
            self.module.version = (int(major), int(minor))
        elif word == ".target":
            self.module.target = value.split(",")[0].strip()
        elif word == ".address_size" and value.strip() != "64":
            self.raise_error(line, f".address_size {value.strip()} is not supported, only 64")

    def parse_loc(self, line: str):
        m = _LOC.match(line)
        if not m or m[2] == "0":
            return
        position = (int(m[1]), int(m[2]), int(m[3]))
        caller = None
        if m[4]:
            site = (int(m[4]), int(m[5]), int(m[6]))
            caller = self.locations.get(site) or Location(self.files.get(site[0], "?"), site[1], site[2])
        self.loc = Location(self.files.get(position[0], "?"), position[1], position[2], caller)
        self.locations[position] = self.loc

    def parse_label(self, name: str, line: int):
        """Parse a label; braces delimit its scope, so that inlined assembly may reuse a name."""
        body, unique_name = self.current_function.body, name
        if len(self.scopes) > 1:
            unique_name = f"{name}_s{line}_{len(body)}"
            self.scopes[-1][name] = unique_name
            for i in body[self.starts[-1] :]:
                if i.op == "bra" and i.args == (Sym(name),):
                    i.args = (Sym(unique_name),)
        self.current_function.labels[unique_name] = len(body)

    # -- declarations ---------------------------------------------------------------------------------------
    def parse_header(self, text: str, has_body: bool, line: int):
        m = re.match(
            r"(?:\.(?:visible|weak|extern|common)\s+)*\.(entry|func)\s*(?:\.noreturn\s*)?"
            r"(\([^)]*\)\s*)?([\w$.%]+)\s*(\((?:[^()]|\([^)]*\))*\))?(.*)$",
            text.strip(),
            re.S,
        )
        if not m:
            self.raise_error(line, "this function header is not understood")
        kind, returns, name, params, tail = m.groups()
        f = Function(name, kind == "entry", has_body=has_body, line=line)
        f.params, f.returns = (
            [self.parse_variable(p, line, "param") for p in split_commas((declared or "()").strip()[1:-1])]
            for declared in (params, returns)
        )
        if limit := re.search(r"\.(?:maxntid|reqntid)\s+([\d\s,]+)", tail):
            f.max_threads = math.prod(map(int, re.findall(r"\d+", limit[1])))
        for word, name_ in (("maxnreg", "max_registers"), ("minnctapersm", "min_blocks")):
            if limit := re.search(rf"\.{word}\s+(\d+)", tail):
                setattr(f, name_, int(limit[1]))
        if has_body:
            self.function, self.scopes, self.starts, self.loc = f, [{}], [0], None
            self.locations = {}
            self.module.functions[name] = f
        else:
            self.module.functions.setdefault(name, f)

    def parse_variable(self, text: str, line: int, space: str) -> Variable:
        """Parse `.param .align 8 .b8 name[32]`, `.shared .align 4 .b8 x[64]`, `.global .u32 n = 3`."""
        head, _, init = text.partition("=")
        array = _ARRAY.match(head.strip())
        assert array is not None  # the pattern matches any text
        head, dims = array.groups()
        tokens, align, kind = head.split(), 0, None
        for i, token in enumerate(tokens):
            if token == ".align":
                align = int(tokens[i + 1])
            elif token[1:] in WIDTH and token[0] == ".":
                kind = token[1:]
        vector = 4 if ".v4" in tokens else 2 if ".v2" in tokens else 1
        if kind is None:
            self.raise_error(line, f"no type in the declaration '{text.strip()[:60]}'")
        width = WIDTH[kind] * vector
        count = math.prod(int(dim or 0) for dim in re.findall(r"\[(\d*)\]", dims))
        out = Variable(tokens[-1], space, width * count, max(align, width, 1), line=line)
        if init.strip():
            self.parse_initialiser(out, init.strip().strip("{}").strip(), kind, WIDTH[kind])
        return out

    def parse_initialiser(self, var: Variable, text: str, kind: str, width: int):
        data = bytearray()
        for item in split_commas(text.replace("{", "").replace("}", "")):
            if not _NUMBER.match(item):
                m = re.match(r"(?:generic\()?([\w$.%]+)\)?(?:\s*\+\s*(\d+))?", item)
                assert m is not None  # anything but a number is a name
                var.pointers.append((len(data), m[1], int(m[2] or 0)))
                data += bytes(width)
                continue
            imm = parse_number(item)
            if imm.bits is not None:
                data += imm.bits.to_bytes(width, "little")
            elif isinstance(imm.value, float):
                data += struct.pack("<f" if kind == "f32" else "<d", imm.value)
            else:
                data += (imm.value & ((1 << 8 * width) - 1)).to_bytes(width, "little")
        if not var.nbytes:
            var.nbytes = len(data)
        var.data = bytes(data[: var.nbytes]).ljust(var.nbytes, b"\0")

    def parse_module_variable(self, text: str, line: int):
        m = re.search(r"\.(global|const|shared)\b", text.partition("=")[0])
        if not m:
            if text.startswith((".pragma", ".alias")):
                return
            self.raise_error(line, f"'{text[:60]}' is not a module declaration")
        var = self.parse_variable(text, line, m[1])
        self.module.variables[var.name] = var

    @property
    def current_function(self) -> Function:
        assert self.function is not None
        return self.function

    # -- statements -----------------------------------------------------------------------------------------
    def parse_statement(self, text: str, line: int):
        if not text:
            return
        if text[0] == ".":
            self.parse_directive(text, line)
            return
        f = self.current_function
        pred = None
        if text[0] == "@":
            guard, _, text = text.partition(" ") if " " in text.split("\t")[0] else text.partition("\t")
            negated = guard[1] == "!"
            pred = Reg(self.resolve(guard[2:] if negated else guard[1:]), negated)
            text = text.strip()
        opcode, _, rest = text.replace("\t", " ").replace("\n", " ").partition(" ")
        op, *mods = opcode.split(".")
        args = tuple(self.get_operand(a, line) for a in split_commas(rest.strip()))
        f.body.append(Instr(op, tuple(mods), args, pred, line, self.loc))

    def parse_directive(self, text: str, line: int):
        f = self.current_function
        word = text.split(None, 1)[0]
        if word == ".reg":
            parts = text.split(None, 2)
            kind = parts[1][1:]
            if kind not in WIDTH:
                self.raise_error(line, f"register type .{kind} is not supported")
            for name in split_commas(parts[2]):
                m = re.match(r"([\w$%]+)<(\d+)>$", name)
                names = [f"{m[1]}{i}" for i in range(int(m[2]))] if m else [name]
                for n in names:
                    if len(self.scopes) > 1:
                        self.scopes[-1][n] = f"{n}_s{line}"
                        n = self.scopes[-1][n]
                        self.operands.clear()
                    f.regs[n] = kind
        elif word in (".shared", ".local", ".param"):
            var = self.parse_variable(text, line, word[1:])
            f.variables[var.name] = var
        elif word in (".pragma", ".minnctapersm", ".maxntid"):
            return
        else:
            self.raise_error(line, f"directive {word} is not supported")

    def resolve(self, name: str) -> str:
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        return name

    def get_operand(self, text: str, line: int):
        if len(self.scopes) > 1:
            return self.parse_operand(text, line)
        # operands are immutable, so equal texts share one object
        key = f"{id(self.function)} {text}"
        operand = self.operands.get(key)
        if operand is None:
            operand = self.operands[key] = self.parse_operand(text, line)
        return operand

    def parse_operand(self, text: str, line: int):
        c = text[0] if text else ""
        if c == "[":
            inside = text[1 : text.rindex("]")]
            address, comma, coordinates = inside.partition(",")
            if comma and coordinates.strip().startswith("{"):
                vector = self.get_operand(coordinates.strip(), line)
                assert isinstance(vector, Vec)  # it is in braces
                return TensorMem(self.parse_address(address, line), vector.items)
            return self.parse_address(inside, line)
        if c in "{(":
            return Vec(tuple(self.get_operand(t, line) for t in split_commas(text[1:-1])))
        if c == "!":
            return Reg(self.resolve(text[1:].strip()), True)
        if "|" in text:
            first, _, second = text.partition("|")
            return Pair(self.get_operand(first.strip(), line), self.get_operand(second.strip(), line))
        if _NUMBER.match(text):
            return parse_number(text)
        name = self.resolve(text)
        if name in self.current_function.regs or c == "%" or text == "_":
            return Reg(name)
        m = re.match(r"([\w$.%]+)\s*(?:\+\s*(-?\d+))?$", text)
        if not m:
            self.raise_error(line, f"operand '{text}' is not understood")
        return Sym(self.resolve(m[1]), int(m[2] or 0))

    def parse_address(self, text: str, line: int) -> Mem:
        m = re.match(r"\s*([\w$.%]+)\s*(?:\+?\s*(-?\s*(?:0x[0-9a-fA-F]+|\d+)))?\s*(?:,.*)?$", text, re.S)
        if not m:
            self.raise_error(line, f"address '[{text}]' is not understood")
        base, offset = self.resolve(m[1]), int((m[2] or "0").replace(" ", ""), 0)
        if base in self.current_function.regs:
            return Mem(Reg(base), offset)
        if base[0].isdigit():
            return Mem(None, int(base, 0) + offset)
        return Mem(Reg(base) if base[0] == "%" else Sym(base), offset)
