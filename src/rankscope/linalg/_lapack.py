"""LAPACK and BLAS by the C pointers that scipy exports, called without the interpreter's lock.

scipy's Python wrappers hold the lock, so threads gain nothing from them. The same routines stand as C pointers in
``scipy.linalg.cython_lapack`` and ``cython_blas`` (their ``__pyx_capi__`` is a public interface, meant for other
compiled code), and a pointer called through ``ctypes`` lets other threads run. Where scipy does not export them
(or exports other integer widths), :func:`load` returns ``None`` and the caller takes torch instead.

Memory is handed over as torch tensors. A row-major matrix is its own transpose to Fortran, which for the symmetric
matrices here only swaps the triangle: Fortran's lower triangle is the upper one in torch.
"""

import ctypes
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import torch
from torch import Tensor

# Columns that `sytrd` reduces at once. LAPACK's own choice is 32; 16 is as fast or faster at 128 to 1,024 rows.
BLOCK = 16
# Rows a power of two apart fall into the same cache sets; a few more columns between them save a tenth of the time.
PADDING = 16


@cache
def load(dtype: torch.dtype) -> "SymmetricSolver | None":
    """Return the solver of one precision, or ``None`` where scipy does not export the pointers.

    Example:
        >>> load(torch.float16) is None
        True
    """
    letter = {torch.float32: "s", torch.float64: "d"}.get(dtype)
    if letter is None:
        return None
    try:
        from scipy.linalg import cython_blas, cython_lapack

        return SymmetricSolver(
            dtype,
            _pointer(cython_blas, f"{letter}syrk", arguments=10),
            _pointer(cython_lapack, f"{letter}sytrd", arguments=10),
            _pointer(cython_lapack, f"{letter}sterf", arguments=4),
        )
    except (ImportError, AttributeError, KeyError, TypeError):
        return None


def _pointer(module: Any, name: str, arguments: int) -> Any:
    """Return one routine as a function that releases the lock; ``TypeError`` if its signature is another."""
    capsule = module.__pyx_capi__[name]
    get_name = ctypes.pythonapi.PyCapsule_GetName
    get_name.restype, get_name.argtypes = ctypes.c_char_p, [ctypes.py_object]
    get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    signature = get_name(capsule)
    declared = re.sub(r"^void \(|\)$", "", signature.decode()).split(", ")
    if len(declared) != arguments or declared[-1] != "int *":
        raise TypeError(f"{name} has another signature: {signature.decode()}")
    return ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * arguments)(get_pointer(capsule, signature))


@cache
def _thread_setting() -> tuple[Callable[[], int], Callable[[int], None]] | None:
    """Return how to read and set the thread count of the BLAS behind scipy, or ``None`` where it has no such setting.

    The names are looked up through scipy's extension module, so it is the very library whose pointers are called.
    (``threadpoolctl`` obeys only the first thread that ever set OpenBLAS, and says nothing to the others.)
    """
    try:
        from scipy.linalg import cython_blas

        library = ctypes.CDLL(cython_blas.__file__)
    except (ImportError, OSError):
        return None
    for prefix, suffix in product(("scipy_openblas_", "openblas_"), ("", "64_")):
        read = getattr(library, f"{prefix}get_num_threads{suffix}", None)
        write = getattr(library, f"{prefix}set_num_threads{suffix}", None)
        if read is not None and write is not None:
            read.restype, read.argtypes = ctypes.c_int, []
            write.restype, write.argtypes = None, [ctypes.c_int]
            return read, write
    return None


class _Threads:
    """Holds the BLAS library's own threads at one while anybody is inside, and puts them back after.

    The setting is the whole process's (of OpenBLAS built on OpenMP, the calling thread's), so entries are counted:
    the first saves it, each sets it, the last restores it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._saved = 1

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            if setting := _thread_setting():
                read, write = setting
                if self._inside == 1:
                    self._saved = read()
                write(1)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside and (setting := _thread_setting()):
                setting[1](self._saved)


_threads = _Threads()


@contextmanager
def single_threaded() -> Iterator[None]:
    """Run BLAS and LAPACK on the calling thread only (torch has its own setting, one for each thread).

    Two threads on one 512 x 512 matrix gain a quarter at best, and on a busy machine cost a hundredfold.
    """
    with _threads:
        yield


@dataclass(frozen=True)
class SymmetricSolver:
    """The three routines that take a matrix to the eigenvalues of its Gram matrix, in one precision."""

    dtype: torch.dtype
    _syrk: Any
    _sytrd: Any
    _sterf: Any

    def gram(self, X: Tensor, out: Tensor) -> None:
        """Write ``X.T @ X`` into Fortran's lower triangle of ``out (m, m + padding)``; the rest is left as it was."""
        n, m = X.shape
        one, zero = self._scalar(1.0), self._scalar(0.0)
        order, inner = ctypes.byref(ctypes.c_int(m)), ctypes.byref(ctypes.c_int(n))
        stride = ctypes.byref(ctypes.c_int(out.shape[1]))
        self._syrk(b"L", b"N", order, inner, one, X.data_ptr(), order, zero, out.data_ptr(), stride)

    def eigenvalues(self, gram: Tensor, scratch: Tensor) -> tuple[Tensor, bool]:
        """Return the eigenvalues of Fortran's lower triangle, ascending, and whether the iteration converged.

        ``gram (m, m + padding)`` is overwritten; ``scratch`` is ``(3 + BLOCK, m)``, and the result its first row.
        The first coordinate is never mixed with the others by the reduction, so a large leading entry costs the
        small eigenvalues nothing.
        """
        m = gram.shape[0]
        diagonal, off_diagonal, factors, work = (row.data_ptr() for row in scratch[:4])
        order, stride = ctypes.byref(ctypes.c_int(m)), ctypes.byref(ctypes.c_int(gram.shape[1]))
        length, info = ctypes.byref(ctypes.c_int(BLOCK * m)), ctypes.c_int(0)
        result = ctypes.byref(info)
        self._sytrd(b"L", order, gram.data_ptr(), stride, diagonal, off_diagonal, factors, work, length, result)
        if info.value == 0:
            self._sterf(order, diagonal, off_diagonal, result)
        return scratch[0], info.value == 0

    def _scalar(self, value: float) -> Any:
        return ctypes.byref(ctypes.c_double(value) if self.dtype == torch.float64 else ctypes.c_float(value))
