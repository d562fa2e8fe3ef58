#!/usr/bin/env bash
# Packs what measures and tests a GPU, for a machine that has no Rust: `skep`, the tests of the kernels, and those of tiny models with
# their files. The machine needs NVRTC and cuBLASLt where its loader finds them.
#
#     kernels/bench/pack.sh gpu.tar.xz              # about 35 MB, with the binaries of target/debug and target/release
#     tar xf gpu.tar.xz && gpu/run tests models suite kernels
#
# The tests read the files of tiny models at the path of this checkout, to which `run` makes a link if nothing is there.
set -euo pipefail
out=$(realpath -m "${1:?the archive to write, such as gpu.tar.xz}")
root=$(cd "$(dirname "$0")/../.." && pwd)
cd "$root"

cargo build --release -p skep-cli
# Features are those of the whole workspace, so that nothing is built twice.
tests=$(cargo test --workspace --no-run --message-format json 2>/dev/null |
    python3 -c '
import json, sys
for line in sys.stdin:
    message = json.loads(line)
    name = message.get("target", {}).get("name")
    if message.get("executable") and message["profile"]["test"] and name in ("skep_kernels", "skep_model"):
        print(name, message["executable"])
')

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
mkdir -p "$folder/gpu/tiny"
cp target/release/skep "$folder/gpu/skep"
while read -r name path; do cp "$path" "$folder/gpu/$name"; done <<<"$tests"
strip "$folder"/gpu/*skep*
for model in llama-gqa llama-tied-rope3 qwen2-bias mistral-window; do cp -r "tests/fixtures/tiny/$model" "$folder/gpu/tiny/"; done
cat >"$folder/gpu/run" <<RUN
#!/usr/bin/env bash
# Usage: run PART..., of: tests models suite kernels memcheck racecheck synccheck
set -u
root=$root
RUN
cat >>"$folder/gpu/run" <<'RUN'
here=$(cd "$(dirname "$0")" && pwd)
export SKEP_REQUIRE_GPU=1 SKEP_CUBINS=$here/cubins
if [ ! -e "$root" ]; then
    mkdir -p "$root/tests/fixtures" "$root/host/model" "$root/kernels"
    ln -s "$here/tiny" "$root/tests/fixtures/tiny"
fi
[ -d "$SKEP_CUBINS" ] || "$here/skep" kernels build --out "$SKEP_CUBINS" --arch "${SKEP_ARCH:-sm_90a}"
skips="--skip compile_tests --skip shipped --skip loading --skip cubin::"
for part in "$@"; do
    begun=$SECONDS
    case $part in
        tests) "$here/skep_kernels" cuda:: $skips ;;
        models) "$here/skep_model" the_tests_of_devices_pass_on_a_real_device --nocapture ;;
        suite) "$here/skep" bench engine --suite --device cuda ;;
        kernels) "$here/skep" bench kernels --device cuda ;;
        memcheck | racecheck | synccheck)
            compute-sanitizer --tool "$part" --error-exitcode 9 "$here/skep_kernels" cuda:: $skips --skip ceilings --skip rates
            ;;
        *) echo "there is no part $part" >&2 && exit 2 ;;
    esac
    echo "=== $part: status $?, $((SECONDS - begun)) s"
done
RUN
chmod +x "$folder/gpu/run"
tar -C "$folder" -cJf "$out" gpu
du -h "$out"
