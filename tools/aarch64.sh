#!/bin/sh
# The kernels for aarch64 on another machine: cross-compiled, and tests/backends run under emulation on two processors,
# with and without the dot-product instructions. Arguments go to pytest instead of tests/backends.
#
# Needs Debian's g++-aarch64-linux-gnu, qemu-user-static and debootstrap, a .venv of Python 3.11 (`make build`), and
# root for debootstrap. Debian's Python for aarch64 is unpacked to build/aarch64, not installed.
set -eu
cd "$(dirname "$0")/.."
work=$PWD/build/aarch64 python=$PWD/.venv/bin/python
root=$work/root site=$work/site

if [ ! -e "$root/usr/include/python3.11" ]; then
  debootstrap --foreign --arch=arm64 --variant=minbase --include=python3,libpython3.11-dev,libstdc++6 bookworm "$root"
  for package in "$root"/var/cache/apt/archives/*.deb; do dpkg -x "$package" "$root"; done
fi
if [ ! -e "$site/numpy" ]; then
  "$python" -m pip install --quiet --target "$site" --python-version 3.11 --only-binary=:all: \
    --platform manylinux_2_28_aarch64 --platform manylinux_2_27_aarch64 --platform manylinux2014_aarch64 \
    numpy pytest hypothesis
fi

"$python" -m cmake -S . -B "$work/make" -G Ninja -DSKBUILD=1 -DSKBUILD_SOABI=cpython-311-aarch64-linux-gnu \
  -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ \
  -DCMAKE_CXX_FLAGS="-idirafter $root/usr/include" -DCMAKE_MAKE_PROGRAM="$PWD/.venv/bin/ninja" \
  -DPython_EXECUTABLE="$python" -DPython_INCLUDE_DIR="$root/usr/include/python3.11" \
  -Dnanobind_DIR="$("$python" -m nanobind --cmake_dir)" > "$work/cmake.log"
"$python" -m cmake --build "$work/make"
rm -rf "$work/src" && cp -r src "$work/src" && rm -f "$work"/src/octavo/_native.*.so
cp "$work"/make/_native.*.so "$work/src/octavo"

for processor in max cortex-a72; do
  PYTHONPATH=$work/src:$site PYTHONDONTWRITEBYTECODE=1 qemu-aarch64-static -cpu $processor -L "$root" \
    "$root/usr/bin/python3.11" -m pytest -q -p no:cacheprovider "${@:-tests/backends}"
done
