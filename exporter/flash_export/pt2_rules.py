# SPDX-License-Identifier: Apache-2.0
"""What a string in an ExportedProgram's JSON may say. Anything not allowed here is refused before PyTorch sees it.

PyTorch turns these strings into Python objects and Python source, so each is a way in (seen on torch 2.13):

- ``expr_str`` goes through ``sympy.sympify``, which evaluates it;
- ``target`` and ``as_operator`` are looked up below the ``torch`` module, ``torch.os.system`` included, and only a
  verifier that the file itself names stands between them and a call;
- ``guards_code`` is compiled into a function; names of nodes, arguments and weights are pasted into generated source;
- ``in_spec`` and ``out_spec`` name classes, and for a defaultdict any function of any module.

So: every dictionary key and every string is held against one rule, chosen by the key it stands under. An unknown key
with a string under it is refused too.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from typing import Any

MAX_EXPRESSION = 4096
MAX_EXPRESSION_NODES = 512
MAX_GUARD_NODES = 4096
MAX_INTEGER = 2**63
MAX_EXPONENT = 64
MAX_TEXT = 1 << 20
MAX_DEPTH = 64

_IDENTIFIER = re.compile(r"([A-Za-z_]\w*)?", re.ASCII)
_DOTTED = re.compile(r"[\w.]{0,1024}", re.ASCII)
_VERSION = re.compile(r"[\w.+<>= -]{0,64}", re.ASCII)
_NUMBER = re.compile(r"-?Infinity|NaN")
_DEVICE = re.compile(r"[a-z]{1,16}", re.ASCII)
_PAYLOAD = re.compile(r"(weight|tensor)_\d{1,9}", re.ASCII)
_ATEN = re.compile(r"torch\.ops\.(aten|prims|quantized_decomposed|torchvision)\.([A-Za-z_]\w*)(\.\w+)?", re.ASCII)

FILE_OPERATORS = frozenset({"from_file", "save", "load"})
"""ATen operators that open a file by name."""

BITWISE = frozenset(f"__{i}{n}__" for i in ("", "i") for n in ("and", "or", "xor", "lshift", "rshift"))
"""ATen operators that are named as Python's methods: ``a & b`` of tensors. Other names of two underscores are none."""

OPERATORS = frozenset(
    [f"torch.sym_{n}" for n in ("float", "int", "not", "max", "min", "ite", "sqrt", "sum")]
    + ["torch._sym_sqrt", "math.trunc", "math.ceil", "math.floor", "math.sqrt"]
    + [f"_operator.{n}" for n in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "neg", "pos", "getitem")]
    + [f"_operator.{n}" for n in ("eq", "ne", "lt", "le", "gt", "ge", "and_", "or_", "not_", "lshift", "rshift")]
    + [
        f"torch.ops.higher_order.{n}"
        for n in ("cond", "while_loop", "scan", "map_impl", "wrap_with_set_grad_enabled", "wrap_with_autocast")
    ]
)
"""Operators outside ATen: arithmetic on sizes, and control flow on graphs of the same file."""

_SYMBOLIC = re.compile(
    r"Symbol|Integer|Float|Rational|Add|Mul|Pow|Max|Min|Mod|Abs|And|Or|Not|Eq|Equality"
    r"|Ne|Unequality|Lt|Le|Gt|Ge|StrictLessThan|LessThan|StrictGreaterThan|GreaterThan|"
    r"Piecewise|ExprCondPair|Tuple|floor|ceiling|FloorDiv|ModularIndexing|Where|PythonMod|CleanDiv"
    r"|CeilToInt|FloorToInt|CeilDiv|LShift|RShift|PowByNatural|FloatPow|FloatTrueDiv|IntTrueDiv|"
    r"TruncToFloat|TruncToInt|RoundToInt|RoundDecimal|ToFloat|Identity"
)
"""The functions of sizes that PyTorch writes."""
CONSTANTS = frozenset({"true", "false", "True", "False", "oo", "int_oo", "nan"})
_ASSUMPTION = re.compile(r"integer|positive|nonnegative|negative|nonzero|real|finite|even|odd|precision")

TREE_TYPES = frozenset({"builtins.tuple", "builtins.list", "builtins.dict", "collections.OrderedDict"})
_MODEL_OUTPUT = re.compile(r"transformers\.modeling_outputs\.[A-Z]\w*", re.ASCII)

_GUARD_NODES = (
    ast.Expression,
    ast.BoolOp,
    ast.And,
    ast.Or,
    ast.UnaryOp,
    ast.Not,
    ast.USub,
    ast.BinOp,
    ast.Add,
    ast.Sub,
    ast.Mult,
    ast.FloorDiv,
    ast.Div,
    ast.Mod,
    ast.Pow,
    ast.IfExp,
    ast.Compare,
    ast.cmpop,
    ast.Subscript,
    ast.Constant,
    ast.Load,
    ast.Name,
    ast.Attribute,
    ast.Call,
)
_GUARD_METHODS = frozenset({"size", "stride", "storage_offset", "dim", "shape", "floor", "ceil", "trunc", "sqrt"})


class Forbidden(ValueError):
    """A string that no ExportedProgram made by PyTorch holds; the text says which and why."""


def check_document(document: Any) -> None:
    """Raises Forbidden unless every key and string in the parsed JSON is allowed."""
    _walk(document, "", 0)


def _walk(value: Any, key: str, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise Forbidden("JSON nested too deeply")
    if isinstance(value, dict):
        for inner, item in value.items():
            _check_key(inner, key)
            if key == "metadata":
                _check_metadata(item)
            else:
                _walk(item, inner, depth + 1)
    elif isinstance(value, list):
        for item in value:
            _walk(item, key, depth + 1)
    elif isinstance(value, str):
        rule = RULES.get(key)
        if rule is None:
            raise Forbidden(f"a string under {key!r}, where none belongs: {value[:80]!r}")
        rule(value)
    if key in ("as_custom_obj", "custom_obj", "custom_obj_values") and value:
        raise Forbidden("a custom object, which is a pickle of its own class")


def _check_key(inner: str, key: str) -> None:
    """A name, or under ``range_constraints`` the size that has the range: of ``4*Dim("blocks")`` it is ``4*s79``."""
    if key == "range_constraints" and not _DOTTED.fullmatch(inner):
        check_expression(inner)
    else:
        _match(_DOTTED, inner, f"a key under {key!r}")


def _check_metadata(value: Any) -> None:
    """Notes on a node are flat text. A name that was chosen to be "metadata" brings something else, and no freedom."""
    if not isinstance(value, str) or len(value) > MAX_TEXT:
        raise Forbidden(f"metadata that is no text: {str(value)[:80]}")


def _match(pattern: re.Pattern[str], text: str, what: str) -> None:
    if not pattern.fullmatch(text):
        raise Forbidden(f"{what}: {text[:120]!r}")


def check_operator(text: str) -> None:
    """``torch.ops.aten.add.Tensor`` and its like, or one of ``OPERATORS``."""
    match = _ATEN.fullmatch(text)
    if text not in OPERATORS and (match is None or match[2] in FILE_OPERATORS or not _is_plain(*match.groups())):
        raise Forbidden(f"an operator that is no tensor operator: {text[:120]!r}")


def _is_plain(library: str, name: str, overload: str | None) -> bool:
    """Whether no attribute of Python's own (``__class__``) is meant."""
    bitwise = library == "aten" and name in BITWISE
    return (bitwise or not name.startswith("__")) and not (overload or "").startswith(".__")


def check_expression(text: str) -> None:
    """A size as SymPy writes it, e.g. ``Mul(Integer(4), Symbol('s0', integer=True))``.

    The grammar: calls of ``_SYMBOLIC`` names, integers below 2^63, floats, ``+ - * // / %``, symbols, ``CONSTANTS``; a
    string only as a Symbol's name; an exponent or shift only as a number up to 64, and no power of a power, so that
    nothing grows without end.
    """
    nodes = list(ast.walk(_parse(text)))
    for node in nodes:
        _check_expression_node(node, text)


def _check_expression_node(node: ast.AST, text: str) -> None:
    allowed: bool
    if isinstance(node, ast.Call):
        allowed = (
            isinstance(node.func, ast.Name)
            and _SYMBOLIC.fullmatch(node.func.id) is not None
            and _arguments_allowed(node)
        )
    elif isinstance(node, ast.Constant):
        number = isinstance(node.value, int | float) and abs(node.value) < MAX_INTEGER
        allowed = number or (isinstance(node.value, str) and _IDENTIFIER.fullmatch(node.value) is not None)
    elif isinstance(node, ast.Name):
        allowed = _is_symbol(node.id)
    elif isinstance(node, ast.BinOp):
        allowed = isinstance(node.op, ast.Add | ast.Sub | ast.Mult | ast.FloorDiv | ast.Div | ast.Mod)
    elif isinstance(node, ast.UnaryOp):
        allowed = isinstance(node.op, ast.USub | ast.UAdd)
    else:
        allowed = isinstance(node, ast.Expression | ast.Load | ast.keyword | ast.operator | ast.unaryop)
    if not allowed:
        raise Forbidden(f"an expression that is no size: {text[:120]!r}")


def _is_symbol(name: str) -> bool:
    return name in CONSTANTS or re.fullmatch(rf"[a-z]{{1,4}}\d{{1,9}}|{_SYMBOLIC.pattern}", name) is not None


def _arguments_allowed(call: ast.Call) -> bool:
    assert isinstance(call.func, ast.Name)  # checked by the caller
    name = call.func.id
    if any(not _ASSUMPTION.fullmatch(k.arg or "") or not isinstance(k.value, ast.Constant) for k in call.keywords):
        return False
    strings = [a for a in call.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    if strings and (name not in ("Symbol", "Float") or len(strings) != 1):
        return False
    if name in ("Pow", "PowByNatural", "FloatPow", "LShift", "RShift"):
        return len(call.args) == 2 and _is_small(call.args[1]) and not _has_power(call.args[0])
    return True


def _is_small(node: ast.AST) -> bool:
    """A number up to ``MAX_EXPONENT``, as ``3``, ``-1``, ``Integer(3)`` or ``Rational(1, 2)``."""
    numbers = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant)]
    names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    return (
        bool(numbers)
        and all(isinstance(n, int | float) and abs(n) <= MAX_EXPONENT for n in numbers)
        and names <= {"Integer", "Rational", "Float"}
        and not any(isinstance(n, ast.BinOp) for n in ast.walk(node))
    )


def _has_power(node: ast.AST) -> bool:
    powers = ("Pow", "PowByNatural", "FloatPow", "LShift")
    return any(isinstance(n, ast.Name) and n.id in powers for n in ast.walk(node))


def check_guard(text: str) -> None:
    """A condition on sizes, e.g. ``L['x'].size()[0] == L['mask'].size()[1]``."""
    for node in ast.walk(_parse(text, MAX_GUARD_NODES)):
        allowed = isinstance(node, _GUARD_NODES)
        if isinstance(node, ast.Name):
            allowed = node.id in ("L", "math", "max", "min", "abs", "int", "float", "bool") or _is_symbol(node.id)
        elif isinstance(node, ast.Attribute):
            allowed = node.attr in _GUARD_METHODS
        elif isinstance(node, ast.Constant):
            is_name = isinstance(node.value, str) and _DOTTED.fullmatch(node.value) is not None
            allowed = is_name or type(node.value) in (int, float, bool)
        if not allowed:
            raise Forbidden(f"a guard that is no condition on sizes: {text[:120]!r}")


def _parse(text: str, most: int = MAX_EXPRESSION_NODES) -> ast.Expression:
    if len(text) > MAX_EXPRESSION or not text.isascii():
        raise Forbidden(f"an expression of {len(text)} characters: {text[:80]!r}")
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise Forbidden(f"an expression that cannot be read: {text[:120]!r}") from None
    if sum(1 for _ in ast.walk(tree)) > most:
        raise Forbidden(f"an expression of more than {most} parts: {text[:80]!r}")
    return tree


def check_tree(text: str) -> None:
    """How inputs and outputs nest: tuples, lists, dicts by name, and transformers' output classes."""
    if not text:
        return
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        raise Forbidden(f"a tree that is no JSON: {text[:120]!r}") from None
    if not (isinstance(document, list) and len(document) == 2 and document[0] == 1):
        raise Forbidden(f"a tree of an unknown form: {text[:120]!r}")
    _check_tree_node(document[1], 0)


def _check_tree_node(node: Any, depth: int) -> None:
    if depth > MAX_DEPTH or not isinstance(node, dict) or node.keys() != {"type", "context", "children_spec"}:
        raise Forbidden(f"a tree of an unknown form: {str(node)[:120]}")
    kind, context, children = node["type"], node["context"], node["children_spec"]
    if kind is not None and kind not in TREE_TYPES and not (isinstance(kind, str) and _MODEL_OUTPUT.fullmatch(kind)):
        raise Forbidden(f"a container that may run code when it is built: {str(kind)[:120]!r}")
    keys = json.loads(context) if isinstance(context, str) else context
    for key in keys if isinstance(keys, list) else [keys]:
        if isinstance(key, str):
            _match(_DOTTED, key, "a key of an input or output")
        elif key is not None and type(key) not in (int, bool):
            raise Forbidden(f"a key of an input or output: {str(key)[:120]}")
    if not isinstance(children, list):
        raise Forbidden(f"a tree of an unknown form: {str(node)[:120]}")
    for child in children:
        _check_tree_node(child, depth + 1)


def check_text(text: str) -> None:
    """Text that stays text: it is quoted wherever it goes, so only its length matters."""
    if len(text) > MAX_TEXT:
        raise Forbidden(f"a text of {len(text)} characters")


def _pattern(pattern: re.Pattern[str], what: str) -> Callable[[str], None]:
    return lambda text: _match(pattern, text, what)


RULES: dict[str, Callable[[str], None]] = {
    **dict.fromkeys(("name", "as_name", "forward_arg_names", "field_names"), _pattern(_IDENTIFIER, "a name")),
    **dict.fromkeys(
        ("fqn", "parameter_name", "buffer_name", "tensor_constant_name", "user_input_name", "verifiers"),
        _pattern(_DOTTED, "a name"),
    ),
    "torch_version": _pattern(_VERSION, "a version"),
    "type": _pattern(_DEVICE, "a device"),
    **dict.fromkeys(("as_float", "as_floats"), _pattern(_NUMBER, "a number")),
    "path_name": _pattern(_PAYLOAD, "the name of a weight's file"),
    "target": check_operator,
    "as_operator": check_operator,
    "expr_str": check_expression,
    "guards_code": check_guard,
    "in_spec": check_tree,
    "out_spec": check_tree,
    **dict.fromkeys(("as_string", "as_strings"), check_text),
}
"""Key -> the rule for strings under it."""
