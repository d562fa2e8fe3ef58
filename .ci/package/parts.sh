# The steps of a release that need no build. `.ci/release` runs them on what it has built, and tests/integration/packages.rs on files
# that stand for it. Source this file in the root of the repository, under `set -euo pipefail`.

fail() {
    echo "error: $1" >&2
    exit 1
}

# package_version: prints the version in Cargo.toml.
package_version() {
    sed -n 's/^version = "\(.*\)"$/\1/p' Cargo.toml | head -1
}

# pack FOLDER ARCHIVE: the same files give the same archive. SOURCE_DATE_EPOCH is their time.
pack() {
    tar -C "$(dirname "$1")" --sort=name --owner=0 --group=0 --numeric-owner --mode=u=rwX,go=rX --mtime="@$SOURCE_DATE_EPOCH" \
        -cf - "$(basename "$1")" | gzip -9n > "$2"
}

# archive BINARY NOTICES NAME FOLDER: makes FOLDER/NAME.tar.gz with the program, its license, those of its dependencies, and the
# unit for systemd.
archive() {
    local staged
    staged=$(mktemp -d)
    mkdir "$staged/$3"
    install -m 755 "$1" "$staged/$3/skep"
    install -m 644 "$2" "$staged/$3/THIRD-PARTY.txt"
    install -m 644 LICENSE .ci/package/skep.service "$staged/$3/"
    pack "$staged/$3" "$4/$3.tar.gz"
    rm -rf "$staged"
}

# container BINARY NOTICES NAME FOLDER: makes FOLDER/NAME.tar.gz with the folder from which a container engine builds the image.
container() {
    local staged roots=${CA_CERTIFICATES:-/etc/ssl/certs/ca-certificates.crt}
    [ -s "$roots" ] || fail "the image needs this machine's roots of trust, and $roots is missing: install ca-certificates"
    staged=$(mktemp -d)
    mkdir -p "$staged/$3/empty"
    install -m 755 "$1" "$staged/$3/skep"
    install -m 644 "$2" "$staged/$3/THIRD-PARTY.txt"
    install -m 644 LICENSE .ci/package/Containerfile "$staged/$3/"
    echo "LABEL org.opencontainers.image.version=\"$(package_version)\"" >> "$staged/$3/Containerfile"
    install -m 644 "$roots" "$staged/$3/ca-certificates.crt"
    pack "$staged/$3" "$4/$3.tar.gz"
    rm -rf "$staged"
}

# sums FOLDER: lists the digests of all files in SHA256SUMS, and checks them as a user does.
sums() (
    cd "$1"
    rm -f SHA256SUMS
    sha256sum -- * > SHA256SUMS
    sha256sum --check --strict --quiet SHA256SUMS
    [ "$(wc -l < SHA256SUMS)" -eq "$(find . -mindepth 1 -not -name SHA256SUMS | wc -l)" ] || fail "SHA256SUMS does not list every file"
)

# tiny_model FOLDER: makes a model that is small enough to be tried anywhere.
tiny_model() {
    mkdir -p "$1"
    cp tests/fixtures/tiny/llama-gqa/{config.json,model.safetensors} "$1/"
    cp tests/fixtures/tokenizer/byte-level-chatml.json "$1/tokenizer.json"
}

# try_binary BINARY: serves an agent in an environment without anything else, not even a PATH or certificate authorities.
try_binary() (
    folder=$(mktemp -d)
    host=
    finish() {
        [ -z "$host" ] || kill -KILL "$host" 2>/dev/null || true
        rm -rf "$folder"
    }
    trap finish EXIT
    tiny_model "$folder/tiny"
    : > "$folder/log"
    alone=(env -i "HOME=$folder" PATH=/nonexistent SSL_CERT_FILE=/nonexistent "$1")
    "${alone[@]}" up --listen 127.0.0.1:0 --model "$folder/tiny" --log-level error > "$folder/log" &
    host=$!
    tenths=0
    until url=$(grep -o 'http://[0-9.:]*' -m1 "$folder/log"); do
        kill -0 "$host" 2>/dev/null || fail "$1 does not start a host"
        [ $((tenths += 1)) -lt 1200 ] || fail "$1 has not started a host within two minutes"
        sleep 0.1
    done
    "${alone[@]}" health --url "$url"
    "${alone[@]}" deploy tests/fixtures/upgrade/0.1.0/hello.wasm --manifest examples/hello/agent.toml --url "$url"
    "${alone[@]}" invoke hello 'Hello.' --url "$url" > "$folder/answer"
    grep -aq '(visit 1)' "$folder/answer" || fail "$1 answers something else: $(cat "$folder/answer")"
    kill -TERM "$host"
    wait "$host" || fail "$1 does not stop cleanly"
    host=
)

# try_image FOLDER [ARGUMENT]…: tries the image that is built from this folder (.ci/package/try-image), with the container engine of
# this machine, or else with a podman that is fetched. The status is 75 if neither works here.
try_image() {
    local engine
    for engine in podman docker; do
        if "$engine" ps > /dev/null 2>&1; then
            .ci/package/try-image "$engine" "$@"
            return
        fi
    done
    .ci/with-podman .ci/package/try-image podman "$@"
}
