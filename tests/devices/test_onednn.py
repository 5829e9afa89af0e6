"""oneDNN against the NumPy meanings of the op table."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest

from mlcompute.devices.cpu import onednn
from mlcompute.devices.cpu.onednn import Call, Convolution, Descriptor, Primitive, Reorder
from mlcompute.devices.cpu.onednn import library as library_file
from mlcompute.errors import DeviceError
from mlcompute.ops.op import TABLE
from tests.harness import assert_close

needs_library = pytest.mark.skipif(onednn.load() is None, reason=onednn.why_missing() or "oneDNN is there")


class Memory:
    """Bytes for one role between two guards, at an address aligned like an arena's; all NaN to begin with."""

    def __init__(self, nbytes: int) -> None:
        self._whole = np.full(nbytes + 192, 0xFF, np.uint8)
        start = -self._whole.ctypes.data % 64 + 64
        self.bytes = self._whole[start : start + nbytes]
        self.address = self.bytes.ctypes.data
        self._guards = (self._whole[:start], self._whole[start + nbytes :])

    def check(self, what: str) -> None:
        assert all((guard == 0xFF).all() for guard in self._guards), f"{what}: written outside its memory"


def fill(descriptor: Descriptor, array: Any) -> Memory:
    """The array in memory, laid out by a descriptor of strides."""
    memory = Memory(descriptor.nbytes)
    view(descriptor, memory)[...] = array.reshape(descriptor.shape)
    return memory


def view(descriptor: Descriptor, memory: Memory) -> Any:
    assert not descriptor.blocks
    floats = memory.bytes.view(np.float32)
    return np.lib.stride_tricks.as_strided(floats, descriptor.shape, [4 * stride for stride in descriptor.strides])


def execute(call: Call) -> None:
    """What native code does with a call."""
    library = onednn.require()
    _, primitive, stream, count, arguments = (int(word) for word in call.native_arguments)
    with library.threads(1):
        library.call(
            "primitive_execute", primitive, stream, count, ctypes.cast(arguments, ctypes.POINTER(library_file.Argument))
        )


def run(primitive: Primitive, inputs: dict[str, Any], result: str) -> Any:
    """Run a primitive with strided arrays for its inputs (or Memory); the result as an array."""
    memories: dict[str, Memory] = {}
    for role, descriptor in primitive.descriptors.items():
        given = inputs.get(role)
        if given is None:
            memories[role] = Memory(descriptor.nbytes)
        else:
            memories[role] = given if isinstance(given, Memory) else fill(descriptor, given)
    execute(primitive.bind(**{role: memory.address for role, memory in memories.items()}))
    for role, memory in memories.items():
        memory.check(f"{primitive}: {role}")
    descriptor = primitive.descriptors[result]
    return memories[result] if descriptor.blocks else view(descriptor, memories[result]).copy()


def plain(shape: tuple[int, ...], seed: int) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# Convolution ------------------------------------------------------------------------------------------------------

# batch, channels, image, outputs, kernel, strides, dilations, padding, groups
CONVOLUTIONS = [
    (1, 1, (28, 28), 32, (5, 5), (1, 1), (1, 1), (2, 2, 2, 2), 1),
    (4, 32, (14, 14), 64, (5, 5), (1, 1), (1, 1), (2, 2, 2, 2), 1),
    (3, 3, (17, 13), 16, (3, 3), (1, 1), (1, 1), (1, 1, 1, 1), 1),
    (2, 16, (32, 32), 16, (3, 3), (1, 1), (1, 1), (1, 1, 1, 1), 1),
    (2, 16, (32, 32), 32, (3, 3), (2, 2), (1, 1), (0, 1, 0, 1), 1),
    (2, 64, (8, 8), 64, (3, 3), (1, 1), (1, 1), (1, 1, 1, 1), 1),
    (1, 33, (9, 7), 33, (3, 3), (1, 1), (1, 1), (1, 1, 1, 1), 1),
    (2, 33, (9, 7), 16, (1, 1), (1, 1), (1, 1), (0, 0, 0, 0), 1),
    (5, 16, (9, 7), 33, (1, 1), (2, 2), (1, 1), (0, 0, 0, 0), 1),
    (2, 32, (15, 15), 16, (3, 3), (1, 1), (2, 2), (2, 2, 2, 2), 1),
    (1, 3, (11, 16), 33, (3, 2), (2, 1), (2, 3), (3, 0, 1, 2), 1),
    (2, 64, (10, 10), 64, (3, 3), (1, 1), (1, 1), (1, 1, 1, 1), 2),
    (2, 32, (11, 9), 64, (3, 3), (2, 2), (1, 1), (1, 0, 0, 1), 4),
    (1, 33, (8, 8), 33, (3, 3), (1, 1), (1, 1), (1, 1, 1, 1), 3),
    (2, 32, (12, 12), 32, (3, 3), (1, 1), (1, 1), (1, 1, 1, 1), 32),
    (2, 33, (13, 12), 33, (5, 5), (2, 2), (1, 1), (2, 1, 2, 1), 33),
    (1, 16, (12, 12), 16, (3, 3), (1, 1), (2, 2), (2, 2, 2, 2), 16),
    (2, 16, (7, 7), 32, (3, 3), (1, 1), (1, 1), (1, 1, 1, 1), 16),
    (1, 1, (1, 1), 1, (1, 1), (1, 1), (1, 1), (0, 0, 0, 0), 1),
    (1, 16, (1, 5), 16, (1, 3), (1, 1), (1, 1), (0, 0, 1, 1), 1),
    (2, 4, (3, 3), 5, (2, 2), (1, 1), (1, 1), (4, 3, 2, 5), 1),
]


def convolution_arrays(case: Any) -> tuple[Any, Any, dict[str, Any], Any]:
    n, c, image, o, kernel, strides, dilations, padding, groups = case
    x, w = plain((n, c, *image), 1), plain((o, c // groups, *kernel), 2)
    options = {"strides": strides, "dilations": dilations, "padding": padding, "groups": groups}
    y = TABLE["convolution"].meaning(x.astype(np.float64), w.astype(np.float64), **options)
    return x, w, options, y


@needs_library
@pytest.mark.parametrize("case", CONVOLUTIONS, ids=str)
def test_convolution_means_what_the_op_means(case: Any) -> None:
    x, w, options, y = convolution_arrays(case)
    dy = plain(y.shape, 3)
    x64, w64, dy64 = (array.astype(np.float64) for array in (x, w, dy))

    forward = Convolution("forward", x.shape, w.shape, **options)
    weights = run(forward.weights_in(), {"x": w}, "y")
    assert_close(run(forward, {"x": x, "w": weights}, "y"), y.astype(np.float32), what=str(forward))

    back = Convolution("backward_data", x.shape, w.shape, **options)
    dx = TABLE["convolution_input_gradient"].meaning(dy64, w64, shape=x.shape, **options)
    weights = run(back.weights_in(), {"x": w}, "y")
    assert_close(run(back, {"dy": dy, "w": weights}, "dx"), dx.astype(np.float32), what=str(back))

    gradient = Convolution("backward_weights", x.shape, w.shape, **options)
    dw = TABLE["convolution_weight_gradient"].meaning(x64, dy64, shape=w.shape, **options)
    chosen = run(gradient, {"x": x, "dy": dy}, "dw")
    actual = run(gradient.weights_out(), {"x": chosen}, "y").reshape(w.shape)
    assert_close(actual, dw.astype(np.float32), what=str(gradient))
    assert gradient.weights_bytes >= w.nbytes


@needs_library
def test_an_impossible_convolution_is_a_device_error() -> None:
    with pytest.raises(DeviceError, match=r"convolution forward \(1, 4, 8, 8\).*invalid arguments"):
        Convolution("forward", (1, 4, 8, 8), (4, 5, 3, 3))


# sgemm --------------------------------------------------------------------------------------------------------------

SIZES = [(32, 128, 784), (1, 128, 784), (7, 5, 3), (64, 64, 32), (1, 1, 1), (33, 17, 65), (128, 1, 16)]


@needs_library
@pytest.mark.parametrize("transposed", ["nn", "tn", "nt", "tt"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sgemm(size: tuple[int, int, int], transposed: str) -> None:
    m, n, k = size
    a, b = plain((m, k), 1), plain((k, n), 2)
    expected = TABLE["matmul"].meaning(a.astype(np.float64), b.astype(np.float64)).astype(np.float32)
    a_strides = (1, m) if transposed[0] == "t" else (k, 1)
    b_strides = (1, k) if transposed[1] == "t" else (n, 1)
    library = onednn.require()
    a_there, b_there = fill(Descriptor((m, k), a_strides), a), fill(Descriptor((k, n), b_strides), b)
    y = Memory(4 * m * n)
    with library.threads(1):
        library.call(
            "sgemm", transposed[0].encode(), transposed[1].encode(), m, n, k, 1.0,
            a_there.address, max(a_strides), b_there.address, max(b_strides), 0.0, y.address, n,
        )  # fmt: skip
    y.check("sgemm")
    assert_close(y.bytes.view(np.float32).reshape(m, n), expected)


# Descriptors and reorders -----------------------------------------------------------------------------------------


@needs_library
def test_descriptors_spell_their_layout() -> None:
    shape = (2, 33, 5, 7)
    assert str(Descriptor(shape)) == "abcd"
    assert str(Descriptor(shape, "channels_last")) == "acdb"
    assert Descriptor(shape, "channels_last").strides == (33 * 35, 1, 33 * 7, 33)
    assert Descriptor(shape) == Descriptor(shape, (33 * 35, 35, 7, 1))
    assert Descriptor(shape) != Descriptor(shape, "channels_last")
    assert Descriptor(shape) != "abcd"
    chosen = Convolution("forward", (2, 32, 8, 8), (32, 32, 5, 5)).weights
    assert chosen.blocks, "this is the format oneDNN has always chosen here"
    assert str(chosen).endswith("".join(f"{extent}{'abcd'[axis]}" for axis, extent in chosen.blocks))


@needs_library
@pytest.mark.parametrize("target", ["plain", "channels_last"])
def test_a_reorder_and_back(target: Any) -> None:
    x = plain((2, 33, 5, 7), 1)
    there, back = Descriptor(x.shape, target), Descriptor(x.shape)
    moved = run(Reorder(back, there), {"x": x}, "y")
    np.testing.assert_array_equal(run(Reorder(there, back), {"x": moved}, "y"), x)


@needs_library
def test_a_layout_without_strides_is_refused() -> None:
    with pytest.raises(DeviceError, match="layout 'diagonal' has no strides"):
        Descriptor((2, 3), "diagonal")  # type: ignore[arg-type]


# Native calls -----------------------------------------------------------------------------------------------------


def bound_reorder() -> tuple[Call, Any, Memory]:
    """y = x, column after column."""
    reorder = Reorder(Descriptor((3, 4)), Descriptor((3, 4), (1, 3)))
    x, y = plain((3, 4), 1), Memory(48)
    return reorder.bind(x=x.ctypes.data, y=y.address), x, y


NATIVE = """
define i32 @step(ptr %call) {
  %address1 = getelementptr i64, ptr %call, i64 1
  %address2 = getelementptr i64, ptr %call, i64 2
  %address3 = getelementptr i64, ptr %call, i64 3
  %address4 = getelementptr i64, ptr %call, i64 4
  %execute = load ptr, ptr %call
  %primitive = load ptr, ptr %address1
  %stream = load ptr, ptr %address2
  %count = load i32, ptr %address3
  %arguments = load ptr, ptr %address4
  %status = call i32 %execute(ptr %primitive, ptr %stream, i32 %count, ptr %arguments)
  ret i32 %status
}
define i32 @product(ptr %sgemm, ptr %a, ptr %b, ptr %y) {
  %status = call i32 %sgemm(i8 signext 78, i8 signext 84, i64 3, i64 4, i64 5, float 1.0, ptr %a, i64 5,
                            ptr %b, i64 5, float 1.0, ptr %y, i64 4)
  ret i32 %status
}
"""


@pytest.fixture(scope="module")
def native() -> Any:
    llvm = pytest.importorskip("llvmlite.binding")
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(jit=True)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(NATIVE), machine)
    engine.finalize_object()
    return engine


@needs_library
def test_native_code_executes_a_primitive_by_its_arguments(native: Any) -> None:
    call, x, y = bound_reorder()
    step = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(native.get_function_address("step"))
    assert call.native_arguments.dtype == np.int64
    assert step(call.native_arguments.ctypes.data) == 0
    np.testing.assert_array_equal(y.bytes.view(np.float32).reshape(4, 3), x.T)


@needs_library
def test_native_code_calls_sgemm(native: Any) -> None:
    a, b, y = plain((3, 5), 1), plain((4, 5), 2), plain((3, 4), 3)
    expected = a @ b.T + y
    product = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)(native.get_function_address("product"))
    assert product(onednn.require().sgemm, a.ctypes.data, b.ctypes.data, y.ctypes.data) == 0
    assert_close(y, expected)


@needs_library
def test_set_pointer_moves_a_role() -> None:
    call, x, y = bound_reorder()
    execute(call)
    other = Memory(y.bytes.size)
    call.set_pointer("y", other.address)
    y.bytes[:] = 0
    execute(call)
    np.testing.assert_array_equal(other.bytes.view(np.float32).reshape(4, 3), x.T)
    assert not y.bytes.any()


@needs_library
def test_addresses_that_do_not_fit_the_roles_are_refused() -> None:
    with pytest.raises(DeviceError, match=r"addresses for \['c', 'x'\], needed for \['x', 'y'"):
        Reorder(Descriptor((3, 4)), Descriptor((3, 4), (1, 3))).bind(x=0, c=0)


@needs_library
def test_threads_share_a_primitive_and_own_their_calls() -> None:
    convolution = Convolution("forward", (2, 16, 8, 8), (16, 16, 3, 3), padding=(1, 1, 1, 1))
    w = plain((16, 16, 3, 3), 1)
    weights = run(convolution.weights_in(), {"x": w}, "y")
    inputs = [plain((2, 16, 8, 8), seed) for seed in range(4)]
    results: dict[int, Any] = {}

    def work(number: int) -> None:
        for _ in range(20):
            results[number] = run(convolution, {"x": inputs[number], "w": weights}, "y")

    workers = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for number, x in enumerate(inputs):
        expected = TABLE["convolution"].meaning(x, w, strides=(1, 1), dilations=(1, 1), padding=(1, 1, 1, 1), groups=1)
        assert_close(results[number], expected)


@needs_library
def test_everything_is_destroyed(monkeypatch: pytest.MonkeyPatch) -> None:
    library = onednn.require()
    created: list[int] = []
    destroyed: list[int] = []
    create, destroyer = library.create, library.destroyer

    def counting_create(*arguments: Any, **options: Any) -> int:
        created.append(create(*arguments, **options))
        return created[-1]

    def counting_destroyer(name: str) -> Any:
        def destroy(handle: int) -> int:
            destroyed.append(handle)
            return destroyer(name)(handle)

        return destroy

    monkeypatch.setattr(library, "create", counting_create)
    monkeypatch.setattr(library, "destroyer", counting_destroyer)
    bound_reorder()
    Convolution("backward_data", (1, 3, 5, 5), (4, 3, 3, 3)).weights_in()
    Convolution("backward_weights", (1, 3, 5, 5), (4, 3, 3, 3))
    with pytest.raises(DeviceError):
        Convolution("forward", (1, 4, 8, 8), (4, 5, 3, 3))
    gc.collect()
    assert len(created) > 30
    assert sorted(created) == sorted(destroyed)


# Threads and loading ----------------------------------------------------------------------------------------------


@needs_library
def test_the_number_of_threads_belongs_to_the_calling_thread() -> None:
    library = onednn.require()
    if library.runtime != 2:
        pytest.skip("this oneDNN has no threads")
    get = ctypes.CFUNCTYPE(ctypes.c_int)(library.omp_get_max_threads)
    set_ = ctypes.CFUNCTYPE(None, ctypes.c_int)(library.omp_set_num_threads)
    before, seen = get(), []

    def work() -> None:
        set_(5)
        seen.append(get())

    with library.threads(3):
        worker = threading.Thread(target=work)
        worker.start()
        worker.join()
        assert (get(), seen) == (3, [5])
    assert get() == before


THREADS = """
{imports}
from mlcompute.devices.cpu.onednn import Convolution, OneDNN
threads, sizes = OneDNN.threads, []
for count in (1, 4):
    OneDNN.threads = lambda self, _: threads(self, count)
    sizes.append(Convolution("backward_weights", (2, 4, 3, 3), (5, 4, 2, 2), padding=(4, 3, 2, 5)).scratchpad_bytes)
print(sizes)
assert sizes[0] < sizes[1]
"""


@needs_library
@pytest.mark.parametrize("imports", ["", "import torch"], ids=["alone", "after torch"])
def test_threads_reach_the_openmp_that_onednn_uses(imports: str) -> None:
    # Here windows are copied out for a gemm, by each thread for itself: the scratchpad shows how many oneDNN saw.
    subprocess.run([sys.executable, "-c", THREADS.format(imports=imports)], check=True, timeout=120)


def reason(**environment: str) -> str:
    code = "from mlcompute.devices.cpu import onednn; assert onednn.load() is None; print(onednn.why_missing())"
    ran = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_why_missing_names_the_file_that_was_asked_for(tmp_path: Any) -> None:
    missing = tmp_path / "libdnnl.so.3"
    assert f"{missing}: cannot open shared object file" in reason(MLCOMPUTE_ONEDNN=str(missing))
    missing.write_bytes(b"not a library")
    damaged = reason(MLCOMPUTE_ONEDNN=str(missing))
    assert f"{missing}: " in damaged
    assert damaged.count(str(missing)) == 1


def test_onednn_can_be_switched_off() -> None:
    assert "switched off, MLCOMPUTE_ONEDNN is empty" in reason(MLCOMPUTE_ONEDNN="")


@pytest.mark.skipif(sys.platform != "linux", reason="the C library has another name elsewhere")
def test_another_library_is_refused() -> None:
    assert "not a oneDNN library" in reason(MLCOMPUTE_ONEDNN="libc.so.6")


def test_a_missing_openmp_says_what_to_install() -> None:
    error = "libgomp.so.1: cannot open shared object file: No such file or directory"
    assert "apt install libgomp1" in library_file._advice("/somewhere/libdnnl.so.3", error)


def test_without_a_wheel_the_system_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLCOMPUTE_ONEDNN", raising=False)
    monkeypatch.setattr(sys, "path", ["", "/nowhere"])
    name, *_ = library_file._candidates()
    assert "pip install onednn-cpu-gomp" in library_file._advice(name, "cannot open shared object file")


def test_what_needs_onednn_says_why_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_file, "_load", lambda: (None, "oneDNN cannot be used: no file"))
    assert onednn.load() is None
    with pytest.raises(DeviceError, match="no file"):
        onednn.require()
