"""oneDNN against the NumPy meanings of the op table."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mlcompute.devices.cpu import onednn
from mlcompute.devices.cpu.onednn import Call, Convolution, Descriptor, Matmul, Primitive, Reorder
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


def run(primitive: Primitive, inputs: dict[str, Any], result: str, keep: dict[str, Memory] | None = None) -> Any:
    """Run a primitive with strided arrays for its inputs (or Memory); the result as an array."""
    memories: dict[str, Memory] = {}
    for role, descriptor in primitive.descriptors.items():
        given = inputs.get(role)
        if given is None:
            memories[role] = Memory(descriptor.nbytes)
        else:
            memories[role] = given if isinstance(given, Memory) else fill(descriptor, given)
    primitive.bind(**{role: memory.address for role, memory in memories.items()}).run()
    for role, memory in memories.items():
        memory.check(f"{primitive}: {role}")
    if keep is not None:
        keep.update(memories)
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
LAYOUTS: list[dict[str, Any]] = [
    {},
    {"w_layout": "plain"},
    {"x_layout": "plain", "y_layout": "plain"},
]


def convolution_arrays(case: Any) -> tuple[Any, Any, dict[str, Any], Any]:
    n, c, image, o, kernel, strides, dilations, padding, groups = case
    x, w = plain((n, c, *image), 1), plain((o, c // groups, *kernel), 2)
    options = {"strides": strides, "dilations": dilations, "padding": padding, "groups": groups}
    y = TABLE["convolution"].meaning(x.astype(np.float64), w.astype(np.float64), **options)
    return x, w, options, y


@needs_library
@pytest.mark.parametrize("layouts", LAYOUTS, ids=["channels last", "plain weights", "plain images"])
@pytest.mark.parametrize("case", CONVOLUTIONS, ids=str)
def test_convolution_means_what_the_op_means(case: Any, layouts: dict[str, Any]) -> None:
    x, w, options, y = convolution_arrays(case)
    dy = plain(y.shape, 3)
    x64, w64, dy64 = (array.astype(np.float64) for array in (x, w, dy))

    forward = Convolution("forward", x.shape, w.shape, **options, **layouts)
    weights = run(forward.weights_in(), {"x": w}, "y")
    assert_close(run(forward, {"x": x, "w": weights}, "y"), y.astype(np.float32), what=str(forward))

    back = Convolution("backward_data", x.shape, w.shape, **options, **layouts)
    dx = TABLE["convolution_input_gradient"].meaning(dy64, w64, shape=x.shape, **options)
    weights = run(back.weights_in(), {"x": w}, "y")
    assert_close(run(back, {"dy": dy, "w": weights}, "dx"), dx.astype(np.float32), what=str(back))

    gradient = Convolution("backward_weights", x.shape, w.shape, **options, **layouts)
    dw = TABLE["convolution_weight_gradient"].meaning(x64, dy64, shape=w.shape, **options)
    chosen = run(gradient, {"x": x, "dy": dy}, "dw")
    actual = run(gradient.weights_out(), {"x": chosen}, "y").reshape(w.shape)
    assert_close(actual, dw.astype(np.float32), what=str(gradient))
    assert gradient.weights_bytes >= w.nbytes


@needs_library
def test_bias_activation_and_accumulation_join_the_convolution() -> None:
    x, w, options, y = convolution_arrays(CONVOLUTIONS[1])
    b, before = plain((64,), 4), plain(y.shape, 5)
    fused = Convolution(
        "forward", x.shape, w.shape, **options, bias=True, accumulate=True, activation=("relu", 0.0, 0.0)
    )
    weights = run(fused.weights_in(), {"x": w}, "y")
    actual = run(fused, {"x": x, "w": weights, "b": b, "y": before}, "y")
    assert_close(actual, np.maximum(y + b[:, None, None] + before, 0).astype(np.float32))

    dy = plain(y.shape, 3)
    gradient = Convolution("backward_weights", x.shape, w.shape, **options, bias=True)
    keep: dict[str, Memory] = {}
    run(gradient, {"x": x, "dy": dy}, "dw", keep)
    db = view(gradient.descriptors["db"], keep["db"])
    assert_close(db, dy.sum(axis=(0, 2, 3), dtype=np.float64).astype(np.float32))


@needs_library
def test_activations_in_blocks_of_channels() -> None:
    x, w, options, y = convolution_arrays(CONVOLUTIONS[6])  # 33 channels: the last block is padded
    forward = Convolution("forward", x.shape, w.shape, **options, x_layout="aBcd16b", y_layout="aBcd16b")
    x_blocked = run(Reorder(Descriptor(x.shape), forward.descriptors["x"]), {"x": x}, "y")
    weights = run(forward.weights_in(), {"x": w}, "y")
    blocked = run(forward, {"x": x_blocked, "w": weights}, "y")
    actual = run(Reorder(forward.descriptors["y"], Descriptor(y.shape)), {"x": blocked}, "y")
    assert_close(actual, y.astype(np.float32))


@needs_library
def test_an_impossible_convolution_is_a_device_error() -> None:
    with pytest.raises(DeviceError, match=r"convolution forward \(1, 4, 8, 8\).*invalid arguments"):
        Convolution("forward", (1, 4, 8, 8), (4, 5, 3, 3))


# Matrix products --------------------------------------------------------------------------------------------------

PRODUCTS = [(32, 128, 784), (1, 128, 784), (7, 5, 3), (64, 64, 32), (1, 1, 1), (33, 17, 65), (128, 1, 16)]


@needs_library
@pytest.mark.parametrize("transposed", ["nn", "tn", "nt", "tt"])
@pytest.mark.parametrize("size", PRODUCTS, ids=str)
def test_products(size: tuple[int, int, int], transposed: str) -> None:
    m, n, k = size
    a, b = plain((m, k), 1), plain((k, n), 2)
    expected = TABLE["matmul"].meaning(a.astype(np.float64), b.astype(np.float64)).astype(np.float32)
    a_strides = (1, m) if transposed[0] == "t" else (k, 1)
    b_strides = (1, k) if transposed[1] == "t" else (n, 1)
    product = Matmul((m, k), (k, n), a_layout=a_strides, b_layout=b_strides)
    assert_close(run(product, {"a": a, "b": b}, "y"), expected, what=str(product))

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


@needs_library
def test_a_product_with_bias_and_activation() -> None:
    a, b, bias = plain((5, 7), 1), plain((7, 9), 2), plain((1, 9), 3)
    functions: dict[str, Callable[[Any], Any]] = {
        "relu": lambda v: np.maximum(v, 0),
        "tanh": np.tanh,
        "sigmoid": lambda v: 1 / (1 + np.exp(-v)),
        "linear": lambda v: 2 * v + 3,
    }
    for name, function in functions.items():
        alpha, beta = (2.0, 3.0) if name == "linear" else (0.0, 0.0)
        product = Matmul((5, 7), (7, 9), bias=(1, 9), activation=(name, alpha, beta))
        # oneDNN's own tanh and exp are good to a few units in the last place.
        assert_close(run(product, {"a": a, "b": b, "bias": bias}, "y"), function(a @ b + bias), scale=4, what=name)


@needs_library
def test_products_of_many_matrices() -> None:
    a, b, y = plain((3, 4, 5, 6), 1), plain((3, 1, 6, 2), 2), plain((3, 4, 5, 2), 3)
    product = Matmul(a.shape, b.shape, accumulate=True)
    assert_close(run(product, {"a": a, "b": b, "y": y}, "y"), a @ b + y)


# Descriptors and reorders -----------------------------------------------------------------------------------------


@needs_library
def test_descriptors_spell_their_layout() -> None:
    shape = (2, 33, 5, 7)
    assert str(Descriptor(shape)) == "abcd"
    assert str(Descriptor(shape, "channels_last")) == "acdb"
    assert Descriptor(shape, "channels_last").strides == (33 * 35, 1, 33 * 7, 33)
    blocked = Descriptor(shape, "aBcd16b")
    assert (str(blocked), blocked.blocks, blocked.shape) == ("aBcd16b", ((1, 16),), shape)
    assert blocked.nbytes == 2 * 48 * 5 * 7 * 4
    assert str(Descriptor(shape, "aBcd8b")) == "aBcd8b"
    assert Descriptor(shape) == Descriptor(shape, (33 * 35, 35, 7, 1))
    assert Descriptor(shape) != blocked
    assert Descriptor(shape) != "abcd"


@needs_library
@pytest.mark.parametrize("target", ["plain", "channels_last", "aBcd16b"])
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


def bound_product(m: int = 3, n: int = 4, k: int = 5) -> tuple[Call, Any, Any, Memory]:
    product = Matmul((m, k), (k, n))
    a, b = plain((m, k), 1), plain((k, n), 2)
    y, scratch = Memory(4 * m * n), Memory(product.scratchpad_bytes)
    call = product.bind(a=a.ctypes.data, b=b.ctypes.data, y=y.address, scratchpad=scratch.address)
    call.scratch = scratch  # type: ignore[attr-defined]
    return call, a, b, y


NATIVE = """
define i32 @step(ptr %words, ptr %set, ptr %memory, ptr %address) {
  %moved = call i32 %set(ptr %memory, ptr %address)
  %place1 = getelementptr i64, ptr %words, i64 1
  %place2 = getelementptr i64, ptr %words, i64 2
  %place3 = getelementptr i64, ptr %words, i64 3
  %place4 = getelementptr i64, ptr %words, i64 4
  %execute = load ptr, ptr %words
  %primitive = load ptr, ptr %place1
  %stream = load ptr, ptr %place2
  %count = load i32, ptr %place3
  %arguments = load ptr, ptr %place4
  %ran = call i32 %execute(ptr %primitive, ptr %stream, i32 %count, ptr %arguments)
  %status = or i32 %moved, %ran
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
def test_native_code_executes_a_primitive_by_its_words(native: Any) -> None:
    library = onednn.require()
    call, a, b, y = bound_product()
    moved = 2 * a
    step = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)(native.get_function_address("step"))
    assert call.words.dtype == np.int64
    assert step(call.words.ctypes.data, library.set_data_handle, call.memory("a"), moved.ctypes.data) == 0
    assert_close(y.bytes.view(np.float32).reshape(3, 4), moved @ b)


@needs_library
def test_native_code_calls_sgemm(native: Any) -> None:
    a, b, y = plain((3, 5), 1), plain((4, 5), 2), plain((3, 4), 3)
    expected = a @ b.T + y
    product = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)(native.get_function_address("product"))
    assert product(onednn.require().sgemm, a.ctypes.data, b.ctypes.data, y.ctypes.data) == 0
    assert_close(y, expected)


@needs_library
def test_set_pointer_moves_a_role() -> None:
    call, a, b, y = bound_product()
    call.run()
    other = Memory(y.bytes.size)
    call.set_pointer("y", other.address)
    y.bytes[:] = 0
    call.run()
    assert_close(other.bytes.view(np.float32).reshape(3, 4), a @ b)
    assert not y.bytes.any()


@needs_library
def test_addresses_that_do_not_fit_the_roles_are_refused() -> None:
    with pytest.raises(DeviceError, match=r"addresses for \['a', 'c'\], needed for \['a', 'b', 'y'"):
        Matmul((2, 3), (3, 4)).bind(a=0, c=0)


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
    bound_product()
    Convolution("backward_data", (1, 3, 5, 5), (4, 3, 3, 3)).weights_in()
    Convolution("backward_weights", (1, 3, 5, 5), (4, 3, 3, 3))
    Matmul((2, 3), (3, 4), bias=(1, 4), activation=("relu", 0.0, 0.0))
    with pytest.raises(DeviceError):
        Matmul((2, 3), (4, 5))
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
from mlcompute.devices.cpu.onednn import Convolution
layouts = dict(x_layout="plain", w_layout="plain", y_layout="plain")
one, four = (
    Convolution("forward", (8, 16, 16, 16), (16, 16, 3, 3), **layouts, threads=threads).scratchpad_bytes
    for threads in (1, 4)
)
print(one, four)
assert one < four
"""


@needs_library
@pytest.mark.parametrize("imports", ["", "import torch"], ids=["alone", "after torch"])
def test_threads_reach_the_openmp_that_onednn_uses(imports: str) -> None:
    # In plain layouts windows are copied out for a product, by each thread for itself: the working memory shows
    # how many threads oneDNN saw.
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
    [name] = library_file._candidates()
    assert "pip install onednn-cpu-gomp" in library_file._advice(name, "cannot open shared object file")


def test_what_needs_onednn_says_why_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_file, "_load", lambda: (None, "oneDNN cannot be used: no file"))
    assert onednn.load() is None
    with pytest.raises(DeviceError, match="no file"):
        onednn.require()
