"""What steps on rows of 32 lanes are written with: an LLVM builder that knows vectors and Numba's arrays."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

#: Lanes of a row; the same as the tokens of a tile.
LANES = 32
#: Lanes a step holds in registers at once: eight rows of eight FP32 fill half the registers of AVX2.
WIDTH = 8

_I32, _I64 = ir.IntType(32), ir.IntType(64)


class Step:
    """The LLVM builder of one step, with loads and stores of vectors at places of Numba arrays."""

    def __init__(self, context: Any, builder: Any, signature: Any, arguments: Any) -> None:
        self.context, self.builder, self.types, self.arguments = context, builder, signature.args, arguments

    def pointer(self, array: int, at: Any, element: ir.Type) -> Any:
        """Address of element ``at`` of argument ``array``, as a pointer to ``element``."""
        data = self.context.make_array(self.types[array])(self.context, self.builder, self.arguments[array]).data
        return self.builder.bitcast(self.builder.gep(data, [at]), element.as_pointer())

    def vector(self, array: int, lanes: int) -> ir.VectorType:
        return ir.VectorType(self.context.get_data_type(self.types[array].dtype), lanes)

    def load(self, array: int, at: Any, lanes: int) -> Any:
        vector = self.vector(array, lanes)
        return self.builder.load(self.pointer(array, at, vector), align=self.types[array].dtype.bitwidth // 8)

    def scalar(self, array: int, at: Any) -> Any:
        return self.builder.load(self.pointer(array, at, self.context.get_data_type(self.types[array].dtype)))

    def bits(self, array: int, at: Any) -> Any:
        """64 bits from byte ``at`` of argument ``array`` uint8 on, wherever they stand; the lowest byte first."""
        return self.builder.load(self.pointer(array, at, _I64), align=1)

    def lanes(self, vector: Any) -> list[Any]:
        """The elements of a vector of unsigned integers as places."""
        elements = (self.builder.extract_element(vector, ir.Constant(_I32, i)) for i in range(vector.type.count))
        return [self.builder.zext(element, _I64) for element in elements]

    def gather(self, array: int, places: list[Any]) -> Any:
        """The elements at ``places``, by a load each: gather instructions are slower on many processors."""
        vector = ir.Constant(self.vector(array, len(places)), ir.Undefined)
        for i, place in enumerate(places):
            vector = self.builder.insert_element(vector, self.scalar(array, place), ir.Constant(_I32, i))
        return vector

    def store(self, value: Any, array: int, at: Any) -> None:
        align = self.types[array].dtype.bitwidth // 8
        self.builder.store(value, self.pointer(array, at, value.type), align=align)

    def place(self, first: Any, stride: Any, count: int) -> Any:
        return self.builder.add(first, self.builder.mul(stride, ir.Constant(_I64, count)))

    def offset(self, at: Any, count: int) -> Any:
        return self.builder.add(at, ir.Constant(_I64, count))

    def add_product(self, x: Any, y: Any, total: Any) -> Any:
        """``x * y + total``, rounded once or twice: only where the bytes of no page depend on it."""
        contract = ("contract",)
        return self.builder.fadd(self.builder.fmul(x, y, flags=contract), total, flags=contract)

    def splat(self, value: Any, lanes: int) -> Any:
        vector = ir.VectorType(value.type, lanes)
        one = self.builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(_I32, 0))
        pattern = ir.Constant(ir.VectorType(_I32, lanes), [0] * lanes)
        return self.builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), pattern)

    def turned(self, rows: list[Any]) -> list[Any]:
        """Columns of as many rows as each has lanes: interleaving row i with row i + half, log2 times."""
        half = len(rows) // 2
        patterns = [
            ir.Constant(ir.VectorType(_I32, 2 * half), [x for i in lanes for x in (i, 2 * half + i)])
            for lanes in (range(half), range(half, 2 * half))
        ]
        span = len(rows)
        while span > 1:
            rows = [
                self.builder.shuffle_vector(rows[i], rows[i + half], pattern)
                for i in range(half)
                for pattern in patterns
            ]
            span //= 2
        return rows
