#!/bin/sh
# Builds the core's own tests and runs them: native/tests/run.sh [address,undefined | thread]
set -eu
cd "$(dirname "$0")/../.."
sanitizers=${1:-}
build=build/core-tests${sanitizers:+-$(echo "$sanitizers" | tr , -)}

output=$(cmake -S . -B "$build" -DGRADWIRE_TESTS=ON -DGRADWIRE_SANITIZE="$sanitizers" -DCMAKE_BUILD_TYPE=RelWithDebInfo \
    -DCMAKE_CXX_FLAGS_RELWITHDEBINFO="-O1 -g" 2>&1 && cmake --build "$build" --parallel 2 2>&1) || { echo "$output"; exit 1; }

# ThreadSanitizer does not work with the address-space randomisation of some kernels.
fixed=
if [ "$sanitizers" = thread ] && setarch -R true 2>/dev/null; then fixed="setarch -R"; fi
export ASAN_OPTIONS=detect_stack_use_after_return=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 TSAN_OPTIONS=halt_on_error=1
for source in native/tests/*.cpp; do
    name=$(basename "$source" .cpp)
    echo "$name${sanitizers:+ ($sanitizers)}"
    $fixed "$build/$name"
done
