#!/usr/bin/env bash
# Builds what the lab's guest boots from, once: qemu, a kernel, a root filesystem and an initrd. Nothing is installed on
# this machine: packages are downloaded by its own apt, unpacked into the cache, and the root made by debootstrap there.
#
#   setup.sh CACHE    ends with 0, or with 75 and the reason on standard output when this machine cannot have the lab
#
# CACHE/ready is whole or absent; it is built anew when a file that it was built from has changed. One at a time: run.sh
# holds the lock.
set -euo pipefail

SUITE=bookworm # the guest loads this machine's Python and native core, so that its libraries must be as new
QEMU=qemu-system-x86_64
# rdma-core and libucx0 bring the verbs and the UCX over them; the libraries are what a Python is usually linked with.
PACKAGES=(rdma-core ibverbs-providers libucx0 iproute2 kmod procps libgomp1 libnuma1 libstdc++6 libssl3 libsqlite3-0
  libffi8 libbz2-1.0 liblzma5 libreadline8 zlib1g python3)
MODULES=(virtio_pci virtio_net 9p 9pnet_virtio overlay virtio_rng)

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cache=$1
log=$cache/setup.log
built=$cache/building
APT=(-qq -o APT::Sandbox::User=root -o Acquire::Retries=2 -o Acquire::http::Timeout=30)

cannot() {
  printf '%s\n' "$*"
  exit 75
}

say() { printf 'rdma-lab: %s\n' "$*" >&2; }

# The last line that is not empty tells most about what has failed.
last_words() { grep -v '^[[:space:]]*$' "$log" | tail -n 1 || true; }

check_machine() {
  [[ $(uname -m) == x86_64 ]] || cannot "the lab's guest is x86_64, this machine is $(uname -m)"
  local codename
  # shellcheck source=/dev/null
  codename=$(. /etc/os-release 2>/dev/null && echo "${VERSION_CODENAME:-unknown}") || codename=unknown
  [[ $codename == "$SUITE" ]] ||
    cannot "the lab's guest is Debian $SUITE and shares libraries with this machine, which is '$codename'"
  ((EUID == 0)) || cannot "not root: debootstrap and chroot need it"
  local tool
  for tool in apt-get apt-cache dpkg gzip; do
    command -v "$tool" >/dev/null || cannot "there is no $tool on this machine"
  done
  chroot / true 2>/dev/null || cannot "chroot is not permitted here"
}

apt_get() {
  timeout 600 apt-get "${APT[@]}" "$@" >>"$log" 2>&1
}

# The package lists may be missing or old.
download() {
  apt_get "$@" || { apt_get update && apt_get "$@"; } || cannot "apt-get $* failed (no network?): $(last_words)"
}

get_host_tools() {
  say "downloading qemu, debootstrap and the kernel"
  mkdir -p "$cache/debs/partial" "$built/debs" "$built/host"
  if ! command -v "$QEMU" >/dev/null; then
    download install --yes --no-install-recommends --download-only -o "Dir::Cache::archives=$cache/debs" \
      qemu-system-x86
    for deb in "$cache"/debs/*.deb; do dpkg -x "$deb" "$built/host"; done
    [[ -x $built/host/usr/bin/$QEMU ]] || cannot "apt's qemu-system-x86 has no $QEMU"
  fi
  cd "$built/debs"
  download download debootstrap busybox-static
  local kernel
  kernel=$(apt-cache depends linux-image-amd64 | awk '/Depends: linux-image-[0-9]/ {print $2; exit}')
  [[ -n $kernel ]] || cannot "apt knows no linux-image-amd64"
  download download "$kernel"
  for deb in debootstrap*.deb busybox-static*.deb; do dpkg -x "$deb" "$built/host"; done
  dpkg -x linux-image-*.deb "$built/kernel"
  cd /
}

make_root() {
  say "making the guest's root filesystem"
  local mirror arguments
  # shellcheck disable=SC2016  # apt-get's own variable
  mirror=$(apt-get indextargets --format '$(REPO_URI)' "Codename: $SUITE" "Component: main" 2>/dev/null | head -n 1)
  arguments=(--variant=minbase "--cache-dir=$cache/debs" "--include=$(IFS=, && echo "${PACKAGES[*]}")")
  DEBOOTSTRAP_DIR=$built/host/usr/share/debootstrap timeout 900 "$built/host/usr/sbin/debootstrap" \
    "${arguments[@]}" "$SUITE" "$built/root" ${mirror:+"$mirror"} >>"$log" 2>&1 ||
    cannot "debootstrap failed: $(last_words)"
  mkdir -p "$built/root/usr/lib/modules"
  mv "$built"/kernel/lib/modules/* "$built/root/usr/lib/modules/"
  mv "$built"/kernel/boot/vmlinuz-* "$built/vmlinuz"
  kernel_version=$(basename "$built"/root/usr/lib/modules/*)
  chroot "$built/root" depmod "$kernel_version"
}

make_initrd() {
  local tree=$built/initrd module
  mkdir -p "$tree"/{bin,proc,sys,dev,new,lower,rw,modules}
  cp "$built/host/bin/busybox" "$tree/bin/busybox"
  cp "$here/initrd-init" "$tree/init"
  for module in "${MODULES[@]}"; do
    chroot "$built/root" modprobe --set-version "$kernel_version" --show-depends "$module"
  done | awk '/^insmod/ && !seen[$2]++ {print $2}' | while read -r module; do
    cp "$built/root$module" "$tree/modules/"
    basename "$module" >>"$tree/modules/order"
  done
  (cd "$tree" && find . | "$built/host/bin/busybox" cpio -o -H newc 2>>"$log" | gzip -1) >"$built/initrd.gz"
}

check_machine
key=$(cat "$here/setup.sh" "$here/initrd-init" | sha256sum | cut -c 1-32)
if [[ $(cat "$cache/ready/key" 2>/dev/null) == "$key" ]]; then exit 0; fi
say "setting up in $cache, once; this takes minutes"
rm -rf --one-file-system "$built" "$cache/ready"
mkdir -p "$built"
: >"$log"
get_host_tools
make_root
make_initrd
rm -rf --one-file-system "$built"/{debs,kernel,initrd}
echo "$key" >"$built/key"
mv "$built" "$cache/ready"
