#!/bin/sh
# Installs a build into a scratch folder, moves that elsewhere, and builds and runs
# examples/project against it, once through CMake's package and once through pkg-config.
# Usage: test_installed.sh CMAKE SOURCE_DIR BUILD_DIR LIBDIR SCRATCH_DIR
set -eu
cmake=$1 source=$2 build=$3 libdir=$4 scratch=$5
warnings="-Wall -Wextra -Werror -pedantic"

rm -rf "$scratch"
mkdir -p "$scratch"
"$cmake" --install "$build" --prefix "$scratch/first" >"$scratch/install.log"
mv "$scratch/first" "$scratch/prefix"
prefix=$scratch/prefix

"$cmake" -S "$source/examples/project" -B "$scratch/cmake" -DCMAKE_PREFIX_PATH="$prefix" \
  -DCMAKE_C_FLAGS="$warnings" -DCMAKE_CXX_FLAGS="$warnings" >"$scratch/cmake.log"
"$cmake" --build "$scratch/cmake" >>"$scratch/cmake.log"
"$scratch/cmake/attention_c"
"$scratch/cmake/attention_cpp"

cp -r "$source/examples/project" "$scratch/make"
PKG_CONFIG_PATH=$prefix/$libdir/pkgconfig make -s -C "$scratch/make" CFLAGS="$warnings"
LD_LIBRARY_PATH=$prefix/$libdir "$scratch/make/attention_c"
LD_LIBRARY_PATH=$prefix/$libdir "$scratch/make/attention_cpp"

# The installed program finds its library without help: its loader asks /proc where it lies.
if [ -e /proc/self/exe ]; then
  "$prefix/bin/fa3" --version
else
  echo "skipped: the installed program alone, as /proc is not mounted"
fi
