#!/usr/bin/env bash
# Builds kube-apiserver and kube-controller-manager 1.20.2 for tests/launch/test_kubernetes.py, from the source package that Debian 12
# (bookworm) has of them, with all that they need in it. Takes about ten minutes on two cores and 4 GB below TMPDIR (/tmp), which are
# freed again. Needs Debian 12, and its packages golang-go, make, gcc, rsync, jq, patch and dpkg-dev; no root.
#
#   kubernetes_build.sh FOLDER     puts both into FOLDER
set -euo pipefail

readonly PACKAGES=(golang-go make gcc rsync jq dpkg-dev patch) PROGRAMS=(go make gcc rsync jq dpkg-source patch apt-get)
readonly NAMES=(kube-apiserver kube-controller-manager)
changes="$(cd "$(dirname "$0")" && pwd)/kubernetes_go1.19.patch"
readonly changes

fail() {
    echo "kubernetes_build.sh: $*" >&2
    exit 1
}

[[ $# == 1 ]] || fail "expected one argument, the folder for the programs; found $#"
for program in "${PROGRAMS[@]}"; do
    command -v "${program}" > /dev/null || fail "${program} is not on PATH: apt-get install ${PACKAGES[*]}"
done
mkdir -p "$1"
folder="$(cd "$1" && pwd)"
work="$(mktemp -d)"
trap 'chmod -R u+w "${work}"; rm -rf "${work}"' EXIT

# The machine's own mirrors, asked for sources, with lists and cache of this run alone: apt's configuration stays as it is.
mkdir -p "${work}"/{sources,lists/partial,cache/archives/partial,home}
for file in /etc/apt/sources.list /etc/apt/sources.list.d/*.list; do
    [[ ! -f "${file}" ]] || sed -n 's/^deb\(-src\)\? /deb-src /p' "${file}" > "${work}/sources/$(basename "${file%.list}").list"
done
for file in /etc/apt/sources.list.d/*.sources; do
    [[ ! -f "${file}" ]] || sed 's/^Types:.*/Types: deb-src/' "${file}" > "${work}/sources/$(basename "${file}")"
done
cat > "${work}/apt.conf" << END
Dir::Etc::sourcelist "/dev/null";
Dir::Etc::sourceparts "${work}/sources";
Dir::State::lists "${work}/lists";
Dir::Cache "${work}/cache";
APT::Sandbox::User "";
#clear APT::Update::Pre-Invoke;
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
END
cd "${work}"
apt-get -c "${work}/apt.conf" -q update || fail "apt-get update did not reach the machine's mirrors"
apt-get -c "${work}/apt.conf" -q source --download-only kubernetes ||
    fail "the machine's mirrors have no source package kubernetes"
dpkg-source --no-check -x kubernetes_*1.20*.dsc source > /dev/null ||
    fail "expected Debian 12's source package of Kubernetes 1.20, found: $(ls kubernetes_*)"

# As Debian's own rules do it, less the programs that no test needs.
cd source
patch -p1 < "${changes}"
mkdir -p .go/src/k8s.io
ln -sfn ../../.. .go/src/k8s.io/kubernetes
export HOME="${work}/home" GOPATH="${PWD}/.go" CGO_ENABLED=0 GOFLAGS=-mod=vendor GOPROXY=off
export KUBE_GIT_VERSION=v1.20.2 KUBE_GIT_COMMIT=none KUBE_GIT_TREE_STATE=clean
make WHAT="${NAMES[*]/#/cmd/}" || fail "the build failed; its output is above"
for name in "${NAMES[@]}"; do
    install -m 755 "_output/bin/${name}" "${folder}/${name}"
    "${folder}/${name}" --version
done
