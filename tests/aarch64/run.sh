#!/usr/bin/env bash
# The native CPU engine on aarch64 Linux, emulated: tests/aarch64/run.sh [FOLDER] [pytest arguments]
#
# Sets up a Debian arm64 file tree with Python, oneDNN and the library's wheels in FOLDER (0.5 GB, once; as root, with the Debian
# packages mmdebstrap and qemu-user-static, and unzip), then runs the self-test with and without oneDNN, and the tests of
# kernels and threads that need neither PyTorch nor other processes. Emulation is 20 to 50 times slower than a real machine: half an hour
# of a quiet core, or more. Arguments name other tests: tests/aarch64/run.sh FOLDER tests/devices/test_cpu_pooling.py. On a real aarch64
# machine, `make test` runs everything.
set -euo pipefail
folder=$(realpath -m "${1:-$HOME/.cache/mlcompute-aarch64}")
shift || true
root=$(cd "$(dirname "$0")/../.." && pwd)
python_version=3.13
tree=$folder/debian
site=$folder/site

for tool in mmdebstrap qemu-aarch64-static unzip; do
    command -v "$tool" > /dev/null || { echo "$tool is missing: apt-get install mmdebstrap qemu-user-static unzip"; exit 1; }
done
if [ ! -e "$tree/usr/bin/python$python_version" ]; then
    mkdir -p "$folder"
    # Unpacked, not installed: that needs no emulator registered with the kernel.
    mmdebstrap --quiet --variant=extract --arch=arm64 --include=python3,libgomp1,libdnnl3.6,libstdc++6 trixie "$tree"
    ln -sfn usr/lib "$tree/lib"
fi
if [ ! -e "$site/pytest" ]; then
    platforms=(--platform manylinux2014_aarch64 --platform manylinux_2_27_aarch64 --platform manylinux_2_28_aarch64)
    "${PYTHON:-python3}" -m pip download --quiet --dest "$folder/wheels" "${platforms[@]}" --python-version "$python_version" \
        --only-binary=:all: "llvmlite>=0.50,<0.51" ml_dtypes numpy "safetensors>=0.8" rich pytest hypothesis
    for wheel in "$folder"/wheels/*.whl; do unzip -q -o "$wheel" -d "$site"; done
fi

emulated() {
    PYTHONPATH=$root:$site MLCOMPUTE_CACHE=$folder/kernels MLCOMPUTE_NUM_THREADS=2 nice qemu-aarch64-static -L "$tree" \
        -E "LD_LIBRARY_PATH=$tree/usr/lib/aarch64-linux-gnu" "$tree/usr/bin/python$python_version" -P "$@"
}

cd "$root"
if [ $# -gt 0 ]; then
    emulated -m pytest -p no:cacheprovider "$@"
    exit
fi
emulated -c "import platform; assert platform.machine() == 'aarch64'; import mlcompute as mlc; print(mlc.Platform.describe())"
emulated -m mlcompute.debug.self_test
MLCOMPUTE_ONEDNN="" emulated -m mlcompute.debug.self_test
emulated -m pytest -q -p no:cacheprovider -m "not slow" tests/devices/test_cpu_schedule.py tests/devices/test_cpu_ordering.py \
    tests/devices/test_cpu_gemm.py tests/devices/test_cpu_convolution.py tests/devices/test_cpu_winograd.py \
    tests/devices/test_cpu_math.py tests/devices/test_cpu_elementwise.py
